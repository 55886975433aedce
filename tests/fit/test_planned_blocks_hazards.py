"""Planned blocks that do what a recomputation must not repeat, or does not see: the same bits as stock, or an error."""

import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from devices import Device
from gradients import Run, assert_same_gradients
from planned_blocks import WIDTH, Corner, Normalised, corners, record
from torchoffload._fit.block import record as record_module
from torchoffload._fit.block.blocks import plan_block, unplan_block
from torchoffload._fit.block.graph import BlockPlan, block_frontier

pytestmark = pytest.mark.devices("disk", "simulated-late", "cuda")
Use = Callable[[Any, torch.Tensor], torch.Tensor]


class Linears(nn.Module):
    """Two linear layers with a function of the test's between them, and a buffer."""

    def __init__(self, function: Use) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.ones(WIDTH))
        self.function = function
        self.other_way = False
        self.cache: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.function(self, self.up(x)))


def every_plan(block: nn.Module, x: torch.Tensor) -> list[Corner]:
    """The plans of a recorded call for several guesses of what its operators take, which cover more than one guess."""
    recorded = record(block, x)
    plans: dict[BlockPlan, Corner] = {}
    for guess in range(4):
        for number, call in enumerate(recorded.operators):
            call.duration_ns = 1 + (number * 7919 + guess * 104729) % 1000 ** (guess % 2 + 1)
        plans |= {corner.plan: corner for corner in block_frontier(recorded)}
    return list(plans.values())


def assert_right(
    device: Device,
    make: Callable[[], nn.Module],
    *,
    change: Callable[[Any], None] = lambda block: None,
    use: Use = lambda block, x: block(x),
    plans: int = 1,
    **moved: Any,
) -> None:
    """Every plan of the block comes out as stock; there have to be at least so many."""

    def program(run: Run):
        x = run.leaf(4, 8, WIDTH)
        count = len(every_plan(run.module(make), x))
        assert count >= plans
        results = []
        for number in range(count):
            block = run.module(make)
            corner = every_plan(block, x)[number]
            change(block)
            if not run.stock:
                plan_block(block, corner.plan)
            torch.manual_seed(3)
            with run.offload():
                y = use(block, x)
            y.square().mean().backward()
            results += [x.grad, torch.rand(1), dict(block.named_buffers()), [each.grad for each in block.parameters()]]
            x.grad = None
            unplan_block(block)
        return results

    assert_same_gradients(program, device=device, **(moved or {"min_moved_fraction": 0.05}))


def other_way(block: Any) -> None:
    block.other_way = True


def cast_and_scale(block: Any, h: torch.Tensor) -> torch.Tensor:
    weight = block.down.weight.to(torch.float64)
    weight.mul_(3)
    return torch.sin(h) * weight.float().mean()


