"""Accelerate: prepared models, accumulation, mixed precision, compile, and models spread by a device map."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config

import torchoffload
from devices import Device
from fitted_models import options_of
from gradients import Run, assert_same_gradients, execute
from trainings import (
    ROOM_FOR_ALL,
    STEPS_TO_SETTLE,
    assert_was_fitted,
    hooks_of,
    memory_of,
    need,
    options,
    tiny_llama,
    token_rows,
)

need("accelerate", "transformers")

from accelerate import Accelerator, dispatch_model  # noqa: E402
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from accelerate.tracking import GeneralTracker  # noqa: E402
from accelerate.utils import TorchDynamoPlugin  # noqa: E402

from torchoffload.integrations.accelerate import offload_prepared  # noqa: E402

pytestmark = pytest.mark.devices("disk", "cuda")


@pytest.fixture(autouse=True)
def _fresh_accelerator():
    """Accelerate's states are the process's: the next test may ask for another device or precision."""
    forget = (AcceleratorState, GradientState, PartialState)
    for state in forget:
        state._shared_state.clear()
    yield
    for state in forget:
        state._shared_state.clear()


def accelerator_of(device: Device, **chosen: Any) -> Accelerator:
    AcceleratorState._shared_state.clear()
    PartialState._shared_state.clear()
    return Accelerator(cpu=device.name != "cuda", **chosen)


def train(
    run: Run, device: Device, accelerator: Accelerator, model: Any, *, prepare: bool = True, modules=None
) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any = torch.optim.SGD(trained, lr=0.05)
    loader: Any = torch.utils.data.DataLoader(token_rows(), batch_size=2)
    if prepare:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    offloading = offload_prepared(accelerator, model, modules, enabled=not run.stock, **options(device))
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**{name: value.to(run.device) for name, value in batch.items()}).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        run.check(loss=loss)
    offloading.remove()
    inner = accelerator.unwrap_model(model, keep_torch_compile=False)
    assert hooks_of(inner) == 0
    run.check(weights=[parameter for parameter in trained if parameter.device.type != "meta"])


def assert_same_training(device: Device, *, modules: Any = None, **chosen: Any) -> Any:
    def program(run: Run) -> None:
        train(run, device, accelerator_of(device, **chosen), tiny_llama(run), modules=modules)

    return assert_same_gradients(program, device=device)


def test_a_prepared_model(device_under_test: Device):
    assert_same_training(device_under_test)


def test_gradient_accumulation(device_under_test: Device):
    assert_same_training(device_under_test, gradient_accumulation_steps=2)


def test_bf16(device_under_test: Device):
    assert_same_training(device_under_test, mixed_precision="bf16")


def test_only_chosen_modules(device_under_test: Device):
    whole = assert_same_training(device_under_test)
    layer = assert_same_training(device_under_test, modules="model.layers.0")
    assert 0.3 < layer.bytes_offloaded / whole.bytes_offloaded < 0.6


@pytest.mark.parametrize("regional", [False, True], ids=["whole", "regional"])
def test_a_compiled_model(device_under_test: Device, regional: bool):
    torch._dynamo.reset()
    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
    assert_same_training(device_under_test, dynamo_plugin=plugin)
    torch._dynamo.reset()


def test_a_model_with_hooks_of_a_device_map(device_under_test: Device):
    """Every module has a hook that moves its inputs to the module's device."""

    def program(run: Run) -> None:
        where = "cpu" if run.device.type == "cpu" else 0
        names = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")
        model = dispatch_model(tiny_llama(run), dict.fromkeys(names, where), force_hooks=True)
        train(run, device_under_test, accelerator_of(device_under_test), model, prepare=False)

    assert_same_gradients(program, device=device_under_test)


