"""The hooks of offload_modules on the forwards of a model and of its chosen modules, and the state that they work on.

The hooks are functions of this module and not closures, so that they are copied and pickled together with the model.
A hook looks up its work by the module that is called. A copy of the module is not found there, so its hooks do nothing.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from torchoffload._contexts.disabling import is_disabled
from torchoffload._contexts.offload_activations import OffloadActivations
from torchoffload._core import core
from torchoffload._modules.selection import Chosen, compiled_with_more
from torchoffload._observe.module_stats import COMPILE_FIRST, ModuleStats
from torchoffload._pytorch import hook_stack
from torchoffload._pytorch.compiled_calls import add_call_hooks, keep_call_hooks, remove_call_hooks
from torchoffload._pytorch.hook_stack import Role
from torchoffload._pytorch.tensor_subclasses import plain_tensors
from torchoffload._warnings import warn_user

__all__ = ["Offloading", "Part", "Turn", "install", "uninstall"]

_noop_hooks = saved_tensors_hooks(core.noop_pack, core.unpack)
_lock = threading.RLock()


class Turn(NamedTuple):
    """What one call of a module does, of several calls in a step.

    Attributes
    ----------
    moves : bool
        Whether saved tensors of the call move.
    windows : tuple of int
        The windows of the call in bytes, as ``set_module_windows`` of the core takes them.
    """

    moves: bool
    windows: tuple[int, int, int]


class Offloading:
    """The state of one call of offload_modules: a context, and the calls of the model that are open under it.

    It lives as long as its handle, or any module that it has hooks on.
    """

    def __init__(
        self,
        model: nn.Module,
        chosen: list[Chosen],
        manager: OffloadActivations,
        *,
        only_inputs: bool = False,
        is_of_fit: bool = False,
    ) -> None:
        self.model_name = type(model).__name__
        self.names = names = tuple(each.name for each in chosen)
        self._model = weakref.ref(model)
        self._chosen = [(each.name, weakref.ref(each.module)) for each in chosen]
        self._was_looked_at = False
        self.only_inputs, self.is_of_fit = only_inputs, is_of_fit
        self.change(manager, range(1, len(names) + 1))
        self.calls = 0  # since reset_stats()
        self.open_calls = 0  # on all threads
        self._on_thread = threading.local()

    def change(
        self,
        manager: OffloadActivations,
        moving: Iterable[int],
        turns: Mapping[int, Sequence[Turn]] | None = None,
        *,
        repeats: bool = True,
    ) -> None:
        """Move under another context from the next call of the model on, and in some of the modules only.

        Parameters
        ----------
        manager : OffloadActivations
            The context.
        moving : iterable of int
            The numbers of the chosen modules whose saved tensors move, from 1.
        turns : mapping of int to sequence of Turn, optional
            By the same numbers, the calls of each module in a step, for modules whose calls differ.
        repeats : bool
            Whether further calls begin with the first one's turn again. Else they take the last one's.
        """
        self.manager = manager
        self.context = manager._context
        self.context.set_module(len(self.names))  # so that the core has a row of counts for each module
        self.context.set_module(0)
        self.hooks = saved_tensors_hooks(self.context.pack, core.unpack)
        self.moving = frozenset(moving)
        self._turns = turns or {}
        self._repeats = repeats
        self.reset_turns()

    def reset_turns(self, called: Mapping[int, int] | None = None) -> None:
        """Begin with the first call of each module again: a step begins.

        ``called``: by the same numbers, the calls of modules that the step had already; none if not given.
        """
        called = called or {}
        self._calls = {number: called.get(number, 0) for number in self._turns}

    def take_turn(self, number: int) -> bool:
        """Begin a call of a module, with its windows if its calls differ; return whether its saved tensors move."""
        turns = self._turns.get(number)
        if turns is None:
            return number in self.moving
        called, last = self._calls[number], len(turns) - 1
        turn = turns[called % len(turns) if self._repeats else min(called, last)]
        self._calls[number] += 1
        core.change_module_windows(self.context, number, turn.windows)
        return turn.moves

    @property
    def is_open(self) -> bool:
        """Whether a call is open on this thread."""
        return getattr(self._on_thread, "is_open", False)

    def open(self) -> Callable[[], None]:
        """Begin a call of the model on this thread, with a tape of its own; return the function that ends the call."""
        self.warn_of_compiled()
        for _, chosen in self._chosen:
            if (module := chosen()) is not None:
                keep_call_hooks(module)
        self.manager._open()
        self._on_thread.is_open = True
        with _lock:
            self.calls += 1
            self.open_calls += 1
        return partial(self._close, self.context)

    def _close(self, context: core.Context) -> None:
        self._on_thread.is_open = False
        with _lock:
            self.open_calls -= 1
        context.exit()

    def warn_of_compiled(self) -> None:
        """Warn of modules inside of compiled regions, in which hooks are traced away.

        It looks when the hooks are installed and, if there are no such modules then, once more at the first call.
        """
        model = self._model()
        if self._was_looked_at or model is None:
            return
        chosen = [Chosen(name, module) for name, ref in self._chosen if (module := ref()) is not None]
        traced = compiled_with_more(model, chosen)
        self._was_looked_at = bool(traced) or self.calls > 0
        if traced:
            warn_user(
                f"torchoffload: {len(traced)} of {len(chosen)} chosen modules, such as {traced[0]!r}, are part of a "
                "region of torch.compile, which traces their hooks away: nothing that they save is moved. "
                f"{COMPILE_FIRST}"
            )

    def call_counts(self) -> dict[str, int]:
        """Return how often the hooks of each chosen module saw a call since ``reset_stats()``; empty once removed."""
        found = {name: _owners.get(module) for name, ref in self._chosen if (module := ref()) is not None}
        return {name: owner.calls for name, owner in found.items() if owner is not None and owner.has(self)}

    def stats(self) -> tuple[ModuleStats, ...]:
        rows = core.module_rows(self.context)[1:]  # the first row counts saves outside of all chosen modules
        return tuple(ModuleStats(name=name, **row) for name, row in zip(self.names, rows, strict=True))

    def forget(self) -> None:
        self.calls = 0
        for _, ref in self._chosen:
            module = ref()
            if module is not None and module in _owners:
                _owners[module].calls = 0
        self.context.forget_modules()


@dataclass(frozen=True, eq=False)
class Part:
    """The part that one module has in one call of offload_modules.

    Attributes
    ----------
    offloading : Offloading
        The state of that call.
    number : int
        The number of the module among the chosen ones, from 1. 0 for the model, if it is not chosen itself, and for a
        head.
    is_head : bool
        Whether the module is an output head, whose saved tensors stay.
    """

    offloading: Offloading
    number: int = 0
    is_head: bool = False

    def begin(
        self, top: Callable[..., Any] | None, inputs: tuple[Any, Any], undo: list[Callable[[], object]]
    ) -> saved_tensors_hooks | None:
        """Begin a call of the module.

        Parameters
        ----------
        top : callable or None
            The pack hook in force.
        inputs : tuple
            The positional and the keyword arguments of the call.
        undo : list of callable
            Functions to call, the last one first, when the call has ended and its hooks were popped. Added to.

        Returns
        -------
        saved_tensors_hooks or None
            The hooks to push for the call.
        """
        offloading = self.offloading
        receiver = getattr(top, "__self__", None)
        if self.is_head:
            return _noop_hooks if receiver is offloading.context else None
        has_gradients = torch.is_grad_enabled()
        is_first = not offloading.is_open
        if is_first:
            if not has_gradients or is_disabled() or not offloading.moving:
                return None
            undo.append(offloading.open())
        # Tensors that go to the hooks of others must go on doing so: a checkpoint counts the tensors it gets, and a
        # NoOpManager was entered on purpose.
        may_push = top is None or (isinstance(receiver, core.Context) and receiver is not offloading.context)
        is_possible = has_gradients and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        takes_turn = is_possible and (may_push or top is core.noop_pack)  # as plans count the calls of a block
        moves = takes_turn and offloading.take_turn(self.number)
        if self.number:
            undo.append(partial(offloading.context.set_module, offloading.context.set_module(self.number)))
            if offloading.only_inputs:  # also without gradients, as in the forward of a reentrant checkpoint
                for tensor in _tensors(inputs):
                    offloading.context.admit(tensor)
        wants = is_first if offloading.only_inputs else moves
        return offloading.hooks if wants and may_push and is_possible else None


class Owner:
    """The parts that one module has. It owns the entries in ``hook_stack`` that calls of the module make."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.calls = 0  # how many calls the hooks saw since reset_stats(), with gradients or without

    def has(self, offloading: Offloading) -> bool:
        return any(part.offloading is offloading for part in self.parts)

    def enter(self, inputs: tuple[Any, Any], frame: FrameType) -> None:
        if not torch.is_grad_enabled() and hook_stack.innermost() is None:
            return  # nothing is saved, for example in generate()
        hook_stack.drop_ended()
        undo: list[Callable[[], object]] = []
        hooks = None
        if torch._C._current_graph_task_id() == -1:  # in backward, tensors that a checkpoint computes again stay
            top = hook_stack.top_pack_hook()
            try:
                for part in self.parts:
                    hooks = part.begin(top, inputs, undo) or hooks
            except BaseException:
                _run_last_first(undo)
                raise
        innermost = hook_stack.innermost()
        calls_itself = innermost is not None and innermost.owner is self
        if hooks is not None or undo or calls_itself:
            hook_stack.push(self, Role.MODULE, hooks, frame, partial(_run_last_first, undo))


