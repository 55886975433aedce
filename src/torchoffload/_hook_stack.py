"""What torchoffload has pushed on the calling thread's stack of saved-tensor hooks.

PyTorch's stack is per thread and pops blindly: leaving twice, or out of order, would take a stranger's hooks away, or
leave ours behind. This list is kept beside it, so that both are errors before anything is popped.
"""

import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["Role", "innermost", "pop", "push", "top_pack_hook"]


class Role(enum.Enum):
    """Who pushed: a context that the user enters and leaves, or the hook on an output head's forward."""

    CONTEXT = enum.auto()
    HEAD = enum.auto()


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the calling thread; ``hooks`` is None where nothing was pushed."""

    owner: object
    role: Role
    hooks: saved_tensors_hooks | None


class _Entries(threading.local):
    def __init__(self) -> None:
        self.stack: list[Entry] = []


_entries = _Entries()


def push(owner: object, role: Role, hooks: saved_tensors_hooks | None) -> None:
    """Push ``hooks`` on this thread's stack, if any, and note whose they are."""
    if hooks is not None:
        saved_tensors_hooks.__enter__(hooks)
    _entries.stack.append(Entry(owner, role, hooks))


def innermost() -> Entry | None:
    """Return the entry that was made last on this thread and is still open."""
    return _entries.stack[-1] if _entries.stack else None


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
    """Take the innermost entry of ``owner`` away, and the entries of heads whose forward never came back.

    A head's entry stays behind when its forward is left by a BaseException, for which PyTorch runs no forward hook.

    Raises
    ------
    RuntimeError
        This thread has not entered ``owner``, or another context was entered after it and is still open. Nothing was
        popped.
    """
    stack = _entries.stack
    index = len(stack) - 1
    while index >= 0 and stack[index].role is Role.HEAD and stack[index].owner is not owner:
        index -= 1
    if index < 0 or stack[index].owner is not owner:
        raise RuntimeError(_misuse(owner, stack))
    while True:
        entry = stack.pop()
        if entry.hooks is not None:
            saved_tensors_hooks.__exit__(entry.hooks)
        if len(stack) == index:
            return entry


def top_pack_hook() -> Callable[[torch.Tensor], Any] | None:
    """Return the pack hook that the next saved tensor of this thread goes to; None without one."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]
