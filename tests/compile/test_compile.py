"""torch.compile: where the context may stand, what it must not cost, and PyTorch's own options beside it."""

import contextlib
import functools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._dynamo.compiled_autograd
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from devices import Device
from gradients import Run, assert_same_gradients
from models import Block, TinyGpt, tokens_and_labels, update

pytestmark = [pytest.mark.slow, pytest.mark.devices("disk", "cuda")]
BACKENDS = ["aot_eager", "inductor"]


def compiled(function: Callable, backend: str = "inductor", **options) -> Callable:
    """`function` compiled anew: nothing that another run compiled is found again."""
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(function, backend=backend, **options)


@contextlib.contextmanager
def nothing_compiled_again() -> Iterator[None]:
    """Inside, a recompilation is an error, and afterwards neither a graph nor a break was added."""
    before = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    assert (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())) == before


def two_layers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    hidden = (x @ weight).sin()
    return (hidden @ weight).tanh().exp() * hidden


def one_layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x @ weight).sin() * x


# ---- where the context stands ----


@pytest.mark.parametrize("backward", ["inside", "after"])
def test_a_whole_compiled_model_in_the_context(device_under_test: Device, backward: str):
    def program(run: Run):
        model = run.module(lambda: TinyGpt(depth=1))
        step = compiled(model, fullgraph=True)
        for _ in range(2):
            with run.offload():
                loss = step(*tokens_and_labels(run))
                if backward == "inside":
                    loss.backward()
            if backward == "after":
                loss.backward()
            run.check(loss=loss, step=model)
            update(model)
        return model

    # A compiled region packs as one operator: a backward inside finds its copies still pending, and they are not made.
    kept = {"moved_bytes": 0, "kept_reason": "pending"} if backward == "inside" else {"min_moved_fraction": 0.9}
    assert_same_gradients(program, device=device_under_test, **kept)


@pytest.mark.parametrize("backward", ["inside", "after"])
def test_compiled_blocks_inside_an_eager_model(device_under_test: Device, backward: str):
    """Eager operators between the blocks save what a block takes and what it returns, so records are shared."""

    def program(run: Run):
        blocks = [run.module(Block) for _ in range(2)]
        torch._dynamo.reset()
        for block in blocks:
            block.compile(fullgraph=True)
        x = run.leaf(2, 16, 32)
        for _ in range(2):
            with run.offload():
                y = x
                for block in blocks:
                    y = (block(y.sin()) * y).tanh()
                loss = y.square().sum()
                if backward == "inside":
                    loss.backward()
            if backward == "after":
                loss.backward()
            run.check(loss=loss)
        return *blocks, x.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.9)


def hooks_that_change_nothing() -> torch.autograd.graph.saved_tensors_hooks:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_context_is_entered_inside_the_compiled_function(device_under_test: Device, backend: str):
    """Dynamo knows no context of ours: it breaks the graph there, and what is called inside is compiled by itself."""

    def program(run: Run):
        x, weight = run.leaf(32, 32), run.parameter(32, 32)
        # Stock breaks its graph at the same place: what inductor fuses, and with it the last bits, depends on that.
        context = hooks_that_change_nothing() if run.stock else run.offload()

        def forward() -> torch.Tensor:
            hidden = x.exp()
            with context:
                hidden = two_layers(hidden, weight)
            return hidden.sum()

        step = compiled(forward, backend)
        for _ in range(2):
            step().backward()
            run.check(gradient=x.grad)
        assert counters["stats"]["unique_graphs"] >= 1, "two_layers is still compiled"
        return x.grad, weight.grad

    assert_same_gradients(program, device=device_under_test)


def test_the_context_inside_a_full_graph_is_dynamos_own_error(device_under_test: Device):
    context, x = device_under_test.context(), torch.ones(8, device=device_under_test.torch_device)

    def forward() -> torch.Tensor:
        with context:
            return x.exp()

    with pytest.raises(torch._dynamo.exc.Unsupported, match="OffloadActivations"):
        compiled(forward, "aot_eager", fullgraph=True)()


