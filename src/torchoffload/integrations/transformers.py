"""Hugging Face's Trainer and the trainers that are derived from it.

Examples
--------
>>> from torchoffload.integrations.transformers import OffloadActivationsCallback
>>> trainer = Trainer(model, args, train_dataset=data, callbacks=[OffloadActivationsCallback()])
"""

from typing import Any, Unpack, cast

from torch import nn

import torchoffload
from torchoffload._contexts.accelerator import require_accelerator
from torchoffload._contexts.disabling import is_disabled
from torchoffload._contexts.keywords import ContextKeywords, ModuleKeywords
from torchoffload._contexts.options import check_bool
from torchoffload._fit.model.fit import Fitted
from torchoffload._fit.model.options import FitOptions
from torchoffload._pytorch.module_wrappers import COMPILED
from torchoffload.integrations._compiled import CompiledCalls
from torchoffload.integrations._fitting import (
    ModuleOrFitKeywords,
    SurveyWatch,
    fit_inner_model,
    fit_numbers,
    fit_options,
    fitted_inside,
)
from torchoffload.integrations._trainers import (
    Handle,
    StepTotals,
    check_options,
    innermost_model,
    missing_package,
    offload_inner_model,
    quiet_other_ranks,
    warn_on_rank_0,
)

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ModuleNotFoundError as error:
    raise missing_package("transformers", "transformers") from error

__all__ = ["LogOffloadingCallback", "OffloadActivationsCallback"]


def _is_compiled_later(args: TrainingArguments, model: nn.Module) -> bool:
    return bool(getattr(args, "torch_compile", False)) and not hasattr(model, COMPILED)