def draw_from_own_generator(block: Any, h: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator(h.device).manual_seed(4)
    return torch.sin(h * torch.rand(h.shape, generator=generator, device=h.device)) * torch.cos(h)


def assign_buffer(block: Any, h: torch.Tensor) -> torch.Tensor:
    block.seen = block.seen * 0.9 + h.detach().mean((0, 1))
    return torch.sin(h) * block.seen


def grow_a_cache(block: Any, h: torch.Tensor) -> torch.Tensor:
    if block.cache is None or block.cache.device != h.device:
        block.cache = torch.arange(h.shape[1], device=h.device).float().sin()[:, None]
    return torch.exp(h * block.cache)


def ask_for_a_gradient(block: Any, h: torch.Tensor) -> torch.Tensor:
    (force,) = torch.autograd.grad(torch.sin(h).sum(), h, create_graph=True)
    return torch.cos(h) * force


@pytest.mark.parametrize("function", [cast_and_scale, draw_from_own_generator, assign_buffer, grow_a_cache])
def test_what_a_block_does_is_done_once(device_under_test: Device, function: Use):
    assert_right(device_under_test, lambda: Linears(function))


def test_a_block_that_asks_for_a_gradient_in_its_forward(device_under_test: Device):
    """It is computed again while its forward still runs."""
    assert_right(device_under_test, lambda: Linears(ask_for_a_gradient))


def write_to_temporary_or_buffer(block: Any, h: torch.Tensor) -> torch.Tensor:
    target = block.seen if block.other_way else block.seen.clone()
    target.add_(1)
    return torch.sin(h) * (target.detach().clone() + 0)


def write_past_the_version(block: Any, h: torch.Tensor) -> torch.Tensor:
    h = h + 1
    if block.other_way:
        h.data.mul_(3)
    return torch.sin(h * 2)


def write_through_an_unsafe_view(block: Any, h: torch.Tensor) -> torch.Tensor:
    h = h + 1
    if block.other_way:
        h.unsafe_chunk(2)[0].mul_(3)
    return torch.sin(h * 2)


@pytest.mark.parametrize(
    "function", [write_to_temporary_or_buffer, write_past_the_version, write_through_an_unsafe_view]
)
def test_a_write_that_did_not_happen_when_the_plan_was_made(device_under_test: Device, function: Use):
    assert_right(device_under_test, lambda: Linears(function), change=other_way)


def test_a_write_to_a_view_with_a_version_of_its_own(device_under_test: Device):
    """A linear layer without a bias returns such a view of a product."""

    def both(block: Any, x: torch.Tensor) -> torch.Tensor:
        found: list[torch.Tensor] = []
        handle = block.up.register_forward_hook(lambda module, args, output: found.append(output))
        y = block(x)
        handle.remove()
        with torch.no_grad():
            found[0].mul_(2)
        return y

    assert_right(device_under_test, lambda: Linears(lambda block, h: torch.sin(h + 1)), use=both)


def evaluate(block: Any) -> None:
    block.norm.eval()


def train_after_evaluation() -> nn.Module:
    block = Normalised()
    block.norm.eval()
    return block


@pytest.mark.parametrize(
    ("make", "change"),
    [(Normalised, evaluate), (train_after_evaluation, lambda block: block.norm.train())],
    ids=["training to evaluation", "evaluation to training"],
)
def test_running_statistics_are_updated_once_in_either_mode(device_under_test: Device, make, change):
    assert_right(device_under_test, make, change=change)


class EndsInNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.sin(self.up(x)))


def test_a_residual_is_added_in_place_to_what_must_not_run_again(device_under_test: Device):
    def use(block: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = block(x)
        y += x
        return y

    assert_right(device_under_test, EndsInNorm, use=use)


def test_other_parameters_for_one_call(device_under_test: Device):
    def use(block: Any, x: torch.Tensor) -> torch.Tensor:
        others = {name: value * 2 for name, value in block.named_parameters()}
        y: torch.Tensor = torch.func.functional_call(block, others, (x,))
        return y

    assert_right(device_under_test, lambda: Linears(lambda block, h: torch.exp(h).sin()), use=use)


@pytest.mark.devices("disk")
def test_a_parameter_that_changed_before_backward_is_an_error(device_under_test: Device):
    block = Linears(lambda block, h: torch.sin(h + block.down.bias))
    x = torch.ones(4, 8, WIDTH, requires_grad=True)
    plan_block(block, corners(block, x)[0].plan)
    y = block(x)
    with torch.no_grad():
        block.down.bias.add_(1)
    with pytest.raises(
        RuntimeError, match=r"the parameter down.bias of shape \(32,\) of a Linears was written to after"
    ):
        y.sum().backward()


def test_a_write_to_somebody_elses_tensor_is_made_once(device_under_test: Device):
    def make() -> nn.Module:
        others: dict[torch.device, torch.Tensor] = {}

        def function(block: Any, h: torch.Tensor) -> torch.Tensor:
            other = others.setdefault(h.device, torch.zeros(WIDTH, device=h.device))
            if block.other_way:
                other.add_(1)
            return torch.sin(h) * other.exp()

        return Linears(function)

    assert_right(device_under_test, make, change=other_way)


@pytest.mark.devices("disk")
def test_what_the_program_changes_before_backward_does_not_matter(device_under_test: Device):
    class Switch:
        is_on = False

    def program(run: Run):
        Switch.is_on = False
        block = run.module(lambda: Linears(lambda block, h: torch.cos(torch.sin(h)) if Switch.is_on else torch.sin(h)))
        x = run.leaf(4, 8, WIDTH)
        if not run.stock:
            plan_block(block, corners(block, x)[0].plan)
        with run.offload():
            y = block(x)
        Switch.is_on = True
        y.sum().backward()
        return [x.grad, *(each.grad for each in block.parameters())]

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.05)


