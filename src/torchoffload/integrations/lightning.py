"""Lightning's Trainer, of the package ``lightning`` or of ``pytorch_lightning``.

Examples
--------
>>> from torchoffload.integrations.lightning import OffloadActivationsCallback
>>> trainer = Trainer(callbacks=[OffloadActivationsCallback()])
"""

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, Unpack, cast

from torch import nn

import torchoffload
from torchoffload._contexts.accelerator import require_accelerator
from torchoffload._contexts.disabling import is_disabled
from torchoffload._contexts.keywords import ContextKeywords, ModuleKeywords
from torchoffload._contexts.options import check_bool
from torchoffload._fit.choosing.structure import find_blocks
from torchoffload._fit.model.fit import Fitted
from torchoffload._fit.model.options import FitOptions
from torchoffload.integrations._fitting import ModuleOrFitKeywords, fit_inner_model, fit_numbers, fit_options
from torchoffload.integrations._trainers import (
    Handle,
    StepTotals,
    check_options,
    missing_package,
    offload_inner_model,
    quiet_other_ranks,
)

# Both packages have a class Callback, and the Trainer of either takes both. So the one that the program has imported is
# used, since importing it costs nothing.
try:
    if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
        from pytorch_lightning import Callback
    else:
        from lightning.pytorch import Callback
except ModuleNotFoundError:
    try:
        from pytorch_lightning import Callback
    except ModuleNotFoundError as error:
        raise missing_package("lightning", "lightning") from error

__all__ = ["OffloadActivationsCallback"]


