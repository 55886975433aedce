"""offload_modules and torch.compile: what moves, in which order the two must come, and what is said where none does."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import torchoffload
from devices import Device
from gradients import Run, assert_same_gradients
from module_models import DEPTH, TOKENS, WIDTH, Stack, offload

pytestmark = pytest.mark.devices("disk", "simulated-late", "cuda")

LINEAR = nn.Linear(2, 2)
FIRST = r"Compile first, then choose what torch\.compile\(module\) returned, or compile each module in place\.$"


@pytest.fixture(autouse=True)
def _compile_anew():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def disk(tmp_path):
    return {"tier": "disk", "disk_dir": tmp_path, "min_offload_size": 0, "learn": False}


def in_place(model: Stack) -> None:
    """As torchtitan compiled its blocks at first."""
    for layer in model.layers:
        layer.compile(backend="eager", fullgraph=True)


def registered_anew(model: Stack) -> None:
    """As torchtitan does: each block is replaced by what torch.compile returned."""
    for name, layer in list(model.layers.named_children()):
        model.layers.register_module(name, torch.compile(layer, backend="eager", fullgraph=True))


def whole_in_place(model: Stack) -> None:
    model.compile(backend="eager", fullgraph=True)


def step(model: nn.Module) -> None:
    model(torch.ones(TOKENS, WIDTH, requires_grad=True)).backward()


def training(device: Device, prepare: Callable[[Stack], None], modules: object) -> Callable[[Run], object]:
    def program(run: Run) -> object:
        torch._dynamo.reset()
        model = run.module(Stack)
        prepare(model)
        x = run.leaf(TOKENS, WIDTH)
        offload(run, device, model, [model] if modules is Stack else modules)
        for _ in range(2):
            loss = model(x)
            loss.backward()
            run.check(loss=loss, step=model)
        return model, x.grad

    return program


def test_blocks_that_were_compiled_first_are_chosen(device_under_test: Device):
    program = training(device_under_test, registered_anew, "layers.*")
    assert_same_gradients(program, device=device_under_test, moved_bytes=2 * Stack.SAVED_BYTES)


@pytest.mark.parametrize("prepare", [in_place, registered_anew])
def test_what_contains_compiled_blocks_is_chosen(device_under_test: Device, prepare: Callable[[Stack], None]):
    assert_same_gradients(training(device_under_test, prepare, Stack), device=device_under_test)


def test_blocks_that_were_compiled_in_place_are_chosen(device_under_test: Device):
    program = training(device_under_test, in_place, "layers.*")
    assert_same_gradients(program, device=device_under_test, moved_bytes=2 * Stack.SAVED_BYTES)


@pytest.mark.devices("disk")
def test_blocks_that_are_compiled_in_place_after_they_were_chosen_move(device_under_test: Device, disk):
    model = Stack()
    with torchoffload.offload_modules(model, "layers.*", **disk) as handle:
        in_place(model)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="torchoffload")
            step(model)
        assert all(row.bytes_offloaded > 0 for row in handle.stats())
        assert "did not run outside" not in torchoffload.report()


@pytest.mark.devices("disk")
def test_blocks_that_are_compiled_after_they_were_chosen(device_under_test: Device, disk):
    """Nothing of them moves: the first call of the model warns, and report() says what to do."""
    model = Stack()
    handle = torchoffload.offload_modules(model, "layers.*", **disk)
    torchoffload.reset_stats()
    registered_anew(model)
    with pytest.warns(UserWarning, match=rf"{DEPTH} of {DEPTH} chosen modules, such as 'layers\.0', .* {FIRST}"):
        step(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        step(model)
    text = torchoffload.report()
    assert f"  {DEPTH} of {DEPTH} chosen modules of Stack did not run outside of a compiled region: layers.0" in text
    handle.remove()


@pytest.mark.devices("disk")
@pytest.mark.parametrize("is_wrapped", [False, True], ids=["in-place", "wrapped"])
def test_a_whole_model_that_is_compiled_after_it_was_chosen_from(device_under_test: Device, disk, is_wrapped: bool):
    """No hook runs at all, so only report() can tell."""
    model = Stack()
    with torchoffload.offload_modules(model, "layers.*", **disk):
        torchoffload.reset_stats()
        called = torch.compile(model, backend="eager") if is_wrapped else model
        if not is_wrapped:
            whole_in_place(model)
        step(called)
        last_line = torchoffload.report().splitlines()[-1]
        assert f"NOTHING MOVED. offload_modules is installed on {DEPTH} modules of Stack; none of them ran" in last_line
        assert "Compile first" in last_line
    assert "Enter OffloadActivations around forward" in torchoffload.report(), "removed, it is no longer told"


@pytest.mark.devices("disk")
def test_a_whole_model_that_was_compiled_first(device_under_test: Device, disk):
    compiled = torch.compile(Stack(), backend="eager", fullgraph=True)
    with torchoffload.offload_modules(compiled, [compiled], **disk) as handle:
        torchoffload.reset_stats()
        step(compiled)
        assert handle.stats()[0].bytes_offloaded > 0
        assert "did not run outside" not in torchoffload.report()


@pytest.mark.devices("disk")
def test_a_whole_model_compiled_in_place_moves_in_a_context_around_its_call(device_under_test: Device):
    def program(run: Run) -> object:
        torch._dynamo.reset()
        model, x = run.module(Stack), run.leaf(TOKENS, WIDTH)
        whole_in_place(model)
        with run.offload():
            loss = model(x)
        loss.backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.devices("disk")
def test_calls_without_gradients_are_told_apart(device_under_test: Device, disk):
    model = Stack()
    with torchoffload.offload_modules(model, "layers.*", **disk):
        torchoffload.reset_stats()
        with torch.no_grad():
            model(torch.ones(TOKENS, WIDTH))
        last_line = torchoffload.report().splitlines()[-1]
    assert (
        f"on {DEPTH} modules of Stack, which ran, but saved nothing there: call the model with gradients" in last_line
    )


@pytest.mark.devices("disk")
@pytest.mark.parametrize(
    "use",
    [
        lambda: torchoffload.OffloadActivations(tier="disk"),
        torchoffload.NoOpManager,
        lambda: torchoffload.get_act_offloading_ctx_manager(LINEAR, tier="disk"),
        lambda: torchoffload.offload_modules(LINEAR, "*", tier="disk"),
        lambda: torchoffload.never_offload(torch.ones(2)),
        torchoffload.trim,
    ],
    ids=[
        "OffloadActivations",
        "NoOpManager",
        "get_act_offloading_ctx_manager",
        "offload_modules",
        "never_offload",
        "trim",
    ],
)
def test_what_is_made_inside_a_full_graph_says_where_it_belongs(request, device_under_test: Device, use):
    name = request.node.callspec.id.split("-")[-1]

    def function(x: torch.Tensor) -> torch.Tensor:
        use()
        return x.sin()

    advice = rf"torchoffload\.{name} cannot be part of a compiled graph\. Call it outside of the region"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=advice):
        torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2))