def fill_past_the_dispatcher(block: Any, h: torch.Tensor) -> torch.Tensor:
    factor = torch.zeros(WIDTH)
    factor.numpy()[:] = 2
    return torch.sin(h) * factor


@pytest.mark.devices("disk")
def test_a_value_that_is_filled_past_the_dispatcher_comes_out_differently_and_is_kept(device_under_test: Device):
    recorded = record(Linears(fill_past_the_dispatcher), torch.ones(4, 8, WIDTH))
    assert torch.ops.aten.zeros.default in [call.operator for call in recorded.operators if call.differs]
    assert_right(device_under_test, lambda: Linears(fill_past_the_dispatcher))


@pytest.mark.devices("disk")
def test_what_the_host_reads_is_computed_again(device_under_test: Device):
    """On a CPU tolist() reads memory past the dispatcher."""
    assert_right(
        device_under_test,
        lambda: Linears(lambda block, h: torch.sin(h) * functional.softmax(h, -1).sum(0).mean(0).tolist()[0]),
    )


class Made:
    """An attribute of a class: a recomputation does not put back what is in it."""

    outputs: ClassVar[list[weakref.ref[torch.Tensor]]] = []


@pytest.mark.devices("disk")
def test_a_step_leaves_nothing_alive(device_under_test: Device):
    """A call is held by handles that autograd's own objects hold, where the garbage collector does not see."""
    block = Linears(lambda block, h: torch.sigmoid(torch.exp(torch.sin(h + 1)) * 2))
    x = torch.ones(4, 8, WIDTH, requires_grad=True)
    for corner in every_plan(block, x):
        plan_block(block, corner.plan)
        Made.outputs.clear()
        handle = block.up.register_forward_hook(lambda module, args, output: Made.outputs.append(weakref.ref(output)))
        block(x).sum().backward()
        handle.remove()
        gc.collect()
        assert [each() for each in Made.outputs] == [None]
        unplan_block(block)


# ---- how long values that are made again live ----


def test_a_value_is_dropped_as_soon_as_its_node_has_computed(device_under_test: Device):
    """As under a checkpoint: autograd sums the node's results, which takes memory, before it drops the value."""
    seen: list[Any] = []

    def watched(block: Any, h: torch.Tensor) -> torch.Tensor:
        result = torch.sin(h)
        node = result.grad_fn
        node.register_prehook(lambda _: seen.append(StorageWeakRef(node._saved_self.untyped_storage())))
        node.register_hook(lambda *_: seen.append(seen[0].expired()))
        return result

    def program(run: Run):
        block = run.module(lambda: Linears(watched))
        x = run.leaf(64, 8, WIDTH)
        if not run.stock:
            plan_block(
                block, corners(run.module(lambda: Linears(lambda _, h: torch.sin(h))), x.detach().clone())[0].plan
            )
        seen.clear()
        with run.offload():
            y = block(x)
        y.sum().backward()
        if not run.stock:
            assert seen[1] is True
        return [x.grad, *(each.grad for each in block.parameters())]

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.05)


class AsksTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0] + grad * ctx.saved_tensors[0]