class _StepHandle:
    """Something in the place of the ``training_step`` that a strategy runs, which is all of forward and no backward.

    The function is replaced on the strategy and not on the LightningModule. Lightning calls ``training_step`` directly,
    so hooks on the module do not run, and a function that is set on the module would be copied along with it.
    """

    def __init__(self, strategy: Any, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        own: Callable[..., Any] = strategy.training_step
        self._strategy = strategy
        self._training_step = functools.wraps(own)(around(own))
        strategy.training_step = self._training_step

    def remove(self) -> None:
        """Give the strategy its own function back, unless something else replaced it meanwhile."""
        if vars(self._strategy).get("training_step") is self._training_step:
            del self._strategy.training_step


def _inside(context: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    def training_step(*args: Any, **kwargs: Any) -> Any:
        with context:
            return own(*args, **kwargs)

    return training_step


class TrainingStep(nn.Module):
    """A ``training_step`` as the forward of a module around the LightningModule, so that ``fit`` sees calls of it."""

    def __init__(self, pl_module: nn.Module, own: Callable[..., Any]) -> None:
        super().__init__()
        self.module = pl_module  # the name is no part of the names of modules in it
        self._own: Callable[..., Any] | None = own

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the strategy's own ``training_step``."""
        assert self._own is not None
        return self._own(*args, **kwargs)

    def forget(self) -> None:
        """Hold neither the LightningModule nor the strategy any more."""
        self._modules.clear()
        self._own = None


def _instead(step: TrainingStep, _own: Callable[..., Any]) -> Callable[..., Any]:
    def training_step(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    return training_step


# The step that was fitted last, by its LightningModule: report() asks for it after the training, too.
_last_steps: "weakref.WeakKeyDictionary[nn.Module, TrainingStep]" = weakref.WeakKeyDictionary()


class _FittedSteps:
    """``torchoffload.fit`` for the training steps of a LightningModule."""

    def __init__(self, strategy: Any, pl_module: Any, modules: Any, options: FitOptions) -> None:
        if not getattr(pl_module, "automatic_optimization", True):
            raise ValueError(
                "memory= is for automatic optimization, where backward follows training_step: with manual "
                "optimization, call torchoffload.fit() for the module that training_step calls"
            )
        if getattr(pl_module, "_compiler_ctx", None) is not None:
            raise ValueError(
                "memory= needs to see the blocks of the model, and torch.compile makes one region of a whole "
                "LightningModule: compile its blocks each for itself, or leave memory= out"
            )
        if modules is None and (modules := find_blocks(pl_module)) == [pl_module]:
            raise ValueError(
                f"{type(pl_module).__name__} repeats no module, so say by modules= which are the blocks that may be "
                "computed again: training_step as a whole may not"
            )
        self._step = _last_steps[pl_module] = TrainingStep(pl_module, strategy.training_step)
        self.fitted = fit_inner_model(pl_module, modules, options, called=self._step)
        self._step_handle = _StepHandle(strategy, functools.partial(_instead, self._step))

    def remove(self) -> None:
        """Give the strategy its own function back, and remove the hooks. A second call does nothing."""
        self._step_handle.remove()
        self.fitted.remove()
        self._step.forget()


class OffloadActivationsCallback(Callback):
    """Offload the tensors that training steps save. Gradients are equal bit for bit.

    It installs itself when training begins, and removes itself when training ends or fails. Validation, test and
    predict run as without it.

    Parameters
    ----------
    modules : optional
        Offload inside these modules of the LightningModule only: names, globs, types or a predicate, as for
        ``offload_modules``. Default: all of ``training_step``, except the model's output head.
    enabled : bool, default True
        The switch, read when training begins. Ranks may differ. ``TORCHOFFLOAD_DISABLE=1`` turns it off as well.
    memory : int, float, str, optional
        Have ``torchoffload.fit`` choose which tensors are kept, moved or computed again in this much memory of the
        device, as in ``memory="40GiB"``. ``modules`` are its ``blocks`` then.
    **options
        Options of ``OffloadActivations``, such as ``tier="disk"``. With ``modules``, also those of ``offload_modules``.
        With ``memory``, those of ``fit``, such as ``recompute=False``; ``plan="plan.json"`` asks for ``fit`` as well.

    Attributes
    ----------
    fitted : Fitted or None
        With ``memory``, the handle of ``torchoffload.fit`` for the training that runs or ran last. After training its
        ``report()`` can still be read and its plan be saved, as long as the LightningModule lives.

    Raises
    ------
    TypeError, ValueError, FileNotFoundError, NotADirectoryError, PermissionError
        An option is wrong. When training begins, TypeError if the trainer is not Lightning's. With ``memory``,
        ValueError under manual optimization, if the LightningModule is compiled as a whole or checkpointed, and if it
        repeats no module and there are no ``modules``.
    RuntimeError
        When training begins, if ``tier="host"`` on a machine without an accelerator.

    Notes
    -----
    After each batch, ``pl_module.log_dict`` gets the values of this rank: ``offload/gib_offloaded``,
    ``offload/gib_reloaded`` and ``offload/gib_kept`` (activations that were saved and not moved) in GiB,
    ``offload/window_waits``, and ``offload/pinned_gib``, the GiB of pinned memory that are held. With ``memory`` it
    also gets ``fit/phase`` (0 survey, 1 trials, 2 settled, 3 least memory, 4 removed), ``fit/phase_step``, and once
    there is a plan ``fit/calls_recomputed`` and ``fit/calls_moved``. Under manual optimization backward runs inside
    ``training_step``, and so inside the context, which is allowed.
    """

    def __init__(
        self,
        modules: Any = None,
        enabled: bool = True,
        *,
        memory: float | str | None = None,
        **options: Unpack[ModuleOrFitKeywords],
    ) -> None:
        super().__init__()
        check_bool("enabled", enabled)
        self._of_fit = fit_options(type(self).__name__, memory, modules, options)
        if self._of_fit is None:
            check_options(type(self).__name__, options, for_modules=modules is not None)
        self.enabled = enabled
        self.modules = modules
        self.options = options
        self.fitted: Fitted | None = None
        self._handle: Handle | None = None
        self._totals = StepTotals()

    def remove(self) -> None:
        """Undo the installation. A second call does nothing."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Install offloading. An earlier run's installation is removed first."""
        self.remove()
        self.fitted = None
        if not self.enabled or (self._of_fit is not None and is_disabled()):
            return
        strategy = getattr(trainer, "strategy", None)
        if not isinstance(pl_module, nn.Module) or not callable(getattr(strategy, "training_step", None)):
            raise TypeError(
                "OffloadActivationsCallback of torchoffload.integrations.lightning is for Lightning's Trainer, with a "
                f"strategy that runs training_step: got {type(trainer).__name__} with {type(pl_module).__name__}"
            )
        if self._of_fit is not None:
            self._handle = fitted_steps = _FittedSteps(strategy, pl_module, self.modules, self._of_fit)
            self.fitted = fitted_steps.fitted
        else:
            self._handle = self._offload(strategy, pl_module)
        self._totals.start()

    def _offload(self, strategy: Any, pl_module: nn.Module) -> Handle:
        require_accelerator(self.options.get("tier", "host"), type(self).__name__)
        if self.modules is not None:
            return offload_inner_model(pl_module, self.modules, cast("ModuleKeywords", self.options))
        quiet_other_ranks()
        options = cast("ContextKeywords", self.options)  # those of offload_modules and fit were refused
        context = torchoffload.get_act_offloading_ctx_manager(pl_module, True, warn_if_no_head=False, **options)
        return _StepHandle(strategy, functools.partial(_inside, context))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the amounts that were moved and kept in this batch."""
        if self._handle is not None:
            self._totals.end_step()
            pl_module.log_dict(self._totals.take() | fit_numbers(self.fitted), on_step=True, on_epoch=False)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Undo the installation."""
        self.remove()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Undo the installation, since training is over."""
        self.remove()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Undo the installation, in whatever way ``fit`` was left."""
        self.remove()
