"""``memory=`` of contexts and of ``offload_modules``: what blocks save stays or moves, by a plan.

The plan is one of ``fit`` that computes nothing again. ``fit`` stands on a higher floor: the package registers here how
to call it.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import nn

from torchoffload._contexts.amounts import parse_memory

__all__ = ["PlannedModel", "WithinMemory", "plan_within_memory", "set_planner"]

_WINDOWS = ("offload_window_bytes", "reload_window_bytes", "max_fwd_stash_size")
_ANY_BYTES = 1 << 40  # of what a fraction is a part is known when the context is entered


class PlannedModel(Protocol):
    """What is used here of ``torchoffload.Fitted``."""

    @property
    def phase(self) -> str:
        """What the model is at."""

    def report(self) -> str:
        """Return a text for people."""

    def replan(self, memory: float | str) -> None:
        """Plan for another amount of memory."""

    def remove(self) -> None:
        """Remove all hooks from the model."""


_Planner = Callable[[nn.Module, float | str, Sequence[nn.Module] | None, dict[str, Any]], Any]
_planners: list[_Planner] = []


def set_planner(planner: _Planner) -> None:
    """Have a function plan from now on. It gets the model, the memory, the blocks or None, and the options."""
    _planners[:] = [planner]


def _check(memory: object, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that a plan leaves to the user; TypeError or ValueError if others are given."""
    parse_memory(memory, _ANY_BYTES)
    given = [name for name in _WINDOWS if options.get(name) is not None]
    if given:
        raise TypeError(f"with memory= the windows are chosen by the plan: leave {given[0]} out")
    return {name: value for name, value in options.items() if name not in _WINDOWS}


def plan_within_memory(
    model: nn.Module, memory: float | str, blocks: Sequence[nn.Module] | None, options: dict[str, Any]
) -> Any:
    """Plan what blocks of a model keep and move, and return ``fit``'s handle.

    Parameters
    ----------
    model : torch.nn.Module
        The model that is called.
    memory : int, float or str
        As for ``fit``.
    blocks : sequence of torch.nn.Module or None
        The blocks; None: those that the model repeats.
    options : dict
        The options of a context, without ``model``.

    Raises
    ------
    TypeError, ValueError
        ``memory`` is no amount, a window is given, or what ``fit`` raises.
    """
    return _planners[0](model, memory, blocks, _check(memory, options))


class WithinMemory:
    """The memory that a context was given, and the model whose blocks keep to it.

    Contexts that are made for the same model with the same options share a plan, so that a context may be made anew in
    each step.

    Parameters
    ----------
    memory : int, float or str
        As for ``fit``.
    model : torch.nn.Module or None
        The model. It is held weakly.
    options : dict
        The options of the context.

    Raises
    ------
    TypeError, ValueError
        ``memory`` is no amount, there is no model, or a window is given.
    """

    def __init__(self, memory: float | str, model: nn.Module | None, options: dict[str, Any]) -> None:
        self._options = _check(memory, options)
        if model is None:
            raise TypeError(
                "memory= needs model=, whose blocks are planned: OffloadActivations(model=model, memory=...)"
            )
        self.memory = memory
        self._model = weakref.ref(model)
        self.planned: PlannedModel | None = None

    def begin(self) -> None:
        """Have the model keep to the memory from now on. RuntimeError if the model is gone."""
        model = self._model()
        if model is None:
            raise RuntimeError(
                "torchoffload: the model that this context was given, with memory=, does not exist any more"
            )
        with _lock:
            known = _shared.get(model)
            if known is None or known.planned.phase == "removed" or known.options != self._options:
                if known is not None:
                    known.planned.remove()
                planned = plan_within_memory(model, self.memory, None, self._options)
                known = _shared[model] = _Shared(planned, self._options, self.memory)
            elif (type(known.memory), known.memory) != (type(self.memory), self.memory):
                known.memory = self.memory
                known.planned.replan(self.memory)
            self.planned = known.planned


class _Shared:
    """What all contexts of one model share."""

    def __init__(self, planned: PlannedModel, options: dict[str, Any], memory: float | str) -> None:
        self.planned, self.options, self.memory = planned, options, memory


_lock = threading.RLock()
_shared: "weakref.WeakKeyDictionary[nn.Module, _Shared]" = weakref.WeakKeyDictionary()
