"""Lightning's Trainer, of the package ``lightning`` or of ``pytorch_lightning``.

Examples
--------
>>> from torchoffload.integrations.lightning import OffloadActivationsCallback
>>> trainer = Trainer(callbacks=[OffloadActivationsCallback()])
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, Unpack, cast

from torch import nn

import torchoffload
from torchoffload._contexts.accelerator import require_accelerator
from torchoffload._contexts.keywords import ContextKeywords, ModuleKeywords
from torchoffload._contexts.options import check_bool
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
        raise missing_package("lightning", "lightning", "lightning") from error

__all__ = ["OffloadActivationsCallback"]


class _StepHandle:
    """A context around each ``training_step`` that a strategy runs, which is all of forward and no backward.

    The function is replaced on the strategy and not on the LightningModule. Lightning calls ``training_step`` directly,
    so hooks on the module do not run, and a function that is set on the module would be copied along with it.
    """

    def __init__(self, strategy: Any, context: Any) -> None:
        own: Callable[..., Any] = strategy.training_step

        @functools.wraps(own)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            with context:
                return own(*args, **kwargs)

        self._strategy = strategy
        self._training_step = training_step
        strategy.training_step = training_step

    def remove(self) -> None:
        """Give the strategy its own function back, unless something else replaced it meanwhile."""
        if vars(self._strategy).get("training_step") is self._training_step:
            del self._strategy.training_step


class OffloadActivationsCallback(Callback):
    """Offload what training steps save. Gradients are equal bit for bit.

    It installs itself when training begins, and removes itself when training ends or fails. Validation, test and
    predict run as without it.

    Parameters
    ----------
    modules : optional
        Offload inside these modules of the LightningModule only: names, globs, types or a predicate, as for
        ``offload_modules``. Default: all of ``training_step``, except the model's output head.
    enabled : bool, default True
        The switch, read when training begins. Ranks may differ. ``TORCHOFFLOAD_DISABLE=1`` turns it off as well.
    **options
        Options of ``OffloadActivations``, such as ``tier="disk"``. With ``modules``, also those of ``offload_modules``.

    Raises
    ------
    TypeError, ValueError, FileNotFoundError, NotADirectoryError, PermissionError
        An option is wrong. When training begins, TypeError if the trainer is not Lightning's.
    RuntimeError
        When training begins, if ``tier="host"`` on a machine without an accelerator.

    Notes
    -----
    After each batch, ``pl_module.log_dict`` gets the values of this rank: ``offload/gib_offloaded``,
    ``offload/gib_reloaded`` and ``offload/gib_kept`` (activations that were saved and not moved) in GiB,
    ``offload/window_waits``, and ``offload/pinned_gib``, the GiB of pinned memory that are held. Under manual
    optimization backward runs inside ``training_step``, and so inside the context, which is allowed.
    """

    def __init__(self, modules: Any = None, enabled: bool = True, **options: Unpack[ModuleKeywords]) -> None:
        super().__init__()
        check_bool("enabled", enabled)
        check_options(options, for_modules=modules is not None)
        self.enabled = enabled
        self.modules = modules
        self.options = options
        self._handle: Handle | None = None
        self._totals = StepTotals()

    def remove(self) -> None:
        """Undo the installation. A second call does nothing."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Install offloading. What an earlier run left behind is removed first."""
        self.remove()
        if not self.enabled:
            return
        strategy = getattr(trainer, "strategy", None)
        if not isinstance(pl_module, nn.Module) or not callable(getattr(strategy, "training_step", None)):
            raise TypeError(
                "OffloadActivationsCallback of torchoffload.integrations.lightning is for Lightning's Trainer, with a "
                f"strategy that runs training_step: got {type(trainer).__name__} with {type(pl_module).__name__}"
            )
        require_accelerator(self.options.get("tier", "host"), type(self).__name__)
        quiet_other_ranks()
        if self.modules is not None:
            self._handle = offload_inner_model(pl_module, self.modules, self.options)
        else:
            options = cast("ContextKeywords", self.options)  # check_options() refused those of offload_modules
            context = torchoffload.get_act_offloading_ctx_manager(pl_module, True, warn_if_no_head=False, **options)
            self._handle = _StepHandle(strategy, context)
        self._totals.start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log what was moved and kept in this batch."""
        if self._handle is not None:
            self._totals.end_step()
            pl_module.log_dict(self._totals.take(), on_step=True, on_epoch=False)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Undo the installation."""
        self.remove()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Undo the installation, since training is over."""
        self.remove()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Undo the installation, in whatever way ``fit`` was left."""
        self.remove()
