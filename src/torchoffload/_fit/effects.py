"""Effects of a block's forward beside what it returns: changes of Python objects that live on after the call."""

import collections
import contextlib
import functools
import itertools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torchoffload._core import core

__all__ = ["Containers", "in_place"]

_MOST_BYTES = 1 << 20
_CONTAINERS = (list, dict, set, collections.deque)
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_SHARED = frozenset(
    ("builtins", "torch", "logging", "threading", "_thread", "queue", "multiprocessing", "concurrent", "asyncio",
     "socket", "weakref", "io", "_io", "pathlib", "re")
)  # fmt: skip
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class Containers:
    """The objects that are reachable from a module and from the arguments of a call, and what is in them.

    Looked at are lists, dicts, sets, deques, arrays of NumPy, and objects with attributes: in attributes of the
    modules, in the arguments, in what forward hooks hold, and the containers among the global names that forward uses.
    The attributes of the block's modules themselves are left out, since a recomputation has them as they were. So are
    tensors, whose versions tell of writes. What is in an object is held for as long as this exists, so that nothing
    else gets its address.

    Parameters
    ----------
    module : nn.Module
        The module that is called.
    arguments : nest of containers
        What it is called with.
    """

    def __init__(self, module: nn.Module, arguments: Any) -> None:
        own = set(module.modules())
        roots = [value for each in own for value in _roots(each)]
        self._before = core.object_contents([*roots, arguments], own, _describe)

    def changed(self) -> str | None:
        """Return the type of the first object whose content is another one now; None if all are the same.

        An iterator counts as changed: what it will return next cannot be seen.
        """
        iterator = next((each for each, _ in self._before if hasattr(each, "__next__")), None)
        if iterator is not None:
            return type(iterator).__name__
        for place, _ in core.changed_contents(self._before, _describe):
            return type(self._before[place][0]).__name__
        return None

    def in_place(self) -> contextlib.AbstractContextManager[None]:
        """Make the objects what they were, and afterwards what they are now, whatever is done to them in between."""
        return in_place(self._before)


@contextlib.contextmanager
def in_place(before: list[tuple[Any, list[Any]]]) -> Iterator[None]:
    """Give objects the contents that they had, and afterwards those that they have now.

    Parameters
    ----------
    before : list of tuple
        Each object, and what is to be in it, as ``core.object_contents`` returns them.
    """
    present = before.copy()
    for place, contents in core.changed_contents(before, _describe):
        container, wanted = before[place]
        present[place] = (container, contents)
        _put(container, wanted)
    try:
        yield
    finally:
        for place, _ in core.changed_contents(present, _describe):
            _put(*present[place])


def _roots(module: nn.Module) -> Iterator[Any]:
    """Yield what the module holds beside what a recomputation puts in place."""
    for name, value in vars(module).items():
        if name in _HOOKS:
            yield from (hook for hook in value.values() if not hook.__module__.startswith("torch"))
        elif name not in _MODULE_ATTRIBUTES:
            yield value
    forward = getattr(type(module).forward, "__func__", type(module).forward)
    code, names = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    for name in () if code is None else code.co_names:
        if isinstance(names.get(name), _CONTAINERS):
            yield names[name]


def _slots(value: Any) -> list[str]:
    found = (name for kind in type(value).__mro__ for name in _names(vars(kind).get("__slots__", ())))
    return [name for name in found if not name.startswith("__") and hasattr(value, name)]


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_array(value: Any) -> bool:
    return isinstance(value, bytearray) or (type(value).__module__ == "numpy" and hasattr(value, "tobytes"))


def _contents(container: Any) -> list[Any]:
    """Return what is in an object that is no plain list or dict, as a flat list."""
    if isinstance(container, dict):
        return list(itertools.chain.from_iterable(container.items()))
    if isinstance(container, set):
        return sorted(container, key=id)
    if isinstance(container, (list, collections.deque)):
        return list(container)
    if _is_array(container):
        return [bytes(container) if isinstance(container, bytearray) else container.tobytes()]
    attributes = dict(vars(container)) if hasattr(container, "__dict__") else {}
    if isinstance(container, nn.Module):
        attributes = {name: value for name, value in attributes.items() if name not in _MODULE_ATTRIBUTES}
    attributes |= {name: getattr(container, name) for name in _slots(container)}
    return list(itertools.chain.from_iterable(attributes.items()))


def _put(container: Any, contents: list[Any]) -> None:
    """Give an object the content that ``_contents`` returned."""
    if isinstance(container, dict):
        container.clear()
        container.update(zip(contents[::2], contents[1::2], strict=True))
    elif isinstance(container, set):
        container.clear()
        container.update(contents)
    elif isinstance(container, list):
        container[:] = contents
    elif isinstance(container, collections.deque):
        container.clear()
        container.extend(contents)
    elif isinstance(container, bytearray):
        container[:] = contents[0]
    elif _is_array(container):
        container.view().reshape(-1).view("uint8")[:] = memoryview(contents[0])
    else:
        wanted = dict(zip(contents[::2], contents[1::2], strict=True))
        for name in dict(zip(*[iter(_contents(container))] * 2, strict=True)).keys() - wanted.keys():
            object.__delattr__(container, name)
        for name, value in wanted.items():
            object.__setattr__(container, name, value)


def _describe(value: Any) -> tuple[list[Any] | None, list[Any]]:
    """Return what is in an object, or None if nothing that could change is, and what else can be reached from it."""
    if isinstance(value, (functools.partial, types.FunctionType, types.MethodType)):
        return None, list(_held_by(value))
    if _is_array(value):
        is_looked_at = len(value) > 0 and memoryview(value).nbytes <= _MOST_BYTES
        return (_contents(value) if is_looked_at else None), []
    if isinstance(value, _CONTAINERS) or _has_attributes(value):
        contents = _contents(value)
        return contents, [*contents, *value.children()] if isinstance(value, nn.Module) else contents
    return ([] if hasattr(value, "__next__") else None), []


def _has_attributes(value: Any) -> bool:
    if isinstance(value, torch.nn.Module):
        return True
    # What threads and processes share is theirs to change while a block runs.
    if type(value).__module__.partition(".")[0] in _SHARED:
        return False
    return hasattr(value, "__dict__") or hasattr(type(value), "__slots__")


def _held_by(function: Any) -> Iterator[Any]:
    if isinstance(function, functools.partial):
        yield from (function.func, function.args, function.keywords)
    elif isinstance(function, types.MethodType):
        yield from (function.__self__, function.__func__)
    else:
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                yield cell.cell_contents
