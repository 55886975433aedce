"""Effects of a block's forward that a recomputation would have twice: changes of containers that live on after it."""

import collections
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["Containers"]

_MOST_OBJECTS = 20_000
_CONTAINERS = (list, dict, set, collections.deque)


class Containers:
    """The lists, dicts and sets that are reachable from a module and from the arguments of a call, and what is in them.

    Attributes of the modules themselves are left out: a recomputation has them as they were, and leaves them as they
    are. Tensors are not looked into, since writes to them show otherwise.

    Parameters
    ----------
    module : nn.Module
        The module that is called.
    arguments : nest of containers
        What it is called with.
    """

    def __init__(self, module: nn.Module, arguments: Any) -> None:
        roots = [value for each in module.modules() for value in _own_attributes(each)]
        self._before = {id(each): (each, _contents(each)) for each in _reachable([*roots, arguments])}

    def changed(self) -> str | None:
        """Return the type of the first container whose content is another one now; None if all are the same."""
        for container, contents in self._before.values():
            if _contents(container) != contents:
                return type(container).__name__
        return None


def _own_attributes(module: nn.Module) -> Iterator[Any]:
    for name, value in vars(module).items():
        if not name.startswith("_") or name not in _MODULE_ATTRIBUTES:
            yield value


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def _contents(container: Any) -> Any:
    if isinstance(container, dict):
        return tuple((id(key), id(value)) for key, value in container.items())
    if isinstance(container, _CONTAINERS):
        return frozenset(map(id, container)) if isinstance(container, set) else tuple(map(id, container))
    return tuple((name, id(value)) for name, value in vars(container).items())


def _reachable(roots: list[Any]) -> Iterator[Any]:
    """Yield containers and objects with attributes, each once; of large data only the first objects are looked at."""
    seen: set[int] = set()
    left = collections.deque(roots)
    while left and len(seen) < _MOST_OBJECTS:
        value = left.popleft()
        if id(value) in seen or isinstance(value, (torch.Tensor, nn.Module, type, str, bytes, int, float)):
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, (*_CONTAINERS, tuple)):
            left.extend(value)
        elif type(value).__module__ != "builtins" and hasattr(value, "__dict__") and not callable(value):
            left.extend(vars(value).values())
        else:
            continue
        if not isinstance(value, tuple):
            yield value
