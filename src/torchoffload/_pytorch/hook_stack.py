"""A record of the entries that torchoffload pushed on the calling thread's stack of saved-tensor hooks.

PyTorch keeps one stack of hooks per thread, and popping takes whatever is on top. So a context that is left twice, or
out of order, would remove the hooks of somebody else or leave its own behind. This module keeps a list of entries
beside that stack, one list per thread. It checks each exit against the list and raises an error before anything is
popped.
"""

import contextlib
import enum
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

__all__ = [
    "Role",
    "drop_ended",
    "innermost",
    "innermost_first",
    "leave",
    "pop",
    "push",
    "stepped_aside",
    "top_pack_hook",
]


class Role(enum.Enum):
    """Who made an entry.

    A context is entered and left by the user's code. The entries of a module are made and taken away by the hooks on
    its forward: those of an output head, or those of ``offload_modules``.
    """

    CONTEXT = enum.auto()
    HEAD = enum.auto()
    MODULE = enum.auto()


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the calling thread's list.

    Attributes
    ----------
    owner : object
        The context or the module that the entry belongs to. Compared by identity.
    role : Role
        The kind of owner.
    hooks : saved_tensors_hooks or None
        The hooks that were pushed on PyTorch's stack; None if the owner pushed none, for example while offloading is
        disabled.
    frame : FrameType or None
        For the call of a module, the Python frame that runs as long as the call does. It tells whether the call ended.
    undo : callable or None
        Called with no arguments after the hooks were popped.
    """

    owner: object
    role: Role
    hooks: saved_tensors_hooks | None
    frame: FrameType | None = None
    undo: Callable[[], None] | None = None


class _Entries(threading.local):
    def __init__(self) -> None:
        self.stack: list[Entry] = []


_entries = _Entries()


def push(
    owner: object,
    role: Role,
    hooks: saved_tensors_hooks | None,
    frame: FrameType | None = None,
    undo: Callable[[], None] | None = None,
) -> None:
    """Push ``hooks`` on PyTorch's stack, unless they are None, and add an entry for them to this thread's list.

    The parameters are the attributes of ``Entry``.
    """
    if role is Role.CONTEXT:
        drop_ended()
    if hooks is not None:
        saved_tensors_hooks.__enter__(hooks)
    _entries.stack.append(Entry(owner, role, hooks, frame, undo))


def _take_innermost() -> Entry:
    entry = _entries.stack.pop()
    if entry.hooks is not None:
        saved_tensors_hooks.__exit__(entry.hooks)
    if entry.undo is not None:
        entry.undo()
    return entry


def _has_ended(frame: FrameType) -> bool:
    try:
        frame.clear()
    except RuntimeError:  # Python refuses to clear a frame that is running
        return False
    return True


def drop_ended() -> None:
    """Remove the innermost entries that belong to calls of modules which ended without their forward hook.

    PyTorch runs no forward hook for a module whose forward is left by a BaseException such as KeyboardInterrupt, so the
    module's entry stays behind. It is removed here, when the next module is called or the next context is entered.
    """
    stack = _entries.stack
    while stack and (frame := stack[-1].frame) is not None and _has_ended(frame):
        _take_innermost()


def leave(owner: object) -> None:
    """Remove the entry that ``owner``'s present call made; do nothing if the call made none."""
    if (entry := innermost()) is not None and entry.owner is not owner:
        drop_ended()
        entry = innermost()
    if entry is not None and entry.owner is owner:
        _take_innermost()


def innermost() -> Entry | None:
    """Return the latest entry of this thread that is still open; None if there is none."""
    return _entries.stack[-1] if _entries.stack else None


def innermost_first() -> Iterator[Entry]:
    """Yield this thread's entries that are still open, the latest first."""
    return reversed(_entries.stack)


def _misuse(owner: object, stack: list[Entry]) -> str:
    name = type(owner).__name__
    if any(entry.owner is owner for entry in stack):
        inner = next(entry.owner for entry in reversed(stack) if entry.role is Role.CONTEXT)
        return (
            f"{name} left while a {type(inner).__name__} that was entered after it is still open: "
            "leave contexts in the reverse order of entering them"
        )
    return f"{name} left more often than entered on this thread: leave it once per entry, on the thread that entered it"


def pop(owner: object) -> Entry:
    """Remove the innermost entry of the context ``owner``, and pop its hooks.

    Entries of modules that were made later and are still there are removed first: their calls ended without a forward
    hook, as ``drop_ended`` explains.

    Returns
    -------
    Entry
        The entry of ``owner``.

    Raises
    ------
    RuntimeError
        This thread has not entered ``owner``, or another context was entered after it and is still open. In both cases
        nothing was popped.
    """
    stack = _entries.stack
    index = len(stack) - 1
    while index >= 0 and stack[index].role is not Role.CONTEXT and stack[index].owner is not owner:
        index -= 1
    if index < 0 or stack[index].owner is not owner:
        raise RuntimeError(_misuse(owner, stack))
    while True:
        entry = _take_innermost()
        if len(stack) == index:
            return entry


def top_pack_hook() -> Callable[[torch.Tensor], Any] | None:
    """Return the pack hook that autograd calls for the next saved tensor of this thread; None if there is none."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]


@contextlib.contextmanager
def stepped_aside() -> Iterator[None]:
    """Take the hooks that calls of modules have pushed off PyTorch's stack for a while, if nobody else's are on top.

    Entries of contexts, which the user's code has entered, stay, and so do the entries below them.
    """
    taken: list[saved_tensors_hooks] = []
    for entry in innermost_first():
        if entry.role is Role.CONTEXT:
            break
        if entry.hooks is None:
            continue
        if top_pack_hook() is not entry.hooks.pack_hook:
            break
        saved_tensors_hooks.__exit__(entry.hooks)
        taken.append(entry.hooks)
    try:
        yield
    finally:
        for hooks in reversed(taken):
            saved_tensors_hooks.__enter__(hooks)
