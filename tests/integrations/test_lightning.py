"""Lightning's Trainer with the callback, from either package: the same training, with the activations moved."""

import importlib
import importlib.util
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import torchoffload
from devices import Device
from fitted_models import options_of
from gradients import Run, assert_same_gradients, execute
from models import Block
from trainings import ROOM_FOR_ALL, STEPS_TO_SETTLE, assert_was_fitted, hooks_of, memory_of, need, options

if importlib.util.find_spec("lightning") is None:
    need("pytorch_lightning")

from torchoffload.integrations.lightning import OffloadActivationsCallback

PACKAGES = [
    name
    for name in ("lightning.pytorch", "pytorch_lightning")
    if importlib.util.find_spec(name.split(".")[0]) is not None
]
TOTALS = ("gib_offloaded", "gib_reloaded", "gib_kept", "pinned_gib", "window_waits")

pytestmark = pytest.mark.devices("disk", "cuda")


@pytest.fixture(params=PACKAGES)
def pl(request: pytest.FixtureRequest) -> Any:
    logging.getLogger(request.param).setLevel(logging.ERROR)
    return importlib.import_module(request.param)


def module_of(pl: Any, run: Run, *, manual: bool = False, compiled: bool = False) -> Any:
    class Regression(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Block(), Block())
            self.head = nn.Linear(32, 32)
            self.automatic_optimization = not manual
            self.losses: list[torch.Tensor] = []

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss = functional.mse_loss(self.head(self.blocks(batch)), batch)
            self.losses.append(loss.detach())
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            before = torchoffload.stats().handles
            self.losses.append(functional.mse_loss(self.head(self.blocks(batch)), batch))
            assert torchoffload.stats().handles == before

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self) -> Any:
            drawn = torch.randn(6, 2, 16, 32, generator=torch.Generator().manual_seed(4))
            return torch.utils.data.DataLoader(list(drawn), batch_size=None)

        val_dataloader = train_dataloader

    return run.module(Regression)


def trainer_of(pl: Any, device: Device, directory: Path, callbacks: Any = (), **chosen: Any) -> Any:
    defaults = {
        "accelerator": "cuda" if device.name == "cuda" else "cpu",
        "devices": 1,
        "max_steps": 4,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 1,
        "val_check_interval": 2,
        "default_root_dir": str(directory),
    }
    return pl.Trainer(callbacks=list(callbacks), **(defaults | chosen))


def assert_same_training(
    pl: Any, device: Device, directory: Path, *, modules: Any = None, manual=False, **chosen
) -> Any:
    def program(run: Run) -> None:
        module = module_of(pl, run, manual=manual)
        ours = [] if run.stock else [OffloadActivationsCallback(modules, **options(device))]
        trainer = trainer_of(pl, device, directory, ours, **chosen)
        trainer.fit(module)
        assert "training_step" not in vars(trainer.strategy)
        run.check(losses=module.losses, weights=module.state_dict())

    return assert_same_gradients(program, device=device)


def test_the_same_training(pl, tmp_path: Path, device_under_test: Device):
    assert_same_training(pl, device_under_test, tmp_path)


def test_gradient_accumulation(pl, tmp_path: Path, device_under_test: Device):
    assert_same_training(pl, device_under_test, tmp_path, accumulate_grad_batches=3, max_steps=2)


def test_manual_optimization_whose_backward_is_inside(pl, tmp_path: Path, device_under_test: Device):
    assert_same_training(pl, device_under_test, tmp_path, manual=True)


def test_bf16_autocast(pl, tmp_path: Path, device_under_test: Device):
    assert_same_training(pl, device_under_test, tmp_path, precision="bf16-mixed")


def test_only_chosen_modules(pl, tmp_path: Path, device_under_test: Device):
    whole = assert_same_training(pl, device_under_test, tmp_path)
    block = assert_same_training(pl, device_under_test, tmp_path, modules="blocks.1")
    assert 0.3 < block.bytes_offloaded / whole.bytes_offloaded < 0.6


def test_a_compiled_module(pl, tmp_path: Path, device_under_test: Device):
    def program(run: Run) -> None:
        module = module_of(pl, run)
        ours = [] if run.stock else [OffloadActivationsCallback(**options(device_under_test))]
        trainer = trainer_of(pl, device_under_test, tmp_path, ours)
        torch._dynamo.reset()
        module.blocks = torch.compile(module.blocks, backend="aot_eager")
        trainer.fit(module)
        run.check(losses=module.losses)

    assert_same_gradients(program, device=device_under_test)
    torch._dynamo.reset()


def offloading_run(device: Device) -> Run:
    return Run(device, stock=False, context=None)


def test_each_batch_logs_its_totals(pl, tmp_path: Path, device_under_test: Device):
    seen: list[dict[str, float]] = []

    class Notes(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    callbacks = [OffloadActivationsCallback(**options(device_under_test)), Notes()]
    before = torchoffload.stats().bytes_offloaded
    trainer_of(pl, device_under_test, tmp_path, callbacks).fit(module_of(pl, offloading_run(device_under_test)))
    nbytes = torchoffload.stats().bytes_offloaded - before
    assert len(seen) == 4
    assert all(set(entry) >= {f"offload/{name}" for name in TOTALS} for entry in seen)
    assert sum(entry["offload/gib_offloaded"] for entry in seen) * 2**30 == pytest.approx(nbytes, rel=1e-5)


def test_training_that_fails_leaves_nothing_behind(pl, tmp_path: Path, device_under_test: Device):
    module = module_of(pl, offloading_run(device_under_test))
    hook = module.head.register_forward_hook(lambda *_: 1 / 0)
    callback = OffloadActivationsCallback(**options(device_under_test))
    trainer = trainer_of(pl, device_under_test, tmp_path, [callback], num_sanity_val_steps=0)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module)
    hook.remove()
    assert "training_step" not in vars(trainer.strategy)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@pytest.mark.devices("disk")