def test_frozen_weights_that_come_for_their_forward_only(tmp_path: Path, device_under_test: Device):
    """`dispatch_model` keeps a frozen layer on disk or in host memory, and brings its weights when it runs."""

    def program(run: Run) -> None:
        model = tiny_llama(run)
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
        on_cpu = run.device.type == "cpu"
        here, away = ("cpu", "disk") if on_cpu else (0, "cpu")
        device_map = dict.fromkeys(("model.layers.1", "model.norm", "model.rotary_emb", "lm_head"), here)
        device_map |= dict.fromkeys(("model.embed_tokens", "model.layers.0"), away)
        model = dispatch_model(model, device_map, offload_dir=str(tmp_path / str(run.stock)) if on_cpu else None)
        train(run, device_under_test, accelerator_of(device_under_test), model, prepare=False)

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.devices("disk")
def test_the_totals_go_to_the_trackers(device_under_test: Device):
    class Notes(GeneralTracker):
        name = "notes"
        requires_logging_directory = False
        main_process_only = True
        tracker = None

        def __init__(self) -> None:
            super().__init__()
            self.sent: list[tuple[int | None, dict[str, float]]] = []

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            pass

        def log(self, values: dict[str, float], step: int | None = None, **kwargs: Any) -> None:
            self.sent.append((step, values))

    notes = Notes()
    accelerator = accelerator_of(device_under_test, log_with=notes)
    accelerator.init_trackers("project")
    model = accelerator.prepare(tiny_llama(Run(device_under_test, stock=False, context=None)))
    with offload_prepared(accelerator, model, **options(device_under_test)) as offloading:
        for step in range(2):
            before = torchoffload.stats().bytes_offloaded
            accelerator.backward(model(**{k: v[None] for k, v in token_rows()[step].items()}).loss)
            logged = offloading.log(step)
            moved = torchoffload.stats().bytes_offloaded - before
            assert logged["offload/gib_offloaded"] * 2**30 == pytest.approx(moved)
            assert notes.sent[-1] == (step, logged)
    assert hooks_of(model) == 0


@pytest.mark.devices("disk")
def test_bad_input(device_under_test: Device):
    accelerator = accelerator_of(device_under_test)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"^accelerator must be an accelerate\.Accelerator, got Linear"):
        offload_prepared(model, accelerator)
    with pytest.raises(
        TypeError, match=r"returned for the model, got tuple: call offload_prepared once for each model"
    ):
        offload_prepared(accelerator, (model, model))
    with pytest.raises(TypeError, match="enabled must be True or False"):
        offload_prepared(accelerator, model, enabled=None)
    with pytest.raises(TypeError, match=r"^offload_prepared got an unknown option: tir \(did you mean tier"):
        offload_prepared(accelerator, model, tir="disk")


def assert_same_fitted_training(device: Device, *, dynamo: Any = None, modules: Any = None, **chosen: Any) -> None:
    """Fails unless `memory` half-way between the least and all changes no bit, and a plan was followed."""

    def trained(run: Run, memory: int) -> tuple[Any, Any]:
        accelerator = accelerator_of(device, dynamo_plugin=dynamo, gradient_accumulation_steps=2)
        model = tiny_llama(run, num_hidden_layers=4, use_cache=False)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
        loader: Any = torch.utils.data.DataLoader(token_rows(2 * STEPS_TO_SETTLE), batch_size=2)
        prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with offload_prepared(
            accelerator, prepared, modules, memory=memory, enabled=not run.stock, **chosen
        ) as offloading:
            for batch in loader:
                with accelerator.accumulate(prepared):
                    loss = prepared(**batch).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                run.check(loss=loss)
        assert hooks_of(prepared) == 0
        run.check(weights=list(prepared.parameters()))
        return offloading.fitted, prepared

    room, _prepared = trained(Run(device, stock=False, context=None), ROOM_FOR_ALL)

    def program(run: Run) -> None:
        fitted, _prepared = trained(run, memory_of(room, 0.5))
        if not run.stock:
            assert_was_fitted(fitted, moves=chosen.get("move", True), recomputes=chosen.get("recompute", True))

    stock = execute(program, device, stock=True)
    assert execute(program, device, stock=False) == stock
    assert "exception" not in stock


