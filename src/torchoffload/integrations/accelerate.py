"""Accelerate: offload what a model that went through ``accelerator.prepare`` saves.

Examples
--------
>>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
>>> offloading = offload_prepared(accelerator, model)
"""

from typing import Any, Self, Unpack

from torch import nn

from torchoffload._contexts.accelerator import require_accelerator
from torchoffload._contexts.keywords import ModuleKeywords
from torchoffload._contexts.options import check_bool
from torchoffload.integrations._trainers import (
    Handle,
    StepTotals,
    check_options,
    missing_package,
    offload_inner_model,
)

try:
    from accelerate import Accelerator
except ModuleNotFoundError as error:
    raise missing_package("accelerate", "accelerate", "accelerate") from error

__all__ = ["PreparedOffloading", "offload_prepared"]


class PreparedOffloading:
    """Offloading on a prepared model, until ``remove()`` or the end of a ``with``."""

    def __init__(self, accelerator: Accelerator, handle: Handle | None) -> None:
        self._accelerator = accelerator
        self._handle = handle
        self._totals = StepTotals()

    def log(self, step: int | None = None) -> dict[str, float]:
        """Send what was moved and kept since the last call to the accelerator's trackers.

        Call it after each optimizer step, or after several: with ``accelerator.accumulate``, where
        ``accelerator.sync_gradients`` is true.

        Parameters
        ----------
        step : int, optional
            The step that the trackers file it under.

        Returns
        -------
        dict of str to float
            This rank's ``offload/gib_offloaded``, ``offload/gib_reloaded``, ``offload/gib_kept`` (activations that
            were saved and not moved) and ``offload/window_waits`` since the last call; and ``offload/pinned_gib``, what
            is held now.
        """
        self._totals.end_step()
        totals = self._totals.take()
        self._accelerator.log(totals, step=step)
        return totals

    def remove(self) -> None:
        """Take the hooks off the model; the second call does nothing."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def offload_prepared(
    accelerator: Accelerator,
    model: nn.Module,
    modules: Any = None,
    *,
    enabled: bool = True,
    **options: Unpack[ModuleKeywords],
) -> PreparedOffloading:
    """Offload what forwards of ``model`` save, inside of whatever ``accelerator.prepare`` wrapped around it.

    For a model that ``dispatch_model`` or a ``device_map`` spread over devices as well, prepared or not.

    Parameters
    ----------
    accelerator : accelerate.Accelerator
        The one that prepared the model.
    model : torch.nn.Module
        What ``accelerator.prepare`` returned for the model.
    modules : optional
        Offload inside these only: names, globs, types or a predicate, as ``offload_modules`` takes them. Names are
        those of the model inside of its wrappers. Default: the whole model, but for its output head.
    enabled : bool
        False: nothing is installed. Ranks may differ.
    **options
        Those of ``offload_modules`` and ``OffloadActivations``, such as ``fraction=0.5`` or ``tier="disk"``.

    Returns
    -------
    PreparedOffloading
        Undoes it with ``remove()``, logs with ``log()``.

    Raises
    ------
    TypeError
        ``accelerator`` is no Accelerator, or ``model`` no module.
    TypeError, ValueError, FileNotFoundError, NotADirectoryError, PermissionError
        A wrong option.
    RuntimeError
        ``tier="host"`` without an accelerator.

    Examples
    --------
    >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    >>> offloading = offload_prepared(accelerator, model)
    >>> for batch in loader:
    ...     with accelerator.accumulate(model):
    ...         accelerator.backward(model(**batch).loss)
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...     if accelerator.sync_gradients:
    ...         offloading.log()
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"accelerator must be an accelerate.Accelerator, got {type(accelerator).__name__}")
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be the torch.nn.Module that accelerator.prepare returned for the model, got "
            f"{type(model).__name__}: call offload_prepared once for each model"
        )
    check_bool("enabled", enabled)
    check_options(options)
    if not enabled:
        return PreparedOffloading(accelerator, None)
    require_accelerator(options.get("tier", "host"), "offload_prepared")
    return PreparedOffloading(accelerator, offload_inner_model(model, modules, options))
