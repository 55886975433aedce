"""Blocks with functional collectives: what one returns may be on its way until somebody waits for it."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import torchoffload
from torchoffload._fit.block.blocks import plan_block
from torchoffload._fit.block.graph import BlockPlan

distributed = pytest.importorskip("torch._C._distributed_c10d")
if not hasattr(distributed, "PythonCallbackWork"):
    pytest.skip("this torch has no work that Python completes", allow_module_level=True)

_library = torch.library.Library("c10d_functional", "FRAGMENT")
_library.define("late_double(Tensor x) -> Tensor")
_library.define("late_double_(Tensor(a!) x) -> Tensor(a!)")


def _late(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a tensor that has its value only once it was waited for."""

    def complete(_timeout: object) -> bool:
        target.copy_(value)
        return True

    dist.all_reduce(torch.zeros(()))  # by whose count a group is found that communicates in a block
    distributed._register_work(target, distributed.PythonCallbackWork(complete))
    return target


_library.impl("late_double", lambda x: _late(torch.full_like(x, torch.nan), 2 * x), "CPU")
_library.impl("late_double_", lambda x: _late(x, 2 * x), "CPU")
_operators = torch.ops.c10d_functional


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def all_are_waited_for() -> Iterator[None]:
    """Nobody waits for what is left in the registry, and so it lives for ever."""
    before = distributed._get_work_registry_size()
    yield
    assert distributed._get_work_registry_size() == before


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: object, x: torch.Tensor) -> torch.Tensor:
        return _operators.late_double(x)

    @staticmethod
    def backward(_ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


def wait(x: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(x)


class Block(nn.Module):
    """``count`` collectives at once behind the middle, all waited for at the end."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up, self.down, self.count = nn.Linear(8, 64), nn.Linear(64, 8), count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        late = [_Double.apply(h * (1 + number)) for number in range(self.count)]
        for each in late:
            with torch.no_grad():
                wait(each)
            h = h + torch.sin(each)
        y = _Double.apply(self.down(h))
        with torch.no_grad():
            wait(y)
        return x + y


def gradients(model: nn.Module, steps: int, after_step: Callable[[], None] = lambda: None) -> list[torch.Tensor]:
    torch.manual_seed(1)
    for _ in range(steps):
        model(torch.randn(16, 8)).square().mean().backward()
        after_step()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("part", [0.0, 0.5])
def test_gradients_are_the_same_and_nothing_is_left(count: int, part: float):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(count) for _ in range(3)))
    before = distributed._get_work_registry_size()
    steps = 12
    stock = gradients(model, steps)
    model.zero_grad()
    with torchoffload.fit(model, 1 << 50, move=False) as handle:
        has_replanned = False

        def after_step() -> None:
            nonlocal has_replanned
            if handle.phase == "trials" and not has_replanned:
                points, has_replanned = handle.frontier(), True
                least, most = points[0].memory_bytes, points[-1].memory_bytes
                handle.replan(int((least + part * (most - least)) / 0.96) + 1)
            assert distributed._get_work_registry_size() == before  # tests of mutants leave some

        fitted = gradients(model, steps, after_step)
        assert handle.plan is not None
        assert handle.plan.recompute_s > 0
    for one, other in zip(stock, fitted, strict=True):
        assert torch.equal(one, other)


class _SavesIt(torch.autograd.Function):
    """Saves what a collective returns, which nobody has waited for yet."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0]


class Late(nn.Module):
    """Returns what somebody else is to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _SavesIt.apply(torch.tanh(self.up(x)))


def test_what_is_waited_for_behind_the_block_is_waited_for_in_the_replay():
    """Also by nobody else: see the fixture."""
    found = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        block = Late()
        if is_planned:
            plan_block(block, BlockPlan(operators=()))
        y = block(torch.randn(16, 8))
        wait(y.detach())
        y.sum().backward()
        found.append([each.grad for each in block.parameters()])
    assert all(map(torch.equal, *found))


_unjoined: list[tuple[torch.Tensor, torch.Tensor]] = []


def _joined_later(x: torch.Tensor) -> torch.Tensor:
    """An operator that fills its output on a stream of its own: nothing but its program knows when."""
    output = torch.full_like(x, torch.nan)
    _unjoined.append((output, 2 * x))
    return output


def join() -> None:
    """Past the dispatcher, as a kernel on another stream would."""
    for target, value in _unjoined:
        target.numpy()[:] = value.numpy()
    _unjoined.clear()


_other_library = torch.library.Library("torchoffload_collectives", "FRAGMENT")
_other_library.define("joined_later(Tensor x) -> Tensor")
_other_library.impl("joined_later", _joined_later, "CPU")


@pytest.mark.parametrize("operator", ["late_double", "joined_later"])
def test_a_selective_checkpoint_saves_what_was_waited_for(operator: str, tmp_path: Path):
    """As the mode sees the output it has no values yet: a copy that began at once would move what is there before."""
    is_collective = operator == "late_double"
    saved = _operators.late_double if is_collective else torch.ops.torchoffload_collectives.joined_later

    def block(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = saved(x)
            if is_collective:
                wait(y)
            else:
                join()
        return (x * y).sin()

    def gradient(contexts: Any, around: contextlib.AbstractContextManager[Any]) -> torch.Tensor:
        x = torch.full((4096,), 2.0, requires_grad=True)
        with around:
            context_fn = functools.partial(contexts, [saved.default])
            loss = checkpoint(block, x, use_reentrant=False, context_fn=context_fn).sum()
        loss.backward()
        assert x.grad is not None
        return x.grad

    stock = gradient(create_selective_checkpoint_contexts, contextlib.nullcontext())
    options: dict[str, Any] = {"tier": "disk", "disk_dir": tmp_path, "min_offload_size": 0, "learn": False}
    moving = torchoffload.OffloadActivations(offload_window_bytes=0, **options)
    assert torch.equal(gradient(torchoffload.selective_checkpoint_context_fn, moving), stock)
