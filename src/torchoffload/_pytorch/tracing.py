"""Telling torch.compile not to trace the functions of torchoffload."""

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["is_not_traced"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def is_not_traced(function: _Function) -> _Function:
    """Mark ``function`` as one that torch.compile must not trace, and return it.

    Dynamo ends the graph before a call of the function. Under ``fullgraph=True`` it raises an error that carries the
    message set here, which says what to do instead. The effect is that of ``torch.compiler.disable(reason=...)``, but
    calling that would import all of Dynamo together with torchoffload.
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