@pytest.mark.parametrize("asks_first", [True, False])
def test_a_node_or_a_hook_may_ask_again(device_under_test: Device, asks_first: bool):
    def hooked(block: Any, h: torch.Tensor) -> torch.Tensor:
        result = torch.sin(h)
        node, times = result.grad_fn, []
        ask = lambda *_: times.append(node._saved_self.sum())  # noqa: E731
        node.register_prehook(ask) if asks_first else node.register_hook(ask)
        return AsksTwice.apply(result)

    def program(run: Run):
        block = run.module(lambda: Linears(hooked))
        x = run.leaf(4, 8, WIDTH)
        if not run.stock:
            plan_block(block, corners(block, x.detach().clone())[0].plan)
        with run.offload():
            y = block(x)
        y.sum().backward()
        return [x.grad, *(each.grad for each in block.parameters())]

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.05)


# ---- results that come out differently each time ----

CALLS: list[int] = []


@torch.library.custom_op("torchoffload_test::scaled_with_state", mutates_args=())
def scaled_with_state(x: torch.Tensor, state_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A result and a state that nobody has set, as PyTorch's attention returns without dropout."""
    CALLS.append(state_bytes)
    return x * 2, torch.full((state_bytes,), len(CALLS) % 251, dtype=torch.uint8, device=x.device)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    result, state = output
    ctx.mark_non_differentiable(state)
    ctx.save_for_backward(result, state)


def _gradient(ctx: Any, grad: torch.Tensor, _state: Any) -> tuple[torch.Tensor, None]:
    result, state = ctx.saved_tensors
    return grad * result + state[0], None


scaled_with_state.register_autograd(_gradient, setup_context=_save)


def attend(state_bytes: int) -> Use:
    return lambda block, h: torch.sin(scaled_with_state(torch.sin(h), state_bytes)[0])


@pytest.fixture
def is_pytorchs_own(monkeypatch: pytest.MonkeyPatch):
    """Have the operator count as one of PyTorch's: on a CPU none of these returns such a state."""
    monkeypatch.setattr(record_module, "_DRAW_FROM_GENERATORS", ("aten", "prims", "torchoffload_test"))


def test_an_operator_of_another_library_is_not_called_again_if_a_small_result_differs(device_under_test: Device):
    """It may have drawn from that state, and its other result may be the same by chance."""
    recorded = record(Linears(attend(16)), torch.zeros(4, 8, WIDTH))
    (call,) = [each for each in recorded.operators if "scaled_with_state" in str(each.operator)]
    assert (call.differs, call.held) == (True, frozenset())


@pytest.mark.parametrize("state_bytes", [16, 1 << 17])
def test_a_state_that_nobody_has_set_is_held(device_under_test: Device, is_pytorchs_own: None, state_bytes: int):
    """If it is small, the operator runs again for its other result."""
    is_small = state_bytes == 16
    block = Linears(attend(state_bytes))
    recorded = record(block, torch.ones(4, 8, WIDTH))
    (call,) = [each for each in recorded.operators if "scaled_with_state" in str(each.operator)]
    assert (call.differs, len(call.held)) == (not is_small, is_small)
    least = corners(block, torch.ones(4, 8, WIDTH))[0]
    assert (least.kept_bytes == 0) is is_small

    def program(run: Run):
        CALLS.clear()
        block = run.module(lambda: Linears(attend(state_bytes)))
        x = run.leaf(4, 8, WIDTH)
        if not run.stock:
            plan_block(block, least.plan)
        with run.offload():
            y = block(x)
        y.sum().backward()
        if not run.stock:
            assert len(CALLS) == (2 if is_small else 1)
        return [x.grad, *(each.grad for each in block.parameters())]

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.05)


