"""What the integrations share: the model inside of its wrappers, totals of a step, warnings of one rank."""

import os
import warnings
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

import torchoffload
from torchoffload._contexts.keywords import ContextKeywords, ModuleKeywords
from torchoffload._contexts.options import OffloadOptions, check_module, refuse_renamed
from torchoffload._observe.stats import OffloadStats, at_reset
from torchoffload._pytorch.module_wrappers import INNER_BY_CLASS
from torchoffload._warnings import warn_user

__all__ = [
    "Handle",
    "StepTotals",
    "check_options",
    "innermost_model",
    "missing_package",
    "offload_inner_model",
    "quiet_other_ranks",
    "warn_on_rank_0",
]

_GIB = 2**30

_ALL_OPTIONS = ModuleKeywords.__optional_keys__
_OF_MODULES = _ALL_OPTIONS - ContextKeywords.__optional_keys__  # options of offload_modules that no context has


class Handle(Protocol):
    """What undoes an installation."""

    def remove(self) -> None:
        """Undo it; the second call does nothing."""


def missing_package(module: str, package: str, extra: str) -> ImportError:
    """Make the error for an integration whose package is not installed."""
    return ImportError(f'torchoffload.integrations.{module} needs {package}: pip install "torchoffload[{extra}]"')


def check_options(options: Mapping[str, Any], *, for_modules: bool = True) -> None:
    """Refuse wrong options where they are given, not when training begins.

    Parameters
    ----------
    options : dict
        Of ``OffloadActivations``, and of ``offload_modules`` where that is what carries them out.
    for_modules : bool
        Whether it is.

    Raises
    ------
    TypeError, ValueError, FileNotFoundError, NotADirectoryError, PermissionError
        As ``OffloadActivations`` does.
    """
    refuse_renamed(options)
    of_contexts = {name: value for name, value in options.items() if name not in _OF_MODULES}
    for name in sorted(options.keys() - _ALL_OPTIONS):
        raise TypeError(f"unknown option {name!r}: the options are {', '.join(sorted(_ALL_OPTIONS))}")
    if not for_modules and len(of_contexts) < len(options):
        given = ", ".join(sorted(options.keys() & _OF_MODULES))
        raise TypeError(f"{given}: an option of offload_modules, so say which by modules=")
    OffloadOptions(**of_contexts)


def _wrapped(model: nn.Module) -> nn.Module | None:
    for base in type(model).__mro__:
        attribute = INNER_BY_CLASS.get(base.__name__)
        inner = getattr(model, attribute, None) if attribute is not None else None
        if isinstance(inner, nn.Module):
            return inner
    return None


def innermost_model(model: nn.Module) -> nn.Module:
    """Take the wrappers of parallelism and PEFT off.

    That of ``torch.compile`` stays: there is no place for hooks inside of it. Of PEFT, the tuner stays: some versions
    call ``forward`` of the model in it, past that model's hooks.

    Raises
    ------
    TypeError
        ``model`` is no module.
    """
    check_module("model", model)
    while (inner := _wrapped(model)) is not None:
        model = inner
    return model


def _names_in(root: nn.Module, modules: Any) -> Any:
    """Let names be those of the model that the user knows, where ``root`` is PEFT's tuner around it."""
    is_tuner = any(base.__name__ == "BaseTuner" for base in type(root).__mro__)
    if not is_tuner:
        return modules
    if isinstance(modules, str):
        return f"model.{modules}"
    if isinstance(modules, list | tuple):
        return [_names_in(root, each) for each in modules]
    return modules


_installed: "weakref.WeakKeyDictionary[nn.Module, Handle]" = weakref.WeakKeyDictionary()


def offload_inner_model(model: nn.Module, modules: Any, options: ModuleKeywords) -> Handle:
    """``offload_modules`` on the innermost model: on all of it, or on ``modules`` of it.

    What an integration had installed there goes first: a run that failed leaves it behind, and two would be an error.
    """
    inner = innermost_model(model)
    quiet_other_ranks()
    if (earlier := _installed.pop(inner, None)) is not None:
        earlier.remove()
    chosen = [inner] if modules is None else _names_in(inner, modules)
    handle: Handle = torchoffload.offload_modules(inner, chosen, **options)
    _installed[inner] = handle
    return handle


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0


def quiet_other_ranks() -> None:
    """Leave the warnings to rank 0: each would come once per rank, and what a rank kept is in its ``report()``."""
    if _rank() != 0:
        warnings.filterwarnings("ignore", message="torchoffload", category=UserWarning)


_warned: set[str] = set()


def warn_on_rank_0(text: str) -> None:
    """Warn with ``text``, once in the job."""
    if _rank() == 0 and text not in _warned:
        _warned.add(text)
        warn_user(f"torchoffload: {text}")


_reset_count = 0


def _count_reset() -> None:
    global _reset_count
    _reset_count += 1


at_reset(_count_reset)


class StepTotals:
    """What this process moved and kept in each step, as numbers for a trainer's log.

    Everything that torchoffload did in the process counts, whoever entered the context.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Count from here on."""
        self._step_count = 0
        self._resets_before = _reset_count
        self._before = self._counted(torchoffload.stats())

    def end_step(self) -> None:
        """One more step has ended."""
        self._step_count += 1

    @staticmethod
    def _counted(seen: OffloadStats) -> dict[str, float]:
        kept = sum(nbytes for reason, nbytes in seen.bytes_kept.items() if reason != "parameter")
        return {
            "offload/gib_offloaded": seen.bytes_offloaded / _GIB,
            "offload/gib_reloaded": seen.bytes_reloaded / _GIB,
            "offload/gib_kept": kept / _GIB,
            "offload/window_waits": seen.window_waits,
        }

    def take(self) -> dict[str, float]:
        """Return the means of the steps that ended since the last call; empty where none has."""
        if self._step_count == 0:
            return {}
        steps, before, was_reset = self._step_count, self._before, self._resets_before != _reset_count
        self.start()
        means = {name: (now - (0 if was_reset else before[name])) / steps for name, now in self._before.items()}
        return means | {"offload/pinned_gib": torchoffload.stats().pinned_bytes / _GIB}
