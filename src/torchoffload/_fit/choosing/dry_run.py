"""A dry run: the forward of a copy of a model without memory, which shows the storages each module call would save.

It calls the user's forward once more, and is to leave no trace. So it runs on a copy, without hooks; with warnings off;
it puts the states of random number generators back; it fills no cache of autocast; and no tensor that it makes stays
in a cache outside of the model. Other effects of forward remain, such as a line that it prints.
"""

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from torchoffload._fit.choosing.answers import Answers, Stop
from torchoffload._fit.choosing.call_tree import CallTree
from torchoffload._fit.choosing.collector import Collector, storages_in
from torchoffload._fit.choosing.fake_copy import FakeCopy, cannot_be_copied
from torchoffload._fit.choosing.leftovers import DryMode, Globals, quiet, take_out
from torchoffload._fit.choosing.undone import undone

__all__ = ["LIMIT_S", "DryRunError", "Modes", "dry_run", "leaving_nothing"]

LIMIT_S = 5.0

Modes = list["weakref.ref[DryMode]"]
_Result = TypeVar("_Result")


class DryRunError(Exception):
    """A dry run told nothing."""


def dry_run(model: nn.Module, args: Any, kwargs: Any, limit_s: float = LIMIT_S) -> CallTree:
    """Return the storages that a call of a model would save, as a tree of the calls of its modules.

    Parameters
    ----------
    model : nn.Module
        The model. It is not called, and stays as it is.
    args, kwargs : tuple, dict
        The arguments of the call.
    limit_s : float
        How long forward may take, in seconds. It is looked at with each operator.

    Raises
    ------
    DryRunError
        The forward cannot run without data, takes too long, or would do more than compute.
    """
    return leaving_nothing(model, lambda modes: _run(model, args, kwargs, limit_s, modes))


def leaving_nothing(model: nn.Module, run: Callable[[Modes], _Result]) -> _Result:
    """Return the result of a run of a copy of a model, and take everything away that the run has left.

    Parameters
    ----------
    model : nn.Module
        The model.
    run : callable
        Makes the copy and runs it. It is given a list, to which it adds the fake mode of the copy.

    Raises
    ------
    DryRunError
        The model cannot be copied, or the run has raised.
    """
    why = cannot_be_copied(model)
    if why is not None:
        raise DryRunError(why)
    before = Globals()
    modes: Modes = []
    try:
        with undone(model), quiet():
            result, why = _attempt(run, modes)
    finally:
        for mode in modes:
            take_out(mode, before)
    if result is None:
        raise DryRunError(why)
    return result


def _attempt(run: Callable[[Modes], _Result], modes: Modes) -> tuple[_Result | None, str]:
    """Return the result of a run, or the reason that there is none: an exception would hold the tensors of the run."""
    try:
        return run(modes), ""
    except Stop as stop:
        return None, str(stop)
    except Exception as error:  # whatever a run without data ends by
        return None, f"{type(error).__name__}: {error}"


def _run(model: nn.Module, args: Any, kwargs: Any, limit_s: float, modes: Modes) -> CallTree:
    copy = FakeCopy(model, (args, kwargs))
    modes.append(weakref.ref(copy.mode))
    collector = Collector(copy.model)
    collector.watch(copy.originals)
    originals = {storage._cdata for storage in storages_in([*model.parameters(), *model.buffers()])}
    args, kwargs = copy.arguments

    def note(tensor: torch.Tensor) -> torch.Tensor:
        collector.note_save(tensor)
        return tensor.detach()  # an output that its own graph holds is never freed

    def note_operator(_operator: Any, args: Any, kwargs: Any, output: Any) -> None:
        collector.note_operator((args, kwargs), output)

    with copy.mode, Answers(note_operator, originals, limit_s), saved_tensors_hooks(note, lambda tensor: tensor):
        copy.model(*args, **kwargs)
    return collector.tree()
