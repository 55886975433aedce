"""What torchoffload has pushed on the calling thread's stack of saved-tensor hooks.

PyTorch's stack is per thread and pops blindly: leaving twice, or out of order, would take a stranger's hooks away, or
leave ours behind. This list is kept beside it, so that both are errors before anything is popped.
"""

import enum
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["Role", "drop_ended", "innermost", "innermost_first", "leave", "pop", "push", "top_pack_hook"]


class Role(enum.Enum):
    """Who pushed: a context that the user enters and leaves, or the hooks on a module's forward."""

    CONTEXT = enum.auto()
    HEAD = enum.auto()
    MODULE = enum.auto()


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the calling thread.

    Attributes
    ----------
    hooks : saved_tensors_hooks or None
        None where nothing was pushed.
    frame : FrameType or None
        Of a module's call: the frame that runs for as long as the call does.
    undo : callable or None
        What is left to do once the hooks are popped.
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
    """Push ``hooks`` on this thread's stack, if any, and note whose they are; see ``Entry``."""
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
    except RuntimeError:  # it is running
        return False
    return True


def drop_ended() -> None:
    """Take away what stands innermost and belongs to calls of modules that never came back.

    A module that is left by a BaseException, such as KeyboardInterrupt, runs no forward hook; its entry is found here,
    at a later call of a module or entry of a context.
    """
    stack = _entries.stack
    while stack and (frame := stack[-1].frame) is not None and _has_ended(frame):
        _take_innermost()


def leave(owner: object) -> None:
    """Take the entry of a module's call away, if this call made one."""
    if (entry := innermost()) is not None and entry.owner is not owner:
        drop_ended()
        entry = innermost()
    if entry is not None and entry.owner is owner:
        _take_innermost()


def innermost() -> Entry | None:
    """Return the entry that was made last on this thread and is still open."""
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
    """Take the innermost entry of ``owner`` away, and the entries of modules whose forward never came back.

    A module's entry stays behind when its forward is left by a BaseException, for which PyTorch runs no forward hook.

    Raises
    ------
    RuntimeError
        This thread has not entered ``owner``, or another context was entered after it and is still open. Nothing was
        popped.
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
    """Return the pack hook that the next saved tensor of this thread goes to; None without one."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]