FITS = {
    "all": {},
    "only moving": {"recompute": False},
    "only computing": {"move": False},
    "chosen": {"modules": "model.layers.*"},
}


@pytest.mark.devices("disk")
@pytest.mark.parametrize("fit", FITS)
def test_the_same_training_under_a_plan(device_under_test: Device, fit: str):
    assert_same_fitted_training(device_under_test, **(options_of(device_under_test) | FITS[fit]))


@pytest.mark.devices("disk")
def test_blocks_that_are_compiled_each_for_itself_under_a_plan(device_under_test: Device):
    torch._dynamo.reset()
    regional = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True)
    assert_same_fitted_training(device_under_test, dynamo=regional, **options_of(device_under_test))
    torch._dynamo.reset()


@pytest.mark.devices("disk")
def test_the_graphs_of_a_model_that_is_compiled_as_a_whole_are_planned(device_under_test: Device):
    run = Run(device_under_test, stock=False, context=None)

    def losses(memory: int | None) -> tuple[list[torch.Tensor], Any]:
        torch._dynamo.reset()
        accelerator = accelerator_of(device_under_test, dynamo_plugin=TorchDynamoPlugin(backend="inductor"))
        model = tiny_llama(run, num_hidden_layers=4, use_cache=False)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
        loader: Any = torch.utils.data.DataLoader(token_rows(4), batch_size=2)
        prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        offloading = offload_prepared(accelerator, prepared, memory=memory or "1GiB", move=False, enabled=bool(memory))
        found = []
        for batch in loader:
            loss = prepared(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return found, offloading.fitted

    with torch._functorch.config.patch(enable_autograd_cache=False):  # a graph of a cache has no plan
        expected, _ = losses(None)
        (plan,) = losses(1 << 40)[1]._driver.plans
        ours, fitted = losses(int(0.95 * plan.stock_peak_bytes))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
    assert fitted.phase == "compiled"
    assert fitted.plan.recompute_s > 0
    torch._dynamo.reset()


@pytest.mark.devices("disk")
def test_what_does_not_go_with_a_plan(device_under_test: Device):
    run = Run(device_under_test, stock=False, context=None)
    whole = TorchDynamoPlugin(backend="eager", use_regional_compilation=False)
    accelerator = accelerator_of(device_under_test, dynamo_plugin=whole)
    compiled = accelerator.prepare(tiny_llama(run))
    with pytest.raises(ValueError, match=r"torch\.compile made one region of all of it\. .* inductor compiled it"):
        offload_prepared(accelerator, compiled, memory="1GiB", tier="disk")
    checkpointed = tiny_llama(run)
    checkpointed.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"^gradient checkpointing is on in 'model'"):
        offload_prepared(accelerator, checkpointed, memory="1GiB", tier="disk")
    spread = torch.nn.DataParallel(torch.nn.Linear(2, 2))
    spread.device_ids = [0, 1]
    with pytest.raises(ValueError, match=r"and DataParallel spreads each step over several"):
        offload_prepared(accelerator, spread, memory="1GiB", tier="disk")
    with pytest.raises(TypeError, match=r"^only_inputs: of offload_modules"):
        offload_prepared(accelerator, tiny_llama(run), memory="1GiB", only_inputs=True, tier="disk")
    with pytest.raises(TypeError, match=r"^offload_prepared got '40GiB' .* did you mean memory='40GiB'\?$"):
        offload_prepared(accelerator, tiny_llama(run), "40GiB")
    with pytest.raises(TypeError, match=r"^on_unfit: of torchoffload\.fit, which memory= asks for"):
        offload_prepared(accelerator, tiny_llama(run), on_unfit="warn", tier="disk")