def test_a_no_op_manager_around_a_compiled_block_keeps_what_it_saves(device_under_test: Device):
    def program(run: Run):
        x, weight = run.leaf(32, 32), run.parameter(32, 32)
        block = compiled(two_layers, fullgraph=True)
        with run.offload():
            hidden = x.exp()
            with run.noop():
                hidden = block(hidden, weight)
            loss = hidden.exp().sum()
        loss.backward()
        return x.grad, weight.grad

    # The results of the two exp; the first is the block's input too.
    assert_same_gradients(program, device=device_under_test, moved_bytes=2 * 32 * 32 * 4)


# ---- what it must not cost ----


def test_entering_and_leaving_neither_breaks_a_graph_nor_recompiles(device_under_test: Device):
    def program(run: Run):
        x, weight = run.leaf(32, 32), run.parameter(32, 32)
        block = compiled(two_layers, fullgraph=True)
        block(x, weight).sum().backward()
        with nothing_compiled_again():
            for enters in (True, False, True, True):
                with run.offload() if enters else contextlib.nullcontext():
                    loss = block(x, weight).sum()
                loss.backward()
                with run.offload(), run.noop():
                    loss = block(x, weight).sum()
                loss.backward()
        return x.grad, weight.grad

    # x, x @ weight and its sine, hidden @ weight: in three of the steps, and nothing under the NoOpManager.
    assert_same_gradients(program, device=device_under_test, moved_bytes=3 * 4 * 32 * 32 * 4)


def test_compiled_inside_the_context_runs_outside_it_without_recompiling(device_under_test: Device):
    def program(run: Run):
        x, weight = run.leaf(32, 32), run.parameter(32, 32)
        block = compiled(two_layers, fullgraph=True)
        with run.offload():
            loss = block(x, weight).sum()
        loss.backward()
        with nothing_compiled_again():
            block(x, weight).sum().backward()
        return x.grad, weight.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=4 * 32 * 32 * 4)


def test_dynamic_shapes_are_compiled_once(device_under_test: Device):
    """The sizes that a dynamic region saves are no tensors: they never come to a pack hook."""

    def program(run: Run):
        weight = run.parameter(32, 32)
        block = compiled(two_layers, fullgraph=True)
        for step, rows in enumerate((24, 16, 40)):
            x = run.leaf(rows, 32)
            torch._dynamo.mark_dynamic(x, 0)
            with nothing_compiled_again() if step else contextlib.nullcontext(), run.offload():
                loss = block(x, weight).sum()
            loss.backward()
            run.check(gradient=x.grad)
        return weight.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=4 * (24 + 16 + 40) * 32 * 4)


# ---- recomputation, by the user's word and by the partitioner's ----


def save_matrix_products(_context, operator, *_arguments, **_keywords) -> CheckpointPolicy:
    is_product = operator is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("policy", ["everything", "selective"])
def test_checkpoint_inside_a_compiled_function(device_under_test: Device, policy: str):
    options = {"use_reentrant": False}
    if policy == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, save_matrix_products)

    def program(run: Run):
        x, weight = run.leaf(32, 32), run.parameter(32, 32)

        def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return checkpoint(two_layers, x.exp(), weight, **options).sin()

        step = compiled(forward, fullgraph=True)
        for _ in range(2):
            with run.offload():
                loss = step(x, weight).sum()
            loss.backward()
        return x.grad, weight.grad

    assert_same_gradients(program, device=device_under_test)


class TwoLayers(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width, width) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return two_layers(x, self.weight)


def test_checkpoint_around_a_compiled_block(device_under_test: Device):
    """The recomputation finds the graph that the first forward compiled: else it would save other tensors."""

    def program(run: Run):
        x, model = run.leaf(32, 32), run.module(TwoLayers)
        block = compiled(model, fullgraph=True)
        for step in range(2):
            with nothing_compiled_again() if step else contextlib.nullcontext():
                with run.offload():
                    y = checkpoint(block, x.exp(), use_reentrant=False)
                    loss = checkpoint(block, y, use_reentrant=False).sum()
                loss.backward()
        return x.grad, model

    # In each step the inputs of both blocks; the first is also what exp saves.
    assert_same_gradients(program, device=device_under_test, moved_bytes=2 * 2 * 32 * 32 * 4)