def test_off_it_moves_nothing(pl, tmp_path: Path, device_under_test: Device, monkeypatch: pytest.MonkeyPatch):
    before = torchoffload.stats().bytes_offloaded
    run = offloading_run(device_under_test)
    for callback in (OffloadActivationsCallback(enabled=False, tier="disk"), OffloadActivationsCallback(tier="disk")):
        trainer_of(pl, device_under_test, tmp_path, [callback]).fit(module_of(pl, run))
        monkeypatch.setenv("TORCHOFFLOAD_DISABLE", "1")
    assert torchoffload.stats().bytes_offloaded == before


@pytest.mark.devices("disk")
def test_bad_input(device_under_test: Device):
    with pytest.raises(TypeError, match=r"^OffloadActivationsCallback got an unknown option: tir \(did you mean tier"):
        OffloadActivationsCallback(tir="disk")
    with pytest.raises(TypeError, match=r"^fraction: an option of offload_modules, so say which by modules="):
        OffloadActivationsCallback(fraction=0.5, tier="disk")
    with pytest.raises(TypeError, match="enabled must be True or False, got 'yes'"):
        OffloadActivationsCallback(enabled="yes")
    callback = OffloadActivationsCallback(tier="disk")
    with pytest.raises(TypeError, match=r"is for Lightning's Trainer, .*: got object with Linear"):
        callback.on_train_start(object(), nn.Linear(2, 2))


def fit_training(pl: Any, run: Run, device: Device, directory: Path, **chosen: Any) -> Any:
    """Trains with `memory=`, and checks what must be the same; returns the callback."""
    module = module_of(pl, run)
    callback = OffloadActivationsCallback(enabled=not run.stock, **chosen)
    trainer = trainer_of(pl, device, directory, [callback], max_steps=STEPS_TO_SETTLE, num_sanity_val_steps=0)
    trainer.fit(module)
    assert "training_step" not in vars(trainer.strategy)
    assert hooks_of(module) == 0
    run.check(losses=module.losses, weights=module.state_dict())
    if not run.stock:
        assert callback.fitted.report().startswith("torchoffload.fit: TrainingStep, ")
        assert callback.fitted.phase == "removed"
        callback.needed = memory_of(callback.fitted, 0.5)
        assert trainer.logged_metrics["fit/phase"] == 2
        assert trainer.logged_metrics["fit/phase_step"] >= 1
    return callback


FITS = {"all": {}, "only moving": {"recompute": False}, "chosen": {"modules": "blocks.*"}}


@pytest.mark.devices("disk")
@pytest.mark.parametrize("fit", FITS)
def test_the_same_training_under_a_plan(pl, tmp_path: Path, device_under_test: Device, fit: str):
    given = options_of(device_under_test) | FITS[fit]
    room = fit_training(
        pl, offloading_run(device_under_test), device_under_test, tmp_path, memory=ROOM_FOR_ALL, **given
    )

    def program(run: Run) -> None:
        callback = fit_training(pl, run, device_under_test, tmp_path, memory=room.needed, **given)
        if not run.stock:
            assert_was_fitted(callback.fitted, recomputes=given.get("recompute", True))

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=1e-9)


@pytest.mark.devices("disk")
def test_the_same_training_under_a_plan_that_moves_nothing(pl, tmp_path: Path, device_under_test: Device):
    run = offloading_run(device_under_test)
    room = fit_training(pl, run, device_under_test, tmp_path, memory=ROOM_FOR_ALL, move=False)

    def program(run: Run) -> None:
        callback = fit_training(pl, run, device_under_test, tmp_path, memory=room.needed, move=False)
        if not run.stock:
            assert_was_fitted(callback.fitted, moves=False)

    stock = execute(program, device_under_test, stock=True)
    assert execute(program, device_under_test, stock=False) == stock
    assert "exception" not in stock


@pytest.mark.devices("disk")
def test_what_does_not_go_with_a_plan(pl, tmp_path: Path, device_under_test: Device):
    run = offloading_run(device_under_test)
    compiled, single = module_of(pl, run), module_of(pl, run)
    compiled._compiler_ctx = {"compiler": "dynamo"}
    single.blocks = single.blocks[0]
    for module, message in (
        (module_of(pl, run, manual=True), r"^memory= is for automatic optimization"),
        (compiled, r"torch\.compile makes one region of a whole LightningModule"),
        (single, r"^Regression repeats no module, so say by modules="),
    ):
        callback = OffloadActivationsCallback(memory="1GiB", tier="disk")
        trainer = trainer_of(pl, device_under_test, tmp_path)
        trainer.strategy._lightning_module = module
        with pytest.raises(ValueError, match=message):
            callback.on_train_start(trainer, module)
        assert "training_step" not in vars(trainer.strategy)
    with pytest.raises(TypeError, match=r"did you mean memory='40GiB'\?$"):
        OffloadActivationsCallback("40GiB")
    with pytest.raises(TypeError, match=r"^recompute: of torchoffload\.fit, which memory= asks for"):
        OffloadActivationsCallback(recompute=False, tier="disk")
