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

__all__ = ["Containers"]

_MOST_OBJECTS = 20_000
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
        self._before = [(each, _contents(each)) for each in _reachable([*roots, arguments], own)]
        self._iterator = next((each for each, _ in self._before if hasattr(each, "__next__")), None)

    def changed(self) -> str | None:
        """Return the type of the first object whose content is another one now; None if all are the same.

        An iterator counts as changed: what it will return next cannot be seen.
        """
        if self._iterator is not None:
            return type(self._iterator).__name__
        for container, contents in self._before:
            if not _is_same(_contents(container), contents):
                return type(container).__name__
        return None

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Make the objects what they were, and afterwards what they are now, whatever is done to them in between."""
        present = [(each, contents, _contents(each)) for each, contents in self._before]
        different = [(each, before) for each, before, now in present if not _is_same(before, now)]
        for container, contents in different:
            _put(container, contents)
        try:
            yield
        finally:
            for container, before, now in present:
                if not _is_same(_contents(container), now):
                    _put(container, now)
                del before


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
    """Return what is in an object, as a flat list whose elements are compared by identity, and bytes by value."""
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


def _is_same(one: list[Any], other: list[Any]) -> bool:
    if len(one) != len(other):
        return False
    return all(a is b or (type(a) in {bytes, str} and a == b) for a, b in zip(one, other, strict=True))


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


def _reachable(roots: list[Any], own: set[nn.Module]) -> Iterator[Any]:
    """Yield objects with contents, each once; of very many only the first ones."""
    seen: set[int] = set()
    left = collections.deque(roots)
    while left and len(seen) < _MOST_OBJECTS:
        value = left.popleft()
        if id(value) in seen or isinstance(value, (torch.Tensor, type, str, bytes, int, float, types.ModuleType)):
            continue
        if isinstance(value, nn.Module) and value in own:
            continue
        seen.add(id(value))
        if isinstance(value, (functools.partial, types.FunctionType, types.MethodType)):
            left.extend(_held_by(value))
        elif isinstance(value, tuple):
            left.extend(value)
        elif _is_array(value):
            if len(value) and memoryview(value).nbytes <= _MOST_BYTES:
                yield value
        elif isinstance(value, _CONTAINERS) or _has_attributes(value):
            left.extend(_contents(value))
            if isinstance(value, nn.Module):
                left.extend(value.children())
            yield value
        elif hasattr(value, "__next__"):
            yield value


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