def test_a_call_that_leaves_its_plan_holds_such_a_state_too(device_under_test: Device, is_pytorchs_own: None):
    def attend_another_way(block: Any, h: torch.Tensor) -> torch.Tensor:
        return attend(16)(block, torch.cos(h) if block.other_way else h)

    def program(run: Run):
        CALLS.clear()
        block = run.module(lambda: Linears(attend_another_way))
        x = run.leaf(4, 8, WIDTH)
        if not run.stock:
            plan = corners(block, x.detach().clone())[0].plan
            assert plan.held
            assert not plan.final
            plan_block(block, plan)
            CALLS.clear()
        block.other_way = True
        with run.offload():
            y = block(x)
        y.sum().backward()
        return [x.grad, *(each.grad for each in block.parameters())]

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.05)


@pytest.mark.devices("disk", "simulated-late")
@pytest.mark.parametrize("stays", [True, False])
def test_a_result_that_is_never_made_again_moves_if_planned(device_under_test: Device, stays: bool):
    """Its memory is free until the call is computed again, although the recomputation reads it."""
    seen: list[Any] = []

    def change_past_the_dispatcher(block: Any, h: torch.Tensor) -> torch.Tensor:
        changed = torch.sin(h)
        changed.detach().numpy()[:] *= 2
        seen[:] = [StorageWeakRef(changed.untyped_storage())]
        return torch.cos(changed.view(-1)).view(h.shape)

    def program(run: Run):
        block = run.module(lambda: Linears(change_past_the_dispatcher))
        x = run.leaf(64, 8, WIDTH)
        if not run.stock:
            plan = corners(block, x.detach().clone())[0].plan
            assert plan.final
            plan_block(block, dataclasses.replace(plan, moved=frozenset() if stays else plan.kept))
        with run.offload(offload_window_bytes=0):
            y = block(x)
        if not run.stock:
            assert seen[0].expired() is not stays
        y.sum().backward()
        return [x.grad, *(each.grad for each in block.parameters())]

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.05)


@pytest.mark.devices("cuda")
def test_attention_without_dropout_is_computed_again(device_under_test: Device):
    """PyTorch returns a random state with it that nobody has set."""

    def attend_for_real(_block: Any, h: torch.Tensor) -> torch.Tensor:
        heads = h.view(*h.shape[:2], 2, WIDTH // 2).transpose(1, 2).bfloat16()
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            attended = functional.scaled_dot_product_attention(heads, heads, heads)
        return attended.transpose(1, 2).reshape(h.shape).float()

    recorded = record(Linears(attend_for_real).cuda(), torch.randn(4, 33, WIDTH, device="cuda"))
    assert not any(call.differs for call in recorded.operators), recorded.operators
    assert block_frontier(recorded)[0].kept_bytes == 0
    assert_right(device_under_test, lambda: Linears(attend_for_real), min_moved_fraction=1e-9)


@pytest.mark.devices("disk", "simulated-late")
def test_a_result_that_is_never_made_again_may_be_written_to_if_autograd_has_not_saved_it(device_under_test: Device):
    """It stays, so that the call notes the write of a later block, and keeps the former value."""

    class ReturnsBoth(Linears):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.seen.add_(1)
            scaled = self.up(x) * self.seen  # reads what the block has written, and so runs once
            view = scaled.view(-1).view(x.shape)
            return self.down(torch.exp(view + 1) * torch.sigmoid(view - 1)), scaled

    class Writes(Linears):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(self.up(x.mul_(3)))

    def program(run: Run):
        first, second = (run.module(lambda kind=kind: kind(lambda _, h: h)) for kind in (ReturnsBoth, Writes))
        x = run.leaf(64, 8, WIDTH)
        if not run.stock:
            plan = corners(first, x.detach().clone())[0].plan
            plan_block(first, dataclasses.replace(plan, moved=plan.kept))
            plan_block(second, BlockPlan(operators=()))
        with run.offload(offload_window_bytes=0):
            y, scaled = first(x)
            z = second(scaled)
        (y.sum() + z.sum()).backward()
        return [x.grad, *(each.grad for block in (first, second) for each in block.parameters())]

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.01)
