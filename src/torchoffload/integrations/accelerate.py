"""Accelerate: offloading the saved tensors of a model that went through ``accelerator.prepare``.

Examples
--------
>>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
>>> offloading = offload_prepared(accelerator, model)
"""

from typing import Any, Self, Unpack, cast

from torch import nn

from torchoffload._contexts.accelerator import require_accelerator
from torchoffload._contexts.disabling import is_disabled
from torchoffload._contexts.keywords import ModuleKeywords
from torchoffload._contexts.options import check_bool
from torchoffload._fit.model.fit import Fitted
from torchoffload.integrations._fitting import ModuleOrFitKeywords, fit_inner_model, fit_numbers, fit_options
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
    raise missing_package("accelerate", "accelerate") from error

__all__ = ["PreparedOffloading", "offload_prepared"]


class PreparedOffloading:
    """The handle that ``offload_prepared`` returns. It offloads until ``remove()``, or the end of a ``with`` block.

    Attributes
    ----------
    fitted : Fitted or None
        With ``memory``, the handle of ``torchoffload.fit``: its ``report()`` can be read after ``remove()``, too.
    """

    def __init__(self, accelerator: Accelerator, handle: Handle | None) -> None:
        self._accelerator = accelerator
        self._handle = handle
        self.fitted = handle if isinstance(handle, Fitted) else None
        self._totals = StepTotals()

    def log(self, step: int | None = None) -> dict[str, float]:
        """Send the amounts that this rank moved and kept since the last call to the trackers of the accelerator.

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
            the GiB of pinned memory that are held now. With ``memory``, also ``fit/phase`` (0 survey, 1 trials, 2
            settled, 3 least memory, 4 removed), ``fit/phase_step``, and once there is a plan ``fit/calls_recomputed``
            and ``fit/calls_moved``.
        """
        self._totals.end_step()
        totals = self._totals.take() | fit_numbers(self.fitted)
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
    memory: float | str | None = None,
    **options: Unpack[ModuleOrFitKeywords],
) -> PreparedOffloading:
    """Offload the tensors that forwards of ``model`` save, whatever ``accelerator.prepare`` wrapped around it.

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
    memory : int, float, str, optional
        Have ``torchoffload.fit`` choose which tensors are kept, moved or computed again in this much memory of the
        device, as in ``memory="40GiB"``. ``modules`` are its ``blocks`` then. Call it before the first step.
    **options
        Options of ``offload_modules`` and ``OffloadActivations``, such as ``fraction=0.5`` or ``tier="disk"``. With
        ``memory``, those of ``fit``, such as ``recompute=False``; ``plan="plan.json"`` asks for ``fit`` as well.

    Returns
    -------
    PreparedOffloading
        A handle: ``remove()`` undoes the installation, ``log()`` sends the totals to the trackers.

    Raises
    ------
    TypeError
        ``accelerator`` is not an Accelerator, ``model`` is not a module, or an option has a wrong type or is unknown.
    ValueError, FileNotFoundError, NotADirectoryError, PermissionError
        An option is wrong. With ``memory``, ValueError if the model checkpoints its blocks, is spread over several
        devices, or is compiled as a whole by another backend than inductor or with ``modules``.
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
    of_fit = fit_options("offload_prepared", memory, modules, options)
    if of_fit is None:
        check_options("offload_prepared", options)
    if not enabled or (of_fit is not None and is_disabled()):
        return PreparedOffloading(accelerator, None)
    if of_fit is not None:
        return PreparedOffloading(accelerator, fit_inner_model(model, modules, of_fit))
    require_accelerator(options.get("tier", "host"), "offload_prepared")
    return PreparedOffloading(accelerator, offload_inner_model(model, modules, cast("ModuleKeywords", options)))
