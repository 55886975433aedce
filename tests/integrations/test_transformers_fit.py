"""Hugging Face's Trainer with `memory=`: the same training, bit for bit, under a plan that fit makes."""

import functools
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
    tiny_llama,
)

need("transformers", "accelerate", "peft")

from peft import LoraConfig, get_peft_model  # noqa: E402

from hf_trainings import arguments, observe_trainer, trainer_of  # noqa: E402
from torchoffload.integrations import _trainers  # noqa: E402
from torchoffload.integrations.transformers import LogOffloadingCallback, OffloadActivationsCallback  # noqa: E402

pytestmark = pytest.mark.devices("disk")

deep_llama = functools.partial(tiny_llama, num_hidden_layers=4)


def trained(
    run: Run, directory: Path, device: Device, callbacks: Any, *, model: Any = deep_llama, **chosen: Any
) -> Any:
    trainer = trainer_of(model(run), arguments(directory, device, max_steps=STEPS_TO_SETTLE, **chosen), callbacks)
    trainer.train()
    observe_trainer(run, trainer)
    assert hooks_of(trainer.model) == 0
    return trainer


def a_run(device: Device) -> Run:
    return Run(device, stock=False, context=None)


def fit_amount(directory: Path, device: Device, part: float, **chosen: Any) -> int:
    callback = OffloadActivationsCallback(memory=ROOM_FOR_ALL, **options_of(device))
    _trainer = trained(a_run(device), directory, device, [callback], **chosen)
    return memory_of(callback.fitted, part)


def assert_same_fitted_training(directory: Path, device: Device, part: float = 0.5, **chosen: Any) -> None:
    """Fails unless `memory` between the least and all changes no bit, and a plan was followed."""
    memory = fit_amount(directory, device, part, **chosen)

    def program(run: Run) -> None:
        callback = OffloadActivationsCallback(memory=memory, enabled=not run.stock, **options_of(device))
        _trainer = trained(run, directory, device, [callback], **chosen)
        if not run.stock:
            assert_was_fitted(callback.fitted)

    assert_same_gradients(program, device=device, min_moved_fraction=1e-9)


@pytest.mark.parametrize("part", [0.0, 0.5])
def test_the_same_training(tmp_path: Path, device_under_test: Device, part: float):
    assert_same_fitted_training(tmp_path, device_under_test, part)


def test_gradient_accumulation_and_bf16(tmp_path: Path, device_under_test: Device):
    assert_same_fitted_training(tmp_path, device_under_test, gradient_accumulation_steps=2, bf16=True)


def lora(run: Run, task: str | None = "CAUSAL_LM") -> Any:
    model = deep_llama(run)
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.1, task_type=task)
    return get_peft_model(model, config)


@pytest.mark.parametrize("task", ["CAUSAL_LM", None])
def test_adapters_of_peft(tmp_path: Path, device_under_test: Device, task: str | None):
    """Without a task PEFT's model calls the model inside past the tuner."""
    assert_same_fitted_training(tmp_path, device_under_test, model=functools.partial(lora, task=task))


@pytest.mark.parametrize("model", [deep_llama, lora])
def test_chosen_blocks_by_their_names_in_the_model_inside(tmp_path: Path, device_under_test: Device, model: Any):
    callback = OffloadActivationsCallback("model.layers.[1-2]", memory=ROOM_FOR_ALL, **options_of(device_under_test))
    _trainer = trained(a_run(device_under_test), tmp_path, device_under_test, [callback], model=model)
    assert "2 blocks" in callback.fitted.report()


def test_without_computing_again(tmp_path: Path, device_under_test: Device):
    memory = fit_amount(tmp_path, device_under_test, 0.5)

    def program(run: Run) -> None:
        options = {"memory": memory, "recompute": False, "enabled": not run.stock} | options_of(device_under_test)
        callback = OffloadActivationsCallback(**options)
        _trainer = trained(run, tmp_path, device_under_test, [callback])
        if not run.stock:
            assert_was_fitted(callback.fitted, recomputes=False)

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=1e-9)


def test_without_moving(tmp_path: Path, device_under_test: Device, recwarn: pytest.WarningsRecorder):
    memory = fit_amount(tmp_path, device_under_test, 0.7)

    def program(run: Run) -> None:
        callback = OffloadActivationsCallback(memory=memory, move=False, enabled=not run.stock)
        _trainer = trained(run, tmp_path, device_under_test, [callback])
        if not run.stock:
            assert_was_fitted(callback.fitted, moves=False)

    stock = execute(program, device_under_test, stock=True)
    torchoffload.reset_stats()
    assert execute(program, device_under_test, stock=False) == stock
    assert "exception" not in stock
    assert torchoffload.stats().bytes_offloaded == 0
    assert not [warning for warning in recwarn if "torchoffload" in str(warning.message)]


