"""hf_trainings.py: small training runs of Hugging Face's Trainer, stock and with the callback."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments

from devices import Device
from gradients import Run, assert_same_gradients
from torchoffload.integrations.transformers import OffloadActivationsCallback
from trainings import hooks_of, options, tiny_llama, token_rows


def quiet(directory: Path, *, use_cpu: bool, **chosen: Any) -> dict[str, Any]:
    """Keyword arguments of TrainingArguments and its kin: a few steps, each logged, and nothing else."""
    defaults = {
        "output_dir": str(directory),
        "use_cpu": use_cpu,
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return defaults | chosen


def on_one_device(args: Any) -> Any:
    """No DataParallel where there are several GPUs."""
    args._n_gpu = min(args.n_gpu, 1)
    return args


def arguments(
    directory: Path, device: Device, kind: type[TrainingArguments] = TrainingArguments, **chosen: Any
) -> TrainingArguments:
    return on_one_device(kind(**quiet(directory, use_cpu=device.name != "cuda", **chosen)))


def trainer_of(model: Any, args: Any, callbacks: Iterable[TrainerCallback] = (), **more: Any) -> Trainer:
    return Trainer(model, args, train_dataset=token_rows(), callbacks=list(callbacks), **more)


def observe_trainer(run: Run, trainer: Any) -> None:
    """Losses, gradient norms and weights of a Hugging Face trainer that has trained."""
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logged, "no loss was logged"
    run.check(losses=[(entry["loss"], entry["grad_norm"]) for entry in logged], weights=trainer.model.state_dict())


def assert_same_training(
    directory: Path, device: Device, *, model: Callable[[Run], Any] = tiny_llama, modules: Any = None, **chosen: Any
) -> Any:
    """Fails unless the callback changes no bit of a training run, moves what it should, and is gone afterwards."""

    def program(run: Run) -> None:
        ours = [] if run.stock else [OffloadActivationsCallback(modules, **options(device))]
        trainer = trainer_of(model(run), arguments(directory, device, **chosen), ours)
        trainer.train()
        observe_trainer(run, trainer)
        assert hooks_of(trainer.model) == 0

    return assert_same_gradients(program, device=device)
