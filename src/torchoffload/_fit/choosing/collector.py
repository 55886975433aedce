"""The record of a forward, from call to call of its modules: a ``CallTree``."""

import dataclasses
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from torchoffload._fit.choosing.call_tree import CallTree, ModuleCall
from torchoffload._fit.machine.operators import has_storage
from torchoffload._pytorch.compiled_calls import add_call_hooks, remove_call_hooks
from torchoffload._pytorch.tensor_subclasses import plain_tensors
from torchoffload._pytorch.tracing import is_transformed

__all__ = ["Collector", "Numbers", "leaves_in", "storages_in"]

_MOST_OBJECTS = 20_000
_PLAIN = (str, bytes, int, float, complex, bool, type, torch.dtype, torch.device, nn.Module, type(None))
_weak: Any = StorageWeakRef  # the class has no annotations


def leaves_in(value: object) -> Iterator[Any]:
    """Yield the objects in a value that are no containers: in containers at any depth, and in attributes of objects.

    Modules are not looked into.
    """
    waiting: list[Any] = [value]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_OBJECTS:
        each = waiting.pop()
        if isinstance(each, _PLAIN) or id(each) in seen:
            continue
        seen.add(id(each))
        parts = () if isinstance(each, torch.Tensor) else _parts(each)
        if parts:
            waiting += parts
        else:
            yield each


def storages_in(value: object) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of the tensors among the leaves of a value."""
    for leaf in leaves_in(value):
        if isinstance(leaf, torch.Tensor):
            for tensor in plain_tensors(leaf):
                if has_storage(tensor):
                    yield tensor.untyped_storage()


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [*value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [*value]
    found = [*getattr(value, "__dict__", {}).values()]
    if dataclasses.is_dataclass(value) and not found:  # with slots
        found = [getattr(value, each.name, None) for each in dataclasses.fields(value)]
    return found


class Numbers(Protocol):
    """Numbers for storages, as long as these live."""

    nbytes: dict[int, int]

    def of(self, storage: torch.UntypedStorage) -> int:
        """Return the number of a storage."""
        ...


class _Numbers:
    """Numbers for storages. An address names another storage once its storage is gone, so storages are held weakly."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, Any]] = {}
        self.nbytes: dict[int, int] = {}

    def of(self, storage: torch.UntypedStorage) -> int:
        number, weak = self._known.get(storage._cdata, (0, None))
        if weak is None or weak.expired():
            number = len(self.nbytes)
            self._known[storage._cdata] = (number, _weak(storage))
            self.nbytes[number] = storage.nbytes()
        return number


class Collector:
    """Builds the tree of the calls of modules in one forward, on the thread that made it.

    If operators are not told of, the two largest tensors that a call saves by itself stand for the largest one's work.

    Parameters
    ----------
    model : nn.Module
        The model. The bytes of its parameters and buffers count in ``fixed_bytes`` and nowhere else.
    numbers : Numbers, optional
        The numbers of storages. Default: numbers of its own.
    """

    def __init__(self, model: nn.Module, numbers: Numbers | None = None) -> None:
        self._numbers: Numbers = _Numbers() if numbers is None else numbers
        state = [*model.parameters(), *model.buffers()]
        trained = [each for each in model.parameters() if each.requires_grad]
        self._state = {storage._cdata: storage for storage in storages_in(state)}
        gradients = {storage._cdata: storage.nbytes() for storage in storages_in(trained)}
        root = ModuleCall(None)
        self._tree = CallTree(root, [], self._numbers.nbytes)
        self._tree.fixed_bytes = sum(each.nbytes() for each in self._state.values()) + sum(gradients.values())
        self._stack = [root]
        self._thread = threading.get_ident()

    @property
    def innermost(self) -> ModuleCall:
        """The call of a module that is running, the innermost one; the root of the tree outside of all."""
        return self._stack[-1]

    def watch(self, modules: Mapping[nn.Module, Hashable]) -> list[Callable[[], None]]:
        """Have the calls of modules tell of themselves, also those of modules that were compiled in place.

        Parameters
        ----------
        modules : mapping of nn.Module to hashable
            The modules that are called, and their keys in the tree.

        Returns
        -------
        list of callable
            Call them to end it.
        """
        ends_it: list[Callable[[], None]] = []
        for called, module in modules.items():
            begins, ends = functools.partial(self._begins, module), functools.partial(self._ends, module)
            add_call_hooks(called, begins, ends, outermost=True)
            ends_it.append(functools.partial(remove_call_hooks, called, begins, ends))
        return ends_it

    def _begins(self, module: Hashable, _called: nn.Module, args: Any, kwargs: Any) -> None:
        if not is_transformed():
            self.begin(module, (args, kwargs))

    def _ends(self, module: Hashable, *_call: Any) -> None:
        if not is_transformed():
            self.end(module)

    def begin(self, module: Hashable, arguments: Any) -> None:
        """Note that a call of a module begins."""
        if threading.get_ident() != self._thread:
            return
        inputs = frozenset(self._numbers.of(each) for each in storages_in(arguments) if each._cdata not in self._state)
        call = ModuleCall(module, begin=len(self._tree.saves), inputs=inputs)
        self._stack[-1].calls.append(call)
        self._stack.append(call)

    def end(self, module: Hashable) -> None:
        """Note that the latest call of a module ends."""
        if threading.get_ident() != self._thread or all(call.module is not module for call in self._stack):
            return
        while True:  # calls that were left by an exception that their hooks were not told of end, too
            call = self._stack.pop()
            self._finish(call)
            if call.module is module:
                return

    def _finish(self, call: ModuleCall) -> None:
        call.end = len(self._tree.saves)
        if not call.operator_count:
            saved, begin = set[int](), call.begin
            for inner in [*call.calls, ModuleCall(None, call.end)]:
                saved.update(self._tree.saves[begin : inner.begin])
                begin = inner.end
            call.operator_count = len(saved)
            call.work_bytes = sum(sorted((self._tree.nbytes[each] for each in saved), reverse=True)[:2])

    def note_save(self, tensor: torch.Tensor) -> None:
        """Note that autograd saves a tensor."""
        if threading.get_ident() == self._thread:
            for storage in storages_in(tensor):
                if storage._cdata not in self._state:
                    self._tree.saves.append(self._numbers.of(storage))

    def note_operator(self, arguments: Any, output: Any) -> None:
        """Note that an operator ran."""
        storages = {storage._cdata: storage for storage in storages_in((arguments, output))}
        nbytes = sum(each.nbytes() for address, each in storages.items() if address not in self._state)
        call = self._stack[-1]
        call.operator_count += 1
        call.work_bytes = max(call.work_bytes, nbytes)

    def tree(self) -> CallTree:
        """Return the tree, once the forward has ended."""
        while self._stack:
            self._finish(self._stack.pop())
        return self._tree
