"""What torch.compile is told when it meets a call of torchoffload inside of what it compiles."""

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["is_not_traced"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def is_not_traced(function: _Function) -> _Function:
    """Mark ``function``: a graph ends before its call, or under ``fullgraph=True`` the error says what to do instead.

    As ``torch.compiler.disable(reason=...)``, which would import all of Dynamo with torchoffload.
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
