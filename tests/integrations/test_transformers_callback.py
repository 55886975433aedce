"""The callback itself: what it logs, how it is switched, and what it says of bad input."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import torchoffload
from devices import Device
from gradients import Run
from trainings import hooks_of, need, options, tiny_llama

need("transformers", "accelerate")

from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from hf_trainings import arguments, trainer_of  # noqa: E402
from torchoffload.integrations.transformers import LogOffloadingCallback, OffloadActivationsCallback  # noqa: E402

TOTALS = ("gib_offloaded", "gib_reloaded", "gib_kept", "pinned_gib", "window_waits")

pytestmark = pytest.mark.devices("disk")


@pytest.fixture
def run(device_under_test: Device) -> Run:
    return Run(device_under_test, stock=False, context=None)


@pytest.fixture
def make(tmp_path: Path, device_under_test: Device, run: Run) -> Any:
    """Makes a trainer with these callbacks."""

    def trainer(
        *callbacks: TrainerCallback, model: Any = None, kind: Any = TrainingArguments, **chosen: Any
    ) -> Trainer:
        args = arguments(tmp_path, device_under_test, kind, **chosen)
        return trainer_of(model or tiny_llama(run), args, callbacks)

    return trainer


def moved(trainer: Trainer) -> int:
    """The bytes that training moves."""
    before = torchoffload.stats().bytes_offloaded
    trainer.train()
    return torchoffload.stats().bytes_offloaded - before


class Reporter(TrainerCallback):
    """What a reporter of `report_to` would have sent, at the place of its own in the list."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.sent.append(dict(logs))


def losses(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in entries if "loss" in entry]


def test_each_step_logs_its_totals(make, device_under_test: Device):
    reporter = Reporter()
    trainer = make(OffloadActivationsCallback(**options(device_under_test)), reporter)
    nbytes = moved(trainer)
    for log in (losses(trainer.state.log_history), losses(reporter.sent)):
        assert len(log) == 3
        assert all(f"offload/{name}" in entry for entry in log for name in TOTALS)
        assert sum(entry["offload/gib_offloaded"] for entry in log) * 2**30 == pytest.approx(nbytes)
        assert all(entry["offload/gib_reloaded"] > 0 for entry in log)
    summary = trainer.state.log_history[-1]
    assert "train_runtime" in summary
    assert not any(name.startswith("offload/") for name in summary)


def test_a_log_of_several_steps_has_their_mean(make, device_under_test: Device):
    trainer = make(OffloadActivationsCallback(**options(device_under_test)), max_steps=4, logging_steps=2)
    nbytes = moved(trainer)
    logged = [entry["offload/gib_offloaded"] for entry in losses(trainer.state.log_history)]
    assert len(logged) == 2
    assert sum(logged) * 2 * 2**30 == pytest.approx(nbytes)


def test_a_callback_that_is_attached_stands_before_the_reporters(make, device_under_test: Device):
    reporter = Reporter()
    trainer = make(reporter)
    callback = OffloadActivationsCallback(**options(device_under_test))
    callback.attach(trainer)
    callback.attach(trainer)
    assert trainer.callback_handler.callbacks.count(callback) == 1
    assert moved(trainer) > 0
    assert all("offload/gib_offloaded" in entry for entry in losses(reporter.sent))


