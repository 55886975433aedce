"""selective_checkpoint_context_fn: what is open around it, what is inside of it, and torch.compile."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
)

import torchoffload
from devices import Device
from gradients import Run, assert_same_gradients
from models import Block
from selective import (
    HAS_CPU_OFFLOAD,
    NBYTES,
    PRODUCTS,
    aten,
    blocks,
    needs_cpu_offload,
    policy_of,
    selective,
    two_layers,
)

# ---- where no context is open ----


class Counted(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


def products_run(policy: Any, context: Any = None, **options: Any) -> int:
    """Of forward and recomputation; backward multiplies four times."""
    x, weight = torch.rand(32, 32, requires_grad=True), nn.Parameter(torch.rand(32, 32))
    context_fn = functools.partial(torchoffload.selective_checkpoint_context_fn, policy, **options)
    with Counted() as counted:
        if context is None:
            loss = checkpoint(two_layers, x, weight, use_reentrant=False, context_fn=context_fn).sum()
        else:
            with context:
                loss = checkpoint(two_layers, x, weight, use_reentrant=False, context_fn=context_fn).sum()
        loss.backward()
    return counted.operators.count(aten.mm.default) - 4


def test_without_a_context_it_saves_where_it_is():
    torchoffload.reset_stats()
    assert products_run(policy_of({})) == 4
    assert products_run(PRODUCTS) == 2
    if HAS_CPU_OFFLOAD:
        assert products_run(policy_of({aten.mm.default: "PREFER_CPU_OFFLOAD"})) == 2
    assert torchoffload.stats().handles == 0


@needs_cpu_offload
def test_must_without_a_context_says_what_to_do():
    must = policy_of({aten.mm.default: "MUST_CPU_OFFLOAD"})
    with pytest.raises(
        RuntimeError, match=r"MUST_CPU_OFFLOAD for aten\.mm\.default, and no OffloadActivations is open"
    ):
        products_run(must)


@needs_cpu_offload
def test_must_with_mutation_says_what_to_do():
    must = policy_of({aten.mm.default: "MUST_CPU_OFFLOAD"})
    with pytest.raises(RuntimeError, match="what is written to after it was saved has to stay"):
        products_run(must, torchoffload.NoOpManager(), allow_cache_entry_mutation=True)


@needs_cpu_offload
def test_must_where_all_was_asked_to_stay(device_under_test: Device, monkeypatch: pytest.MonkeyPatch):
    must = policy_of({aten.mm.default: "MUST_CPU_OFFLOAD"})
    assert products_run(must, torchoffload.NoOpManager()) == 2
    monkeypatch.setenv("TORCHOFFLOAD_DISABLE", "1")
    assert products_run(must) == 2
    assert products_run(must, device_under_test.context()) == 2


# ---- around it and inside ----


def test_a_no_op_manager_inside_a_context(device_under_test: Device):
    def program(run: Run):
        x, weight = run.leaf(32, 32), run.parameter(32, 32)
        context_fn = selective(run, PRODUCTS)
        with run.offload():
            y = x.exp()
            with run.noop():
                z = checkpoint(two_layers, y.sin(), weight, use_reentrant=False, context_fn=context_fn)
            loss = z.exp().sum()
        loss.backward()
        return x.grad, weight.grad

    # The results of both exp; y is also what sin saves, inside.
    assert_same_gradients(program, device=device_under_test, moved_bytes=2 * NBYTES)


def test_a_context_inside_the_checkpointed_function(device_under_test: Device):
    def program(run: Run):
        context = run.offload()

        def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            with context:
                return two_layers(x, weight)

        x, weight = run.leaf(32, 32), run.parameter(32, 32)
        y = checkpoint(function, x, weight, use_reentrant=False, context_fn=selective(run, PRODUCTS))
        y.sum().backward()
        return x.grad, weight.grad

    # x, both products, sine, tanh and exp: what is saved in the context is no longer the checkpoint's to compute again.
    assert_same_gradients(program, device=device_under_test, moved_bytes=6 * NBYTES)


def test_nested_selective_checkpoints(device_under_test: Device):
    def program(run: Run):
        inner = selective(run, [aten.sin.default])

        def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            y = checkpoint(two_layers, x, weight, use_reentrant=False, context_fn=inner)
            return two_layers(y, weight)

        return blocks(run, PRODUCTS, function=function)

    assert_same_gradients(program, device=device_under_test)


def test_several_forwards_are_alive(device_under_test: Device):
    def program(run: Run):
        x, weight, context_fn = run.leaf(32, 32), run.parameter(32, 32), selective(run, PRODUCTS)
        losses = []
        for _ in range(3):
            with run.offload():
                y = checkpoint(two_layers, x.exp(), weight, use_reentrant=False, context_fn=context_fn)
                losses.append(y.sum())
        for loss in (losses[1], losses[0]):  # the third is dropped
            loss.backward()
        return x.grad, weight.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=9 * NBYTES)


class TwoLayers(nn.Module):
    """A weight of its own: one given to the checkpoint is another tensor in the recomputation, under any hooks."""

    def __init__(self, layer: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(32, 32) - 0.5)
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, self.weight) @ self.weight


def checkpointed_model(run: Run, policy: Any, layer: Callable[..., torch.Tensor]) -> Any:
    x, model, context_fn = run.leaf(32, 32), run.module(lambda: TwoLayers(layer)), selective(run, policy)
    for _ in range(2):
        with run.offload():
            y = checkpoint(model, x.exp(), use_reentrant=False, context_fn=context_fn)
            loss = checkpoint(model, y, use_reentrant=False, context_fn=context_fn).float().sum()
        loss.backward()
    return x.grad, model


def test_dropout_and_autocast(device_under_test: Device):
    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.dropout((x @ weight).float(), 0.3).sin()

    def program(run: Run):
        with torch.autocast(run.device.type, torch.bfloat16):
            return checkpointed_model(run, [*PRODUCTS, aten.native_dropout.default], layer)

    assert_same_gradients(program, device=device_under_test)


def test_only_a_part_is_asked_for(device_under_test: Device):
    """Recomputation stops early, and branches are not taken: what nobody asked for is given back."""

    def function(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x @ weight).sin(), (x @ weight.t()).cos()

    def program(run: Run):
        x, weight = run.leaf(32, 32), run.parameter(32, 32)
        with run.offload():
            first, _ = checkpoint(function, x.exp(), weight, use_reentrant=False, context_fn=selective(run, PRODUCTS))
        return torch.autograd.grad(first.sum(), (x, weight))

    assert_same_gradients(program, device=device_under_test, moved_bytes=3 * NBYTES)


def test_modules_chosen_by_offload_modules(device_under_test: Device):
    def program(run: Run):
        blocks = run.module(lambda: nn.Sequential(Block(), Block()))
        x, context_fn = run.leaf(2, 16, 32), selective(run, [aten.addmm.default])

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = blocks

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for block in self.blocks:
                    x = checkpoint(block, x, use_reentrant=False, context_fn=context_fn)
                return x

        model = Model()
        if not run.stock:
            options = run.offload().options.as_keywords()
            torchoffload.offload_modules(model, model, **options)
        model(x.exp()).square().sum().backward()
        return x.grad, blocks

    # Of each block the input and four products: of 3, 1, 4 and 1 times its width.
    stats = assert_same_gradients(program, device=device_under_test)
    assert stats.bytes_offloaded >= 2 * 10 * NBYTES


# ---- torch.compile ----


def compiled(function: Callable[..., Any], backend: str = "aot_eager") -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True)


@pytest.mark.slow
@pytest.mark.devices("disk", "cuda")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["MUST_SAVE", pytest.param("MUST_CPU_OFFLOAD", marks=needs_cpu_offload)])
def test_inside_a_compiled_function_it_is_torchs_own(device_under_test: Device, backend: str, name: str):
    chosen = policy_of({aten.mm.default: name}, "PREFER_RECOMPUTE")
    moved = {}

    def program(run: Run, make: Callable[..., Any]) -> Any:
        x, weight = run.leaf(32, 32), run.parameter(32, 32)

        def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            context_fn = functools.partial(make, chosen)
            return checkpoint(two_layers, x.exp(), weight, use_reentrant=False, context_fn=context_fn).sin()

        step = compiled(forward, backend)
        for _ in range(2):
            with run.offload():
                loss = step(x, weight).sum()
            loss.backward()
        return x.grad, weight.grad

    for make in (create_selective_checkpoint_contexts, torchoffload.selective_checkpoint_context_fn):
        moved[make] = assert_same_gradients(
            functools.partial(program, make=make), device=device_under_test
        ).bytes_offloaded
    assert len(set(moved.values())) == 1


@pytest.mark.slow
@pytest.mark.devices("disk", "simulated-late", "cuda")
def test_around_a_compiled_block(device_under_test: Device):
    def program(run: Run):
        return checkpointed_model(run, PRODUCTS, compiled(lambda x, weight: (x @ weight).sin()))

    assert_same_gradients(program, device=device_under_test)