def test_a_smaller_activation_memory_budget_leaves_less_to_move(device_under_test: Device):
    def program(run: Run, budget: float):
        x, weight = run.leaf(32, 32), run.parameter(32, 32)
        with torch._functorch.config.patch(activation_memory_budget=budget):
            block = compiled(two_layers, fullgraph=True)
            with run.offload():
                loss = block(x, weight).sum()
            loss.backward()
        return x.grad, weight.grad

    moved = [
        assert_same_gradients(functools.partial(program, budget=budget), device=device_under_test).bytes_offloaded
        for budget in (1.0, 0.1)
    ]
    assert moved[1] < moved[0]


def mark_to_offload(joint: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
        node.meta["should_offload"] = True
    return joint


def test_what_aot_offloads_itself_is_not_moved_again(device_under_test: Device):
    """On CUDA AOT hands CPU tensors to the hooks, and they stay; on disk a CPU tensor is one as any other."""
    if not hasattr(torch._functorch.config, "enable_activation_offloading"):
        pytest.skip("this torch has no activation offloading in AOT")
    from torch._functorch._activation_offloading import activation_offloading

    def program(run: Run):
        x, weight = run.leaf(64, 64), run.parameter(64, 64)
        options = {"enable_activation_offloading": True, "joint_custom_pass": mark_to_offload}
        with torch._functorch.config.patch(**options), torch._inductor.config.patch(force_disable_caches=True):
            block = compiled(two_layers, "aot_eager", fullgraph=True)
            with run.offload():
                loss = block(x, weight).sum()
            loss.backward()
        return x.grad, weight.grad

    chosen: list[bool] = []
    choose = activation_offloading.choose_offload_sets
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            activation_offloading,
            "choose_offload_sets",
            lambda *arguments: chosen.append(choose(*arguments)) or chosen[-1],
        )
        on_cuda = {"min_moved_fraction": 0.3, "kept_reason": "device"} if device_under_test.name == "cuda" else {}
        assert_same_gradients(program, device=device_under_test, **on_cuda)
    assert set(chosen) == {True}, "AOT did not offload: the test shows nothing"


# ---- compiled autograd ----


@pytest.mark.parametrize(("forward", "backend"), [("eager", "aot_eager"), ("compiled", "inductor")])
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
def test_compiled_autograd(device_under_test: Device, forward: str, backend: str):
    """It calls our unpack as a function that it cannot trace: its graph breaks there, and the bytes are right."""

    def program(run: Run):
        x, weight = run.leaf(32, 32), run.parameter(32, 32)
        torch._dynamo.reset()
        block = torch.compile(one_layer, backend=backend) if forward == "compiled" else one_layer
        for _ in range(2):
            with run.offload():
                loss = block(x, weight).sum()
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
                loss.backward()
            run.check(gradient=x.grad)
        return x.grad, weight.grad

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
def test_compiled_autograd_by_its_option(device_under_test: Device):
    def program(run: Run):
        x, model = run.leaf(32, 32), run.module(TwoLayers)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().sum()
            loss.backward()
            return loss.detach()

        with torch._dynamo.config.patch(compiled_autograd=True):
            train = compiled(step, "aot_eager")
            for _ in range(2):
                with run.offload():
                    run.check(loss=train(x))
        return model, x.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5)


def test_compiled_autograd_in_a_full_graph_is_dynamos_own_error(device_under_test: Device):
    x = torch.ones(8, 8, device=device_under_test.torch_device, requires_grad=True)
    with device_under_test.context():
        loss = x.exp().sum()
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):  # noqa: SIM117
        with pytest.raises(Exception, match="unpack"):
            loss.backward()


def test_autocast_and_batch_norm_inside_a_compiled_model(device_under_test: Device):
    """Buffers that forward writes, and casts of weights: neither is an activation."""

    def program(run: Run):
        model = run.module(lambda: nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 8)))
        step = compiled(model, "aot_eager", fullgraph=True)
        x = run.leaf(16, 32)
        for _ in range(2):
            with run.offload(), torch.autocast(device_under_test.torch_device.type, torch.bfloat16):
                loss = step(x).float().square().sum()
            loss.backward()
        run.check(buffers=list(model.buffers()))
        return model, x.grad

    assert_same_gradients(program, device=device_under_test)
