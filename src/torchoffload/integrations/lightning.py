"""Lightning's Trainer, of the package ``lightning`` and of ``pytorch_lightning``.

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

# Both packages have a Callback, and either Trainer takes either: importing the one that the program has costs nothing.
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
    """A context around each ``training_step`` that a strategy runs: that is all of forward, and no backward.

    On the strategy and not on the LightningModule: Lightning calls its ``training_step``, past the hooks of modules,
    and a function set on the module would go along into each copy of it.
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
        if vars(self._strategy).get("training_step") is self._training_step:
            del self._strategy.training_step


class OffloadActivationsCallback(Callback):
    """Offload what training steps save; gradients are the same bit for bit.

    Installs when training begins, and is gone when it ends or fails. Validation, test and predict run as without it.

    Parameters
    ----------
    modules : optional
        Offload inside these of the LightningModule only: names, globs, types or a predicate, as ``offload_modules``
        takes them. Default: all of ``training_step``, but for the model's output head.
    enabled : bool
        The switch, read when training begins. Ranks may differ. ``TORCHOFFLOAD_DISABLE=1`` turns it off as well.
    **options
        Those of ``OffloadActivations``, such as ``tier="disk"``; with ``modules`` those of ``offload_modules`` too.

    Raises
    ------
    TypeError, ValueError, FileNotFoundError, NotADirectoryError, PermissionError
        A wrong option, named at once; a trainer that is not Lightning's, when training begins.
    RuntimeError
        ``tier="host"`` without an accelerator, when training begins.

    Notes
    -----
    Logged after each batch through ``pl_module.log_dict``, as this rank has them: ``offload/gib_offloaded``,
    ``offload/gib_reloaded``, ``offload/gib_kept`` (activations that were saved and not moved),
    ``offload/window_waits``, and ``offload/pinned_gib``, what is held now. Under manual optimization backward runs
    inside of ``training_step``, and of the context: that is right as well.
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
        """Undo the installation; the second call does nothing."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Install; what an earlier run left is removed first."""
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
        """Log what the batch moved and kept."""
        if self._handle is not None:
            self._totals.end_step()
            pl_module.log_dict(self._totals.take(), on_step=True, on_epoch=False)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Undo the installation."""
        self.remove()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Undo the installation: training is over."""
        self.remove()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Undo the installation, whatever way ``fit`` was left."""
        self.remove()