def test_a_plan_of_an_earlier_run(tmp_path: Path, device_under_test: Device):
    options = options_of(device_under_test)
    first = OffloadActivationsCallback(memory=ROOM_FOR_ALL, **options)
    _trainer = trained(a_run(device_under_test), tmp_path, device_under_test, [first])
    first.fitted.save(tmp_path / "plan.json")
    later = OffloadActivationsCallback(plan=tmp_path / "plan.json", **options)
    trainer = trainer_of(deep_llama(a_run(device_under_test)), arguments(tmp_path, device_under_test), [later])
    trainer.train()
    assert later.fitted.plan.predicted_s == first.fitted.plan.predicted_s


def test_a_model_that_trains_again(tmp_path: Path, device_under_test: Device):
    """Also after a training that failed, and left the model fitted."""
    callback = OffloadActivationsCallback(memory=ROOM_FOR_ALL, **options_of(device_under_test))
    trainer = trainer_of(tiny_llama(a_run(device_under_test)), arguments(tmp_path, device_under_test), [callback])
    hook = trainer.model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    hook.remove()
    failed = callback.fitted
    assert hooks_of(trainer.model) > 0
    trainer.train()
    assert failed.phase == "removed"
    assert callback.fitted is not failed
    assert hooks_of(trainer.model) == 0


def test_memory_in_which_no_step_fits(tmp_path: Path, device_under_test: Device):
    model = tiny_llama(a_run(device_under_test))
    weights_bytes = sum(each.numel() * each.element_size() for each in (*model.parameters(), *model.buffers()))
    callback = OffloadActivationsCallback(memory=weights_bytes, **options_of(device_under_test))
    args = arguments(tmp_path, device_under_test, max_steps=5)
    trainer = trainer_of(model, args, [callback])
    with pytest.raises(torch.OutOfMemoryError, match="is too little"):
        trainer.train()
    callback.remove()
    assert hooks_of(trainer.model) == 0
    trainer.remove_callback(callback)
    trainer.add_callback(
        OffloadActivationsCallback(memory=weights_bytes, on_unfit="warn", **options_of(device_under_test))
    )
    with pytest.warns(UserWarning, match="It runs in the least memory"):
        trainer.train()


def test_switched_off_there_is_no_plan(tmp_path: Path, device_under_test: Device, monkeypatch: pytest.MonkeyPatch):
    for enabled in (False, True):
        callback = OffloadActivationsCallback(memory="1GiB", enabled=enabled, tier="disk")
        trainer_of(tiny_llama(a_run(device_under_test)), arguments(tmp_path, device_under_test), [callback]).train()
        assert callback.fitted is None
        monkeypatch.setenv("TORCHOFFLOAD_DISABLE", "1")


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"gradient_checkpointing": True}, r"^args\.gradient_checkpointing is on, .* set gradient_checkpointing=False"),
        (
            {"torch_compile": True, "torch_compile_backend": "eager"},
            r"^args\.torch_compile has the trainer compile .* set",
        ),
    ],
)
def test_what_does_not_go_with_a_plan(tmp_path: Path, device_under_test: Device, chosen: Any, message: str):
    callback = OffloadActivationsCallback(memory="1GiB", tier="disk")
    trainer = trainer_of(
        tiny_llama(a_run(device_under_test)), arguments(tmp_path, device_under_test, **chosen), [callback]
    )
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert hooks_of(trainer.model) == 0


def test_a_model_that_was_checkpointed_or_compiled_by_hand(tmp_path: Path, device_under_test: Device):
    for change, message in (
        (lambda model: model.gradient_checkpointing_enable(), r"^gradient checkpointing is on in 'model'"),
        (lambda model: model.compile(backend="eager"), r"^memory= cannot see the blocks"),
    ):
        model = tiny_llama(a_run(device_under_test))
        change(model)
        callback = OffloadActivationsCallback(memory="1GiB", tier="disk")
        with pytest.raises(ValueError, match=message):
            trainer_of(model, arguments(tmp_path, device_under_test), [callback]).train()


def test_the_graphs_of_a_model_that_was_compiled_in_place_are_planned(tmp_path: Path, device_under_test: Device):
    torch._dynamo.reset()
    model = tiny_llama(a_run(device_under_test))
    model.compile()
    callback = OffloadActivationsCallback(memory="1GiB", tier="disk")
    with torch._functorch.config.patch(enable_autograd_cache=False):  # a graph of a cache has no plan
        trainer_of(model, arguments(tmp_path, device_under_test, max_steps=2), [callback]).train()
    assert callback.fitted is not None
    assert "compiled as a whole" in callback.fitted.report()
    assert "PyTorch's own plan" in callback.fitted.report()
    torch._dynamo.reset()


def test_several_devices_in_one_process(tmp_path: Path, device_under_test: Device):
    callback = OffloadActivationsCallback(memory="1GiB", tier="disk")
    args = arguments(tmp_path, device_under_test)
    args._n_gpu = 2
    with pytest.raises(ValueError, match=r"several by DataParallel: start the training with torchrun"):
        callback.on_train_begin(args, None, None, model=tiny_llama(a_run(device_under_test)))


