"""Accelerate: offloading what a model saves that went through ``accelerator.prepare``.

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
    """The handle that ``offload_prepared`` returns. It offloads until ``remove()``, or the end of a ``with`` block."""

    def __init__(self, accelerator: Accelerator, handle: Handle | None) -> None:
        self._accelerator = accelerator
        self._handle = handle
        self._totals = StepTotals()

    def log(self, step: int | None = None) -> dict[str, float]:
        """Send what this rank moved and kept since the last call to the trackers of the accelerator.

        Call it after each optimizer step, or after several. With ``accelerator.accumulate``, call it when
        ``accelerator.sync_gradients`` is true.

        Parameters
        ----------
        step : int, optional
            The number of the step, for the trackers.

        Returns
        -------
        dict of str to float
            ``offload/gib_offloaded``, ``offload/gib_reloaded`` and ``offload/gib_kept`` (activations that were saved
            and not moved) in GiB, and ``offload/window_waits``, all since the last call; and ``offload/pinned_gib``,
            the GiB of pinned memory that are held now.
        """
        self._totals.end_step()
        totals = self._totals.take()
        self._accelerator.log(totals, step=step)
        return totals

    def remove(self) -> None:
        """Remove the hooks from the model. A second call does nothing."""
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
    """Offload what the forwards of ``model`` save, inside whatever ``accelerator.prepare`` wrapped around it.

    It also works for a model that ``dispatch_model`` or a ``device_map`` spread over several devices, prepared or not.

    Parameters
    ----------
    accelerator : accelerate.Accelerator
        The accelerator that prepared the model.
    model : torch.nn.Module
        The model, as ``accelerator.prepare`` returned it.
    modules : optional
        Offload inside these modules only: names, globs, types or a predicate, as for ``offload_modules``. Names are
        those of the model inside its wrappers. Default: the whole model except its output head.
    enabled : bool, default True
        With False nothing is installed. Ranks may differ.
    **options
        Options of ``offload_modules`` and ``OffloadActivations``, such as ``fraction=0.5`` or ``tier="disk"``.

    Returns
    -------
    PreparedOffloading
        A handle: ``remove()`` undoes the installation, ``log()`` sends the totals to the trackers.

    Raises
    ------
    TypeError
        ``accelerator`` is not an Accelerator, ``model`` is not a module, or an option has a wrong type or is unknown.
    ValueError, FileNotFoundError, NotADirectoryError, PermissionError
        An option is wrong.
    RuntimeError
        ``tier="host"`` on a machine without an accelerator.

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
