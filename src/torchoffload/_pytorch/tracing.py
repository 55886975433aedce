"""Telling torch.compile not to trace the functions of torchoffload, and whether PyTorch transforms or traces a call."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

__all__ = ["is_not_traced", "is_transformed"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def is_not_traced(function: _Function) -> _Function:
    """Mark ``function`` as one that torch.compile must not trace, and return it.

    Dynamo ends the graph before a call of the function. Under ``fullgraph=True`` it raises an error with the message
    set here, which names the remedy. The effect is that of ``torch.compiler.disable(reason=...)``, but calling that
    would import all of Dynamo together with torchoffload.
    """
    name = function.__qualname__.removesuffix(".__init__")
    marks: Any = function
    marks._torchdynamo_disable = True
    marks._torchdynamo_disable_recursive = True
    marks._torchdynamo_disable_msg = (
        f"torchoffload.{name} cannot be part of a compiled graph. Call it outside of the region, and enter contexts "
        "around the call of what was compiled"
    )
    return function


def is_transformed() -> bool:
    """Return whether a transform of torch.func, forward-mode differentiation, or torch.jit.trace is under way."""
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return True
    return torch._C._get_tracing_state() is not None
