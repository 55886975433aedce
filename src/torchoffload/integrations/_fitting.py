"""The common part of the integrations for ``memory=``, which asks for ``torchoffload.fit``."""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from torchoffload._contexts.keywords import ContextKeywords, ModuleKeywords
from torchoffload._fit.model.compiled_model import recompilable
from torchoffload._fit.model.fit import Fitted, fit_with
from torchoffload._fit.model.options import FitKeywords, FitOptions
from torchoffload._modules.selection import choose
from torchoffload._pytorch.recompiling import whole_call_of
from torchoffload.integrations._trainers import (
    innermost_model,
    install_once,
    installed_on,
    is_of_peft,
    names_in,
    warn_on_rank_0,
    wrapped_in,
)

__all__ = [
    "ContextOrFitKeywords",
    "ModuleOrFitKeywords",
    "SurveyWatch",
    "fit_inner_model",
    "fit_numbers",
    "fit_options",
    "fitted_inside",
]


class ModuleOrFitKeywords(ModuleKeywords, FitKeywords, total=False):
    """The options of an integration that calls ``offload_modules`` or ``fit``."""


class ContextOrFitKeywords(ContextKeywords, FitKeywords, total=False):
    """The options of an integration that makes a context or calls ``fit``."""


_OF_FIT: frozenset[str] = FitKeywords.__optional_keys__
_OF_MODULES = ModuleKeywords.__optional_keys__ - ContextKeywords.__optional_keys__

_AMOUNT = re.compile(r"\s*\d+(\.\d+)?\s*(%|[kmgt]i?b?)\s*", re.IGNORECASE)  # a text that cannot be a name

_PHASES = ("survey", "trials", "settled", "least memory", "removed", "compiled")
_STEPS_TO_A_PLAN = 16  # a survey takes three or so


def _listed(names: Any) -> str:
    return ", ".join(sorted(names))


def fit_options(taker: str, memory: Any, modules: Any, options: Mapping[str, Any]) -> FitOptions | None:
    """Return the options of ``fit``, checked, if ``memory`` or the option ``plan`` asks for it; None otherwise.

    Parameters
    ----------
    taker : str
        The function or class that was given the options, for messages.
    memory : int, float, str or None
        As for ``fit``.
    modules : optional
        The modules that were given.
    options : mapping of str to value
        The options that were given, of any kind.

    Raises
    ------
    TypeError, ValueError, FileNotFoundError, NotADirectoryError, PermissionError
        An amount of memory is given in the place of ``modules``; an option of ``fit`` is given, and ``fit`` is not
        asked for; or it is, and an option is wrong, unknown, or one that ``fit`` does not have.
    """
    is_number = isinstance(modules, int | float) and not isinstance(modules, bool)
    if is_number or (isinstance(modules, str) and _AMOUNT.fullmatch(modules)):
        raise TypeError(
            f"{taker} got {modules!r} in the place of modules=, which chooses modules: did you mean memory={modules!r}?"
        )
    if memory is None and options.get("plan") is None:
        if given := _OF_FIT.intersection(options):
            raise TypeError(f"{_listed(given)}: of torchoffload.fit, which memory= asks for: give memory=, too")
        return None
    if given := _OF_MODULES.intersection(options):
        raise TypeError(
            f"{_listed(given)}: of offload_modules, and with memory= or plan= torchoffload.fit chooses what moves: "
            "leave that out, or memory= and plan="
        )
    return FitOptions.of(taker, memory, options, also=frozenset({"modules", "enabled"}))


def _check_can_be_fitted(model: nn.Module, inner: nn.Module, *, is_planned_whole: bool) -> None:
    parallel = [each for each in wrapped_in(model) if type(each).__name__ == "DataParallel"]
    if any(len(getattr(each, "device_ids", ())) > 1 for each in parallel):
        raise ValueError(
            "memory= is for one device in each process, and DataParallel spreads each step over several: start one "
            "process for each device with torchrun, or show only one device to this one"
        )
    if whole_call_of(inner) is not None and not is_planned_whole:
        raise ValueError(
            "memory= cannot see the blocks of the model, since torch.compile made one region of all of it. It plans "
            "the graphs of the region if training calls the compiled module itself, inductor compiled it, and neither "
            "modules=, plan= nor recompute=False is given. Else compile the blocks each for itself, or nothing, or "
            "leave memory= out"
        )
    for name, module in inner.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True or type(module).__name__ == "CheckpointWrapper":
            raise ValueError(
                f"gradient checkpointing is on in {name or type(inner).__name__!r}, and with memory= torchoffload.fit "
                "chooses what is computed again: turn it off, such as by gradient_checkpointing=False, or leave "
                "memory= out"
            )


