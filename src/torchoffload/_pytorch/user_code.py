"""Tell the core which functions save for code of the user's, where the offsets of a view count."""

from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint

from torchoffload._core import core

__all__ = ["saves_for_user_code"]

_Function = TypeVar("_Function", bound=Callable[..., Any] | None)


def saves_for_user_code(function: _Function) -> _Function:
    """Let what ``function`` saves while its frame is the innermost one move with all of its storage.

    It is returned as it is, and so this is a decorator, too. What is no Python function (None, where this torch has no
    such function) is left alone.
    """
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):
        for each in _with_inner(code):
            core.note_saving_code(each)
    return function


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    """``code`` and what is defined inside of it: before Python 3.12 a comprehension has a frame of its own."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


# Custom Functions, and with them compiled regions, operators of torch.library and reentrant checkpoints.
saves_for_user_code(torch.autograd.Function.apply)
# Operators of torch.ops, which may be custom Functions in C++.
saves_for_user_code(torch._ops.OpOverload.__call__)
saves_for_user_code(torch._ops.OpOverloadPacket.__call__)
# What a checkpoint that is not reentrant is given. Before torch 2.13 that was a custom Function's, too.
saves_for_user_code(getattr(torch.utils.checkpoint._CheckpointFrame, "save_inputs", None))
