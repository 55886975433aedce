"""Hugging Face's Trainer with the callback: the same training, bit for bit, with the activations moved."""

from pathlib import Path
from typing import Any

import pytest
import torch

import torchoffload
from devices import Device
from gradients import Run, assert_same_gradients
from trainings import hooks_of, need, options, tiny_llama, token_rows

need("transformers", "accelerate")

from transformers import Trainer, TrainerCallback  # noqa: E402

from hf_trainings import arguments, assert_same_training, observe_trainer, trainer_of  # noqa: E402
from torchoffload.integrations.transformers import OffloadActivationsCallback  # noqa: E402

pytestmark = pytest.mark.devices("disk", "cuda")


def test_the_same_training(tmp_path: Path, device_under_test: Device):
    assert_same_training(tmp_path, device_under_test)


def test_gradient_accumulation(tmp_path: Path, device_under_test: Device):
    assert_same_training(tmp_path, device_under_test, gradient_accumulation_steps=2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(tmp_path: Path, device_under_test: Device, reentrant: bool):
    kwargs = {"use_reentrant": reentrant}
    assert_same_training(tmp_path, device_under_test, gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs)


def test_bf16_autocast(tmp_path: Path, device_under_test: Device):
    assert_same_training(tmp_path, device_under_test, bf16=True)


def test_torch_compile(tmp_path: Path, device_under_test: Device):
    torch._dynamo.reset()
    assert_same_training(tmp_path, device_under_test, torch_compile=True, torch_compile_backend="aot_eager")
    torch._dynamo.reset()


def test_a_model_that_was_compiled_in_place(tmp_path: Path, device_under_test: Device):
    def compiled(run: Run) -> Any:
        model = tiny_llama(run)
        model.compile(backend="aot_eager")
        return model

    torch._dynamo.reset()
    assert_same_training(tmp_path, device_under_test, model=compiled)
    torch._dynamo.reset()


def test_only_chosen_modules(tmp_path: Path, device_under_test: Device):
    whole = assert_same_training(tmp_path, device_under_test)
    layer = assert_same_training(tmp_path, device_under_test, modules="model.layers.1")
    assert 0.3 < layer.bytes_offloaded / whole.bytes_offloaded < 0.6


def test_the_last_of_the_chosen_modules_may_stay(tmp_path: Path, device_under_test: Device):
    first = assert_same_training(tmp_path, device_under_test, modules="model.layers.0")

    def program(run: Run) -> None:
        ours = OffloadActivationsCallback("model.layers.*", not run.stock, keep_last=1, **options(device_under_test))
        trainer = trainer_of(tiny_llama(run), arguments(tmp_path, device_under_test), [ours])
        trainer.train()
        observe_trainer(run, trainer)

    assert assert_same_gradients(program, device=device_under_test).bytes_offloaded == first.bytes_offloaded


class Aside(TrainerCallback):
    """Evaluates and generates after each step, and counts what torchoffload packs meanwhile."""

    def __init__(self) -> None:
        self.packed = 0

    def on_step_end(self, args, state, control, model=None, **kwargs):
        control.should_evaluate = True
        before = torchoffload.stats().handles
        model.eval()
        prompt = torch.ones(1, 4, dtype=torch.long, device=model.device)
        self.generated = model.generate(prompt, max_new_tokens=3, do_sample=False)
        model.train()
        self.packed += torchoffload.stats().handles - before
        self.before_evaluation = torchoffload.stats().handles

    def on_evaluate(self, args, state, control, **kwargs):
        self.packed += torchoffload.stats().handles - self.before_evaluation


def test_evaluation_and_generation_save_nothing(tmp_path: Path, device_under_test: Device):
    generated = []

    def program(run: Run) -> None:
        ours = [] if run.stock else [OffloadActivationsCallback(**options(device_under_test))]
        aside = Aside()
        args = arguments(tmp_path, device_under_test)
        trainer = trainer_of(tiny_llama(run), args, [*ours, aside], eval_dataset=token_rows(4))
        trainer.train()
        observe_trainer(run, trainer)
        run.check(generated=aside.generated, evaluated=[log["eval_loss"] for log in evaluations(trainer)])
        generated.append(aside.packed)

    assert_same_gradients(program, device=device_under_test)
    assert set(generated) == {0}


def evaluations(trainer: Trainer) -> list[dict[str, Any]]:
    return [entry for entry in trainer.state.log_history if "eval_loss" in entry]


def test_a_run_that_is_resumed(tmp_path: Path, device_under_test: Device):
    def program(run: Run) -> None:
        for resume in (False, True):
            ours = [] if run.stock else [OffloadActivationsCallback(**options(device_under_test))]
            saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4 if resume else 2}
            args = arguments(tmp_path / str(run.stock), device_under_test, **saving)
            trainer = trainer_of(tiny_llama(run), args, ours)
            trainer.train(resume_from_checkpoint=resume)
            observe_trainer(run, trainer)

    assert_same_gradients(program, device=device_under_test)


class FailsOnce(TrainerCallback):
    """Makes the second layer's forward raise in the first step."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        def fail(*_):
            raise RuntimeError("planted")

        self.hook = model.model.layers[1].mlp.register_forward_hook(fail)


def test_training_that_fails_and_begins_anew(tmp_path: Path, device_under_test: Device):
    def program(run: Run) -> None:
        ours = [] if run.stock else [OffloadActivationsCallback(**options(device_under_test))]
        fails = FailsOnce()
        trainer = trainer_of(tiny_llama(run), arguments(tmp_path, device_under_test), [*ours, fails])
        with pytest.raises(RuntimeError, match="planted"):
            trainer.train()
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        fails.hook.remove()
        trainer.remove_callback(fails)
        trainer.train()
        observe_trainer(run, trainer)
        assert hooks_of(trainer.model) == 0

    assert_same_gradients(program, device=device_under_test)


def test_a_context_of_the_users_own_around_it_moves_nothing_twice(tmp_path: Path, device_under_test: Device):
    alone = assert_same_training(tmp_path, device_under_test)

    def program(run: Run) -> None:
        ours = [] if run.stock else [OffloadActivationsCallback(**options(device_under_test))]
        trainer = trainer_of(tiny_llama(run), arguments(tmp_path, device_under_test), ours)
        with run.offload():
            trainer.train()
        observe_trainer(run, trainer)

    both = assert_same_gradients(program, device=device_under_test)
    assert both.bytes_offloaded <= alone.bytes_offloaded


def test_the_callback_given_twice_moves_nothing_twice(tmp_path: Path, device_under_test: Device):
    alone = assert_same_training(tmp_path, device_under_test)

    def program(run: Run) -> None:
        ours = [] if run.stock else [OffloadActivationsCallback(**options(device_under_test)) for _ in range(2)]
        trainer = trainer_of(tiny_llama(run), arguments(tmp_path, device_under_test), ours)
        trainer.train()
        observe_trainer(run, trainer)
        assert hooks_of(trainer.model) == 0

    assert assert_same_gradients(program, device=device_under_test).bytes_offloaded == alone.bytes_offloaded
