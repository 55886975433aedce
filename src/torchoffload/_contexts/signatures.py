"""Showing in help() and in editors the options that a function takes as ``**options``."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torchoffload._contexts.options import OffloadOptions

__all__ = ["shows_options"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def shows_options(names: Iterable[str] = ()) -> Callable[[_Function], _Function]:
    """Give a function a signature that lists options in the place of ``**options``.

    Type checkers read the annotation of ``**options``. ``help()`` and ``inspect.signature`` read this.

    Parameters
    ----------
    names : iterable of str
        The names of the options, which are fields of ``OffloadOptions``. None of them if ``**`` only collects the names
        that are unknown.
    """
    wanted = set(names)

    def decorate(function: _Function) -> _Function:
        own = inspect.signature(function)
        kept = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        kept = [each for each in kept if each.kind is not inspect.Parameter.VAR_POSITIONAL]
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
            for name, field in OffloadOptions.__dataclass_fields__.items()
            if name in wanted
        ]
        shown: Any = function
        shown.__signature__ = own.replace(parameters=[*kept, *added])
        return function

    return decorate
