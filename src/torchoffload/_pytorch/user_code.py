"""Telling the compiled core which Python functions save tensors on behalf of the user's own code.

A span of a storage that moves alone comes back with another ``storage_offset``. PyTorch's own backward formulas never
look at the offset, but code of the user's may, for example through ``as_strided``. So a tensor that such code saves has
to move with all of its storage. The core recognises these saves by the function whose frame is the innermost one during
the pack.
"""

from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint

from torchoffload._core import core

__all__ = ["saves_for_user_code"]

_Function = TypeVar("_Function", bound=Callable[..., Any] | None)


def saves_for_user_code(function: _Function) -> _Function:
    """Let everything that is saved while ``function``'s frame is the innermost one move with all of its storage.

    Parameters
    ----------
    function : callable or None
        A function written in Python. Anything else is ignored, including None, which stands for a function that this
        version of torch does not have.

    Returns
    -------
    callable or None
        ``function`` itself, so that this can be used as a decorator.
    """
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):
        for each in _with_inner(code):
            core.note_saving_code(each)
    return function


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    """Yield ``code`` and all code defined inside it: before Python 3.12, a comprehension has a frame of its own."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


# Custom autograd Functions. Compiled regions, operators of torch.library and reentrant checkpoints are made of them.
saves_for_user_code(torch.autograd.Function.apply)
# Operators called through torch.ops, which may be custom autograd Functions written in C++.
saves_for_user_code(torch._ops.OpOverload.__call__)
saves_for_user_code(torch._ops.OpOverloadPacket.__call__)
# The inputs of a non-reentrant checkpoint. Before torch 2.13 a custom autograd Function saved these.
saves_for_user_code(getattr(torch.utils.checkpoint._CheckpointFrame, "save_inputs", None))