def test_statistics_that_are_reset_in_between_do_not_count_backwards(make, device_under_test: Device):
    class Resets(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            torchoffload.reset_stats()

    trainer = make(OffloadActivationsCallback(**options(device_under_test)), Resets())
    trainer.train()
    assert all(entry["offload/gib_offloaded"] > 0 for entry in losses(trainer.state.log_history))


def test_off_it_moves_nothing_and_logs_zeros(make):
    trainer = make(OffloadActivationsCallback(enabled=False, tier="disk"))
    assert moved(trainer) == 0
    assert losses(trainer.state.log_history)[0]["offload/gib_offloaded"] == 0


def test_the_environment_turns_it_off(make, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder):
    monkeypatch.setenv("TORCHOFFLOAD_DISABLE", "1")
    assert moved(make(OffloadActivationsCallback(tier="disk"))) == 0
    assert not [warning for warning in recwarn if "torchoffload" in str(warning.message)]


@dataclasses.dataclass
class OwnArguments(TrainingArguments):
    offload: bool = False


def test_a_field_of_the_arguments_is_the_switch(make, device_under_test: Device):
    for is_on in (False, True):
        callback = OffloadActivationsCallback(enabled="offload", **options(device_under_test))
        assert (moved(make(callback, kind=OwnArguments, offload=is_on)) > 0) is is_on


def test_a_switch_that_the_arguments_do_not_have(make):
    trainer = make(OffloadActivationsCallback(enabled="offload", tier="disk"))
    with pytest.raises(AttributeError, match=r"enabled='offload' names no attribute of TrainingArguments: give"):
        trainer.train()


def test_a_switch_that_is_no_bool(make):
    trainer = make(OffloadActivationsCallback(enabled="logging_steps", tier="disk"))
    with pytest.raises(TypeError, match=r"^args\.logging_steps must be True or False, got 1"):
        trainer.train()
    with pytest.raises(TypeError, match=r"^enabled must be True or False, got 1"):
        OffloadActivationsCallback(enabled=1)


def test_a_wrong_option_is_named_where_it_is_given():
    with pytest.raises(
        TypeError, match=r"^OffloadActivationsCallback got an unknown option: tir \(did you mean tier\?\)$"
    ):
        OffloadActivationsCallback(tir="disk")
    with pytest.raises(ValueError, match=r"^tier must be"):
        OffloadActivationsCallback(tier="tape")


def test_a_trainer_that_gives_no_model():
    callback = OffloadActivationsCallback(tier="disk")
    with pytest.raises(TypeError, match=r"for transformers\.Trainer, which gives callbacks its model: got model=None"):
        callback.on_train_begin(object(), object(), object())


def test_chosen_modules_of_a_compiled_model(make):
    for callback in (OffloadActivationsCallback("model.layers.0"), OffloadActivationsCallback(fraction=0.5)):
        with pytest.raises(
            ValueError, match=r"torch_compile=True or model\.compile\(\) makes one region.*leave modules, fraction"
        ):
            make(callback, torch_compile=True, torch_compile_backend="eager").train()


def test_a_compiled_forward_that_is_left_by_ctrl_c(make, device_under_test: Device):
    """No forward hook runs then: what it entered is left when the callback is removed."""
    callback = OffloadActivationsCallback(**options(device_under_test))
    trainer = make(callback, torch_compile=True, torch_compile_backend="eager")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = trainer.model.lm_head.register_forward_pre_hook(torch.compiler.disable(interrupt))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    hook.remove()
    callback.remove()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    torch._dynamo.reset()
    assert moved(trainer) > 0
    torch._dynamo.reset()


def test_attach_wants_a_trainer():
    with pytest.raises(TypeError, match=r"LogOffloadingCallback attaches to a transformers\.Trainer, got dict"):
        LogOffloadingCallback().attach({})


def test_a_model_whose_hooks_are_passed_by_is_told_once(make, run: Run, recwarn: pytest.WarningsRecorder):
    for _ in range(2):
        model = tiny_llama(run)
        model.unused = torch.nn.Linear(4, 4)
        make(OffloadActivationsCallback("unused", tier="disk"), model=model).train()
    assert len([warning for warning in recwarn if "saved nothing inside" in str(warning.message)]) == 1


def test_it_is_removed_by_hand_after_a_failure(make, device_under_test: Device):
    callback = OffloadActivationsCallback(**options(device_under_test))
    trainer = make(callback, max_steps=1)
    hook = trainer.model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    hook.remove()
    assert hooks_of(trainer.model) > 0
    callback.remove()
    callback.remove()
    assert hooks_of(trainer.model) == 0