def test_blocks_with_a_cache_are_told_of(tmp_path: Path, device_under_test: Device, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_trainers, "_warned", set())
    callback = OffloadActivationsCallback(memory="1GiB", tier="disk")
    args = arguments(tmp_path, device_under_test, use_cache=True)
    with pytest.warns(UserWarning, match=r"config\.use_cache is True, .* Set model\.config\.use_cache = False"):
        trainer_of(tiny_llama(a_run(device_under_test)), args, [callback]).train()


def test_a_trainer_that_does_not_call_the_model(
    tmp_path: Path, device_under_test: Device, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_trainers, "_warned", set())
    model = tiny_llama(a_run(device_under_test))
    weight = model.get_input_embeddings().weight
    callback = OffloadActivationsCallback(memory="1GiB", tier="disk")
    trainer = trainer_of(model, arguments(tmp_path, device_under_test, max_steps=STEPS_TO_SETTLE), [callback])
    trainer.compute_loss = lambda _model, inputs, **_: weight[inputs["input_ids"]].square().mean()
    with pytest.warns(UserWarning, match=r"fit has seen no whole step of the model") as told:
        trainer.train()
    assert len([each for each in told if "no whole step" in str(each.message)]) == 1


def test_an_amount_in_the_place_of_the_modules_is_told():
    for amount in ("40GiB", "40 gb", "40G", "80%", 0.8, 40):
        with pytest.raises(TypeError, match=r"^OffloadActivationsCallback got .* did you mean memory=.*\?$") as told:
            OffloadActivationsCallback(amount, tier="disk")
        assert f"memory={amount!r}" in str(told.value)
    OffloadActivationsCallback("0", tier="disk")  # the first module of a Sequential


def test_the_phase_and_the_step_of_it_are_logged(tmp_path: Path, device_under_test: Device):
    callback = OffloadActivationsCallback(memory=ROOM_FOR_ALL, **options_of(device_under_test))
    trainer = trained(a_run(device_under_test), tmp_path, device_under_test, [callback])
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    phases = [entry["fit/phase"] for entry in logged]
    assert phases == sorted(phases)
    assert (phases[0], phases[-1]) == (0, 2)
    assert logged[0]["fit/phase_step"] >= 1
    settled = [entry for entry in logged if entry["fit/phase"] == 2]
    steps = [entry["fit/phase_step"] for entry in settled]
    assert steps == sorted(set(steps))
    assert all(entry["fit/calls_recomputed"] >= 0 and entry["fit/calls_moved"] >= 0 for entry in settled)
    plain = trained(a_run(device_under_test), tmp_path, device_under_test, [LogOffloadingCallback()])
    assert not any("fit/phase" in entry for entry in plain.state.log_history)


def test_a_trainer_that_looks_for_its_batch_size_halves_it_until_the_step_fits(
    tmp_path: Path, device_under_test: Device
):
    callback = OffloadActivationsCallback(memory=ROOM_FOR_ALL, move=False)
    trained(a_run(device_under_test), tmp_path, device_under_test, [callback], per_device_train_batch_size=2)
    memory = memory_of(callback.fitted, 0.5)
    callback = OffloadActivationsCallback(memory=memory, move=False)
    trainer = trained(
        a_run(device_under_test), tmp_path, device_under_test, [callback], per_device_train_batch_size=16,
        auto_find_batch_size=True,
    )  # fmt: skip
    assert trainer.state.train_batch_size < 16
    assert "is too little" not in callback.fitted.report()


def test_options_of_the_other_one_are_named():
    for options, error, message in (
        (
            {"recompute": False, "margin": 0.1},
            TypeError,
            r"^margin, recompute: of torchoffload\.fit, .*give memory=, too",
        ),
        (
            {"memory": 1.0, "fraction": 0.5},
            TypeError,
            r"^fraction: of offload_modules, and with memory= .* leave that out",
        ),
        ({"plan": "p", "keep_last": 1, "only_inputs": True}, TypeError, r"^keep_last, only_inputs: of offload_modules"),
        (
            {"memory": 1.0, "offload_window_bytes": 5},
            TypeError,
            r"^fit chooses the windows by itself: leave offload_window",
        ),
        (
            {"memory": 1.0, "tir": "disk"},
            TypeError,
            r"^OffloadActivationsCallback got an unknown option: tir \(did you",
        ),
        ({"memory": 1.0, "tier": "tape"}, ValueError, r"^tier must be"),
        ({"memory": "much"}, ValueError, r"^memory must be a number of bytes"),
        ({"memory": True}, TypeError, r"^memory must be a number of bytes"),
        ({"memory": 1.0, "recompute": 1}, TypeError, r"^recompute must be True or False"),
        ({"memory": 1.0, "margin": 0.7}, ValueError, r"^margin must be"),
        ({"memory": 1.0, "on_unfit": "stop"}, ValueError, r"^on_unfit must be"),
    ):
        with pytest.raises(error, match=message):
            OffloadActivationsCallback(**options)