_owners: "weakref.WeakKeyDictionary[nn.Module, Owner]" = weakref.WeakKeyDictionary()


def _run_last_first(undo: list[Callable[[], object]]) -> None:
    while undo:
        undo.pop()()


def _tensors(inputs: object) -> Iterator[torch.Tensor]:
    if isinstance(inputs, torch.Tensor):
        yield from plain_tensors(inputs)
    elif isinstance(inputs, (tuple, list)):
        for each in inputs:
            yield from _tensors(each)
    elif isinstance(inputs, dict):
        yield from _tensors(list(inputs.values()))


def _enter(module: nn.Module, args: Any, kwargs: Any = None) -> None:
    # PyTorch leaves the keywords out if an earlier hook of this very call has removed this one, as fit does.
    # A compiled region saves its tensors after its whole forward, when this hook is over. So it must not be traced.
    if torch.compiler.is_compiling():
        return
    owner = _owners.get(module)
    if owner is None:
        return  # the module is a copy
    if owner.parts:
        owner.calls += 1
        owner.enter((args, kwargs), sys._getframe(1))
    else:
        remove_call_hooks(module, _enter, _leave)  # offloading was removed in the middle of a call


def _leave(module: nn.Module, _args: Any, _output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    owner = _owners.get(module)
    if owner is not None:
        hook_stack.leave(owner)


def _chosen_already(name: str, known: Offloading) -> str:
    if known.is_of_fit:
        return (
            f"{name!r} is a block of a model that torchoffload.fit was called for, and its plan says what moves: leave "
            "offload_modules out, or remove() what fit returned"
        )
    return (
        f"{name!r} is offloaded already, by an earlier call of offload_modules: remove() what that returned, or choose "
        "other modules"
    )


def install(parts: list[tuple[nn.Module, Part]]) -> None:
    """Give modules their parts, and the hooks if they have none yet; ValueError if one of them is chosen already."""
    with _lock:
        for module, part in parts:
            owner = _owners.get(module)
            known = next((each for each in (owner.parts if owner is not None else ()) if each.number), None)
            if part.number and known is not None:
                raise ValueError(_chosen_already(part.offloading.names[part.number - 1], known.offloading))
        for module, part in parts:
            owner = _owners.setdefault(module, Owner())
            if not owner.parts:
                remove_call_hooks(module, _enter, _leave)
                # Our pre-hook runs last, so that it sees the inputs as other hooks leave them; our forward hook runs
                # first. So saves of other hooks do not count as inside the module.
                add_call_hooks(module, _enter, _leave)
            owner.parts.append(part)


def uninstall(offloading: Offloading) -> None:
    """Take the part that modules have in ``offloading`` away, and the hooks of modules that have no part any more."""
    with _lock:
        for module, owner in list(_owners.items()):
            if not owner.has(offloading):
                continue
            owner.parts = [part for part in owner.parts if part.offloading is not offloading]
            # In the middle of a call the forward hooks are still needed. Then the next call removes them.
            if not owner.parts and not offloading.open_calls:
                remove_call_hooks(module, _enter, _leave)
                del _owners[module]
