"""Effects of a block's forward beside what it returns: changes of Python objects that live on after the call."""

import array
import collections
import contextlib
import functools
import itertools
import pickle
import random
import sys
import types
import weakref
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
    arguments : tuple
        The positional and the keyword arguments of the call.
    most : int, optional
        How many objects are looked at. If there are more, that is an obstacle; by default it is never.
    """

    def __init__(self, module: nn.Module, arguments: Any, most: int = sys.maxsize) -> None:
        own = set(module.modules())
        args, kwargs = arguments  # of which the tuple and the dict are nobody else's: a dict would hold its tensors
        roots = [value for each in own for value in _roots(each)]
        found = core.object_contents([*roots, *args, *kwargs.values()], own, _describe, most)
        self._are_too_many = found is None
        self._before = found or []

    def changed(self) -> str | None:
        """Return the type of the first object whose content is another one now; None if all are the same.

        An iterator counts as changed: what it will return next cannot be seen. So do objects that are too many.
        """
        if self._are_too_many:
            return "structure of too many objects to look at"
        iterator = next((each for each, _ in self._before if _is_iterator(each)), None)
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
            yield from (hook for hook in value.values() if not _is_of_torch(hook))
        elif name not in _MODULE_ATTRIBUTES:
            yield value
    forward = getattr(type(module).forward, "__func__", type(module).forward)
    code, names = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    for name in () if code is None else code.co_names:
        if isinstance(names.get(name), _CONTAINERS):
            yield names[name]


def _is_of_torch(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("torch")  # that of a built-in method is None


def _is_iterator(value: Any) -> bool:
    return hasattr(type(value), "__next__")  # of the type: an object may have any attribute that is asked for


def _slots(value: Any) -> dict[Any, Any]:
    """Return what is in the slots of an object, by their descriptors."""
    found = {}
    for kind in type(value).__mro__:
        for slot in vars(kind).values() if "__slots__" in vars(kind) else ():
            if isinstance(slot, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # an empty slot
                    found[slot] = slot.__get__(value)
    return found


def _is_random(value: Any) -> bool:
    return isinstance(value, random.Random) and not isinstance(value, random.SystemRandom)  # which has no state


def _is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_array(value: Any) -> bool:
    return isinstance(value, (bytearray, array.array)) or _is_numpy(value)


def _base(container: Any) -> Any:
    """Return the class whose methods a container is read and written with: its own may do anything."""
    bases = (collections.OrderedDict, *_CONTAINERS)
    return next(base for base in bases if isinstance(container, base))


def _contents(container: Any) -> list[Any]:
    """Return what is in an object that is no plain list or dict, as a flat list."""
    if _is_random(container):
        return [pickle.dumps(container.getstate())]  # bytes are compared by value
    if isinstance(container, types.CellType):
        return [container.cell_contents] if container != types.CellType() else []
    if isinstance(container, dict):
        return list(itertools.chain.from_iterable(_base(container).items(container)))
    if isinstance(container, set):
        return sorted(set.copy(container), key=id)
    if isinstance(container, _CONTAINERS):
        return list(_base(container).__iter__(container))
    if _is_numpy(container) and container.dtype.hasobject:
        return list(container.flat)
    if _is_array(container):
        return [container.tobytes() if hasattr(container, "tobytes") else bytes(container)]
    attributes: dict[Any, Any] = dict(vars(container)) if hasattr(container, "__dict__") else {}
    if isinstance(container, nn.Module):
        attributes = {name: value for name, value in attributes.items() if name not in _MODULE_ATTRIBUTES}
    return list(itertools.chain.from_iterable((attributes | _slots(container)).items()))


def _put(container: Any, contents: list[Any]) -> None:
    """Give an object the content that ``_contents`` returned."""
    if _is_random(container):
        container.setstate(pickle.loads(contents[0]))
    elif isinstance(container, types.CellType):
        if contents:
            container.cell_contents = contents[0]
        else:
            del container.cell_contents
    elif isinstance(container, dict):
        base = _base(container)
        base.clear(container)
        for key, value in zip(contents[::2], contents[1::2], strict=True):
            base.__setitem__(container, key, value)
    elif isinstance(container, list):
        list.__setitem__(container, slice(None), contents)
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, contents)
    elif isinstance(container, collections.deque):
        collections.deque.clear(container)
        collections.deque.extend(container, contents)
    elif _is_numpy(container):
        import numpy

        if container.dtype.hasobject:
            values = numpy.empty(len(contents), dtype=object)
            for place, value in enumerate(contents):
                values[place] = value
        else:
            values = numpy.frombuffer(contents[0], dtype=container.dtype)
        container[...] = values.reshape(container.shape)
    elif isinstance(container, bytearray):
        container[:] = contents[0]
    elif isinstance(container, array.array):
        container[:] = array.array(container.typecode, contents[0])
    else:
        _put_attributes(container, dict(zip(contents[::2], contents[1::2], strict=True)))


def _put_attributes(container: Any, wanted: dict[Any, Any]) -> None:
    """Give an object attributes past its class, which may have properties of the same names."""
    for name in dict(zip(*[iter(_contents(container))] * 2, strict=True)).keys() - wanted.keys():
        if isinstance(name, str):
            del vars(container)[name]
        else:
            name.__delete__(container)
    for name, value in wanted.items():
        if isinstance(name, str):
            vars(container)[name] = value
        else:
            name.__set__(container, value)


def _describe(value: Any) -> tuple[list[Any] | None, list[Any]]:
    """Return what is in an object, or None if nothing that could change is, and what else can be reached from it."""
    if type(value) in weakref.ProxyTypes:
        return None, []
    if isinstance(value, (functools.partial, types.FunctionType, types.MethodType)):
        return None, list(_held_by(value))
    if isinstance(value, types.MappingProxyType):
        return None, list(value.items())
    if isinstance(value, frozenset):
        return None, list(value)
    if isinstance(value, types.CellType) or _is_random(value):
        contents = _contents(value)
        return contents, contents
    if _is_array(value):
        nbytes = value.nbytes if _is_numpy(value) else len(memoryview(value).cast("B")) if len(value) else 0
        in_array = _contents(value) if 0 < nbytes <= _MOST_BYTES else None
        return in_array, (in_array or []) if _is_numpy(value) and value.dtype.hasobject else []
    if isinstance(value, _CONTAINERS):
        contents = _contents(value)
        # What a class of the user's has beside its items.
        return contents, [*contents, vars(value)] if hasattr(value, "__dict__") else contents
    if _has_attributes(value):
        contents = _contents(value)
        return contents, [*contents, *value.children()] if isinstance(value, nn.Module) else contents
    return ([] if _is_iterator(value) else None), []


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
        yield from (*(function.__closure__ or ()), vars(function), function.__defaults__, function.__kwdefaults__)
