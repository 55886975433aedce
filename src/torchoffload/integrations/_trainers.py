"""The common part of the integrations: the model inside its wrappers, totals for logs, warnings on one rank only."""

import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

import torchoffload
from torchoffload._contexts.keywords import ContextKeywords, ModuleKeywords
from torchoffload._contexts.options import OffloadOptions, check_module, refuse_unknown
from torchoffload._observe.stats import OffloadStats, at_reset
from torchoffload._pytorch.module_wrappers import INNER_BY_CLASS, PEFT
from torchoffload._warnings import warn_user

__all__ = [
    "Handle",
    "StepTotals",
    "check_options",
    "innermost_model",
    "install_once",
    "installed_on",
    "is_of_peft",
    "missing_package",
    "names_in",
    "offload_inner_model",
    "quiet_other_ranks",
    "warn_on_rank_0",
    "wrapped_in",
]

_GIB = 2**30

_ALL_OPTIONS = ModuleKeywords.__optional_keys__
_OF_MODULES = _ALL_OPTIONS - ContextKeywords.__optional_keys__  # options of offload_modules that no context has


class Handle(Protocol):
    """Something that can undo an installation."""

    def remove(self) -> None:
        """Undo the installation. A second call does nothing."""


def missing_package(module: str, package: str) -> ImportError:
    """Return the error for an integration whose package is not installed.

    Parameters
    ----------
    module : str
        The name of the integration.
    package : str
        The package that is missing, as it is installed and imported.
    """
    return ImportError(f"torchoffload.integrations.{module} needs {package}: pip install {package}")


def check_options(taker: str, options: Mapping[str, Any], *, for_modules: bool = True) -> None:
    """Refuse wrong options when they are given, instead of when training begins.

    Parameters
    ----------
    taker : str
        The function or class that was given the options, for messages.
    options : mapping of str to value
        Options of ``OffloadActivations`` and, with ``for_modules``, of ``offload_modules``.
    for_modules : bool, default True
        Whether the options of ``offload_modules`` are allowed.

    Raises
    ------
    TypeError, ValueError, FileNotFoundError, NotADirectoryError, PermissionError
        An option is wrong, as for ``OffloadActivations``, or unknown.
    """
    refuse_unknown(taker, options, _ALL_OPTIONS | {"memory", "modules", "enabled"})
    of_contexts = {name: value for name, value in options.items() if name not in _OF_MODULES}
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


def is_of_peft(model: nn.Module) -> bool:
    """Return whether ``model`` is PEFT's wrapper around a model."""
    return any(INNER_BY_CLASS.get(base.__name__) == PEFT for base in type(model).__mro__)


def wrapped_in(model: nn.Module) -> Iterator[nn.Module]:
    """Yield ``model``, then the module that it wraps, and so on; the last one is the innermost model."""
    inner: nn.Module | None = model
    while inner is not None:
        yield inner
        inner = _wrapped(inner)


def innermost_model(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of parallelism and PEFT.

    A wrapper of ``torch.compile`` is not looked into, because hooks inside of it are traced away. Neither is the tuner
    of PEFT, because some versions call ``forward`` of the model in it directly, which runs no hooks.

    Raises
    ------
    TypeError
        ``model`` is not a module.
    """
    check_module("model", model)
    return list(wrapped_in(model))[-1]


def names_in(root: nn.Module, modules: Any) -> Any:
    """Return names in the user's model as names in ``root``, which may be a tuner of PEFT around that model."""
    is_tuner = any(base.__name__ == "BaseTuner" for base in type(root).__mro__)
    if not is_tuner:
        return modules
    if isinstance(modules, str):
        return f"model.{modules}"
    if isinstance(modules, list | tuple):
        return [names_in(root, each) for each in modules]
    return modules


_installed: "weakref.WeakKeyDictionary[nn.Module, Handle]" = weakref.WeakKeyDictionary()


_H = TypeVar("_H", bound=Handle)


def install_once(model: nn.Module, make: Callable[[], _H]) -> _H:
    """Return the handle that ``make()`` returns, after an earlier installation on ``model`` was removed.

    A run that failed leaves its installation behind, and a second one would be an error.
    """
    quiet_other_ranks()
    if (earlier := _installed.pop(model, None)) is not None:
        earlier.remove()
    handle = make()
    _installed[model] = handle
    return handle


def installed_on(model: nn.Module) -> Handle | None:
    """Return the handle that was installed last on the innermost model; None if there is none."""
    return _installed.get(innermost_model(model))


def offload_inner_model(model: nn.Module, modules: Any, options: ModuleKeywords) -> Handle:
    """Call ``offload_modules`` for the innermost model: for all of it, or for ``modules`` in it.

    An earlier installation of an integration on it is removed first.

    Parameters
    ----------
    model : torch.nn.Module
        The model, with or without wrappers.
    modules : optional
        As for ``offload_modules``; None for the whole model except its output head.
    options : dict
        Options of ``offload_modules`` and of ``OffloadActivations``.
    """
    inner = innermost_model(model)
    chosen = [inner] if modules is None else names_in(inner, modules)
    return install_once(inner, lambda: torchoffload.offload_modules(inner, chosen, **options))


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0


def quiet_other_ranks() -> None:
    """Silence the warnings of torchoffload on all ranks but 0; otherwise every rank would repeat them."""
    if _rank() != 0:
        warnings.filterwarnings("ignore", message="torchoffload", category=UserWarning)


_warned: set[str] = set()


def warn_on_rank_0(text: str) -> None:
    """Give a warning with ``text``, on rank 0 only, and once in the process."""
    if _rank() == 0 and text not in _warned:
        _warned.add(text)
        warn_user(f"torchoffload: {text}")


_reset_count = 0


def _count_reset() -> None:
    global _reset_count
    _reset_count += 1


at_reset(_count_reset)


class StepTotals:
    """Return the records and bytes that this process moved and kept per step, as numbers for a trainer's log.

    Everything that torchoffload does in the process counts, whoever entered the context.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin to count."""
        self._step_count = 0
        self._resets_before = _reset_count
        self._before = self._counted(torchoffload.stats())

    def end_step(self) -> None:
        """Note that a step has ended."""
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
        """Return the means over the steps that ended since the last call; empty if there were none.

        Returns
        -------
        dict of str to float
            ``offload/gib_offloaded``, ``offload/gib_reloaded`` and ``offload/gib_kept`` in GiB per step,
            ``offload/window_waits`` per step, and ``offload/pinned_gib``, the GiB of pinned memory that are held now.
        """
        if self._step_count == 0:
            return {}
        steps, before, was_reset = self._step_count, self._before, self._resets_before != _reset_count
        self.start()
        means = {name: (now - (0 if was_reset else before[name])) / steps for name, now in self._before.items()}
        return means | {"offload/pinned_gib": torchoffload.stats().pinned_bytes / _GIB}