class LogOffloadingCallback(TrainerCallback):
    """Add the amounts that torchoffload moved and kept to the trainer's log, and do nothing else.

    It is for a trainer that enters a context of torchoffload by itself, as the trainers of TRL do after
    ``torchoffload.integrations.trl.install()``. Each log of a training loss gets the means of this rank over the
    optimizer steps since the last one: ``offload/gib_offloaded``, ``offload/gib_reloaded`` and ``offload/gib_kept``
    (activations that were saved and not moved) in GiB, and ``offload/window_waits``; and ``offload/pinned_gib``, the
    GiB of pinned memory that are held. With ``memory``, also ``fit/phase`` (0 survey, 1 trials, 2 settled, 3 least
    memory, 4 removed), ``fit/phase_step``, and once there is a plan ``fit/calls_recomputed`` and ``fit/calls_moved``.

    Notes
    -----
    The values are in ``trainer.state.log_history``, and are seen by callbacks that come later, such as the progress
    bar. The reporters of ``report_to`` come before all callbacks that are given to a trainer, so they do not see the
    values unless ``attach(trainer)`` puts this callback first.
    """

    def __init__(self) -> None:
        self._totals = StepTotals()

    def attach(self, trainer: Trainer) -> None:
        """Become the first callback of ``trainer``, instead of being given to it in ``callbacks=[...]``.

        Parameters
        ----------
        trainer : transformers.Trainer
            The trainer, before ``train()`` is called.

        Raises
        ------
        TypeError
            ``trainer`` is not a ``transformers.Trainer``.
        """
        if not isinstance(trainer, Trainer):
            raise TypeError(
                f"{type(self).__name__} attaches to a transformers.Trainer, got {type(trainer).__name__}: for a loop "
                "of your own there are OffloadActivations and torchoffload.integrations.accelerate"
            )
        callbacks = trainer.callback_handler.callbacks
        if self in callbacks:
            callbacks.remove(self)
        callbacks.insert(0, self)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to count."""
        self._totals.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count an optimizer step."""
        self._totals.end_step()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the means to the log of a training loss; logs of evaluation and the summary at the end are left alone."""
        if logs is None or "loss" not in logs:
            return
        model = kwargs.get("model")
        totals = self._totals.take() | fit_numbers(fitted_inside(model) if isinstance(model, nn.Module) else None)
        logs.update(totals)
        if state.log_history and "loss" in state.log_history[-1]:
            state.log_history[-1].update(totals)


class OffloadActivationsCallback(LogOffloadingCallback):
    """Offload the tensors that the trainer's model saves in training. Gradients are equal bit for bit.

    When training begins, it installs itself on the model inside DDP, FSDP, DeepSpeed, ``torch.compile`` and PEFT, and
    when training ends it removes itself. Evaluation and ``generate()`` run as without it, since they save nothing.

    Parameters
    ----------
    modules : optional
        Offload inside these modules only: names, globs, types or a predicate, as for ``offload_modules``. Names are
        those of the model inside its wrappers. Default: the whole model except its output head.
    enabled : bool or str, default True
        The switch, read when training begins. A str is the name of an attribute of the trainer's ``args``. So a field
        of your own ``TrainingArguments`` can turn offloading on from a command line or a YAML file. Ranks may differ.
        ``TORCHOFFLOAD_DISABLE=1`` in the environment turns it off as well.
    memory : int, float, str, optional
        Have ``torchoffload.fit`` choose which tensors are kept, moved or computed again in this much memory of the
        device, as in ``memory="40GiB"``. ``modules`` are its ``blocks`` then.
    **options
        Options of ``offload_modules`` and ``OffloadActivations``, such as ``fraction=0.5`` or ``tier="disk"``. With
        ``memory``, those of ``fit``, such as ``recompute=False``; ``plan="plan.json"`` asks for ``fit`` as well.

    Attributes
    ----------
    fitted : Fitted or None
        With ``memory``, the handle of ``torchoffload.fit`` for the training that runs or ran last. After training its
        ``report()`` can still be read and its plan be saved, as long as the model lives.

    Raises
    ------
    TypeError, ValueError, FileNotFoundError, NotADirectoryError, PermissionError
        An option is wrong. When training begins, TypeError if the trainer gives callbacks no model, and ValueError if
        options of ``offload_modules`` are given and the whole model is compiled. With ``memory``, ValueError if
        ``torch_compile``, gradient checkpointing or TRL's offloading is on, and under DataParallel.
    AttributeError
        When training begins, if ``enabled`` names no attribute of the trainer's ``args``.
    RuntimeError
        When training begins, if ``tier="host"`` on a machine without an accelerator.

    Notes
    -----
    The means of each step are logged, as ``LogOffloadingCallback`` describes. A training run that ends in an exception
    leaves the hooks on the model until the next ``train()`` or ``remove()``.
    """

    def __init__(
        self,
        modules: Any = None,
        enabled: bool | str = True,
        *,
        memory: float | str | None = None,
        **options: Unpack[ModuleOrFitKeywords],
    ) -> None:
        super().__init__()
        if not isinstance(enabled, str):
            check_bool("enabled", enabled)
        self._of_fit = fit_options(type(self).__name__, memory, modules, options)
        if self._of_fit is None:
            check_options(type(self).__name__, options)
        self.enabled = enabled
        self.modules = modules
        self.options = options
        self.fitted: Fitted | None = None
        self._handle: Handle | None = None
        self._saved_before: int | None = None
        self._survey = SurveyWatch()

    def remove(self) -> None:
        """Remove the hooks from the model. A second call does nothing."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _is_on(self, args: TrainingArguments) -> bool:
        if isinstance(self.enabled, bool):
            return self.enabled
        if not hasattr(args, self.enabled):
            raise AttributeError(
                f"enabled={self.enabled!r} names no attribute of {type(args).__name__}: give TrainingArguments a field "
                "of that name, or pass True or False"
            )
        is_on = getattr(args, self.enabled)
        check_bool(f"args.{self.enabled}", is_on)
        return bool(is_on)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Install offloading on ``model``. An earlier run's installation is removed first."""
        super().on_train_begin(args, state, control, **kwargs)
        self.remove()
        self.fitted, self._saved_before = None, None
        if not self._is_on(args) or is_disabled():
            return
        if not isinstance(model, nn.Module):
            raise TypeError(
                "OffloadActivationsCallback is for transformers.Trainer, which gives callbacks its model: got "
                f"model={type(model).__name__} in on_train_begin"
            )
        if self._of_fit is not None:
            self._handle = self.fitted = self._fit(args, model, self._of_fit)
            self._survey = SurveyWatch()
            return
        if getattr(args, "activation_offloading", False):
            warn_on_rank_0(
                "both args.activation_offloading and OffloadActivationsCallback are on: set the first to False."
            )
        will_be = _is_compiled_later(args, model)
        is_compiled = will_be or innermost_model(model)._compiled_call_impl is not None  # set by module.compile()
        install = self._around_compiled_calls if is_compiled else self._around_calls
        self._handle = install(model)
        self._saved_before = torchoffload.stats().handles

    def _fit(self, args: TrainingArguments, model: nn.Module, options: FitOptions) -> Fitted:
        if getattr(args, "activation_offloading", False):
            raise ValueError(
                "args.activation_offloading is on, and with memory= torchoffload.fit chooses what moves: set "
                "activation_offloading=False, or leave memory= out"
            )
        if getattr(args, "gradient_checkpointing", False):
            raise ValueError(
                "args.gradient_checkpointing is on, and with memory= torchoffload.fit chooses what is computed again: "
                "set gradient_checkpointing=False, or leave memory= out"
            )
        if _is_compiled_later(args, model):
            raise ValueError(
                "args.torch_compile has the trainer compile the model out of reach of memory=: set torch_compile=False "
                "and call model.compile() before the trainer is made, or leave memory= out"
            )
        if getattr(args, "n_gpu", 1) > 1:
            raise ValueError(
                "memory= is for one device in each process, and this one would use several by DataParallel: start the "
                "training with torchrun or accelerate launch, or set CUDA_VISIBLE_DEVICES to one device"
            )
        return fit_inner_model(model, self.modules, options)

    def _require_accelerator(self) -> None:
        require_accelerator(self.options.get("tier", "host"), type(self).__name__)

    def _around_calls(self, model: nn.Module) -> Handle:
        self._require_accelerator()
        return offload_inner_model(model, self.modules, cast("ModuleKeywords", self.options))

    def _around_compiled_calls(self, model: nn.Module) -> Handle:
        if self.modules is not None or not self.options.keys() <= ContextKeywords.__optional_keys__:
            raise ValueError(
                "torch_compile=True or model.compile() makes one region of the model, in which modules cannot be told "
                "apart: leave modules, fraction, keep_last and only_inputs out of OffloadActivationsCallback, or do "
                "not compile the whole model"
            )
        self._require_accelerator()
        quiet_other_ranks()
        return CompiledCalls(innermost_model(model), cast("ContextKeywords", self.options))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count an optimizer step. Warn if the first one saved nothing that could be offloaded, or no plan comes."""
        super().on_step_end(args, state, control, **kwargs)
        before, self._saved_before = self._saved_before, None
        if before is not None and torchoffload.stats().handles == before:
            warn_on_rank_0(
                "the first step saved nothing inside the modules that OffloadActivationsCallback is installed on, so "
                "nothing is offloaded. Does the trainer call them, and with gradients enabled?"
            )
        if self.fitted is not None:
            self._survey.step_ended(self.fitted)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove the hooks from the model."""
        self.remove()