def _warn_of_caches(inner: nn.Module) -> None:
    if getattr(getattr(inner, "config", None), "use_cache", False) is True:
        warn_on_rank_0(
            "the model's config.use_cache is True, so that its blocks write to a cache and cannot be computed again. "
            "Set model.config.use_cache = False for training."
        )


def fit_inner_model(model: nn.Module, modules: Any, options: FitOptions, *, called: nn.Module | None = None) -> Fitted:
    """Call ``torchoffload.fit`` for the innermost model.

    An earlier installation of an integration on it is removed first.

    Parameters
    ----------
    model : torch.nn.Module
        The model, with or without wrappers.
    modules : optional
        The blocks, as for ``fit``; names are those of the model inside its wrappers.
    options : FitOptions
        The options of ``fit``.
    called : torch.nn.Module, optional
        The module that training calls, if that is another one. The model is in it.

    Raises
    ------
    TypeError, ValueError, FileNotFoundError, NotADirectoryError, PermissionError, RuntimeError
        Those of ``fit``; ValueError also if the model is checkpointed, run on several devices, or compiled as a whole
        in a way in which its graphs cannot be planned.
    """
    inner = innermost_model(model)
    fitted_one = _called_by_training(model) if called is None else called
    may_plan_graphs = modules is None and options.plan is None and options.recompute
    is_planned_whole = may_plan_graphs and recompilable(fitted_one) is not None
    _check_can_be_fitted(model, inner, is_planned_whole=is_planned_whole)
    if options.recompute and not is_planned_whole:
        _warn_of_caches(inner)
    blocks = None if modules is None else [each.module for each in choose(inner, names_in(inner, modules))]
    return install_once(inner, lambda: fit_with(fitted_one, blocks, options))


def _called_by_training(model: nn.Module) -> nn.Module:
    """Return the module that training calls: the innermost model, or of several models of PEFT the outermost.

    A model of PEFT calls one of the modules inside it, and its task decides which.
    """
    for each in wrapped_in(model):
        if is_of_peft(each):
            return each
    return innermost_model(model)


def fitted_inside(model: nn.Module) -> Fitted | None:
    """Return the latest handle of ``fit_inner_model`` for the innermost model; None without that."""
    handle = installed_on(model)
    return handle if isinstance(handle, Fitted) else None


def fit_numbers(fitted: Fitted | None) -> dict[str, float]:
    """Return the progress of a fitted model as numbers for a trainer's log; none without one.

    Returns
    -------
    dict of str to float
        ``fit/phase`` (0 survey, 1 trials, 2 settled, 3 least memory, 4 removed, 5 compiled), ``fit/phase_step``, the
        step of it, and once a plan is followed ``fit/calls_recomputed`` and ``fit/calls_moved``: how many calls of
        blocks compute something again, and how many move something.
    """
    if fitted is None:
        return {}
    progress = fitted._driver.progress()
    numbers = {"fit/phase": float(_PHASES.index(fitted.phase)), "fit/phase_step": float(progress.phase_step)}
    if progress.recomputed_count is not None and progress.moved_count is not None:
        numbers["fit/calls_recomputed"] = float(progress.recomputed_count)
        numbers["fit/calls_moved"] = float(progress.moved_count)
    return numbers


class SurveyWatch:
    """Warns if a trainer's steps go by and ``fit`` sees none of them."""

    def __init__(self) -> None:
        self._steps_left = _STEPS_TO_A_PLAN

    def step_ended(self, fitted: Fitted) -> None:
        """Note that a training step has ended."""
        if self._steps_left == 0:
            return
        is_unseen = fitted.phase == "survey"
        self._steps_left = self._steps_left - 1 if is_unseen else 0
        if is_unseen and self._steps_left == 0:
            warn_on_rank_0(
                f"after {_STEPS_TO_A_PLAN} steps torchoffload.fit has seen no whole step of the model, so that there "
                "is no plan. Does the trainer call the model itself, and not modules in it?"
            )
