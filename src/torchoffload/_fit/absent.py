"""What a recomputation has left out so far: tensors without memory, and how to make each of them after all."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from torchoffload._core import core
from torchoffload._fit.agreement import wait_for
from torchoffload._fit.operators import Layout, addresses, communicates, written

__all__ = ["AbsentTensors"]

_ABOVE_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
for _name in ("AutocastCPU", "AutocastCUDA", "AutocastXPU", "AutocastHPU", "AutocastMPS", "AutocastPrivateUse1"):
    if hasattr(torch._C.DispatchKey, _name):
        _ABOVE_KERNELS = _ABOVE_KERNELS.add(getattr(torch._C.DispatchKey, _name))


class AbsentTensors:
    """The outputs that one run of a recomputation has left out so far, and how to make each of them after all."""

    def __init__(self) -> None:
        self.is_making = False
        self._thunks: dict[int, list[Callable[[], None]]] = {}  # by storage
        self._readers: defaultdict[int, set[int]] = defaultdict(set)  # storages whose thunks read this one
        self._held: list[torch.Tensor] = []  # so that no address comes to mean another storage

    def leave_out(
        self, layouts: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, may_run: bool
    ) -> Any:
        """Return what an operator would return, without values; ``may_run``: it can be made after all."""
        absent: list[torch.Tensor] = []

        def make(leaf: Any) -> Any:
            if not isinstance(leaf, Layout):
                return leaf
            absent.append(core.absent_tensor(*leaf))
            return absent[-1]

        output = tree_map(make, layouts, is_leaf=lambda leaf: isinstance(leaf, Layout))

        is_made = False

        def run() -> None:
            nonlocal is_made
            if is_made:
                return
            is_made = True
            self.make((args, kwargs))
            made = [leaf for leaf in tree_leaves(_complete(func, args, kwargs)) if isinstance(leaf, torch.Tensor)]
            for target, value in zip(absent, made, strict=True):
                core.give_memory(target)
                target.copy_(value)

        for tensor in absent if may_run else ():
            self._add_thunk(tensor, run, (args, kwargs))
        return output

    def leave_out_in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Leave out an operator that writes to its first argument, if that is absent and nobody has read it yet."""
        storage = args[0].untyped_storage()._cdata
        if storage not in self._thunks or self._readers.get(storage):
            return self.run(func, args, kwargs)

        def run() -> None:
            self.make((args[1:], kwargs))
            _complete(func, args, kwargs)

        self._add_thunk(args[0], run, (args[1:], kwargs))
        return args[0]

    def clear(self) -> None:
        """Forget all: autograd's nodes hold what is saved, and through the hooks of a recomputation this object."""
        self._thunks.clear()
        self._readers.clear()
        self._held.clear()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on arguments that all have values."""
        for target in written(func, args, kwargs):
            for storage in addresses(target):
                self._make_readers(storage)  # they read what it is now
        self.make((args, kwargs))
        return func(*args, **kwargs)

    def make(self, value: Any) -> None:
        """Make the tensors in ``value`` that are absent."""
        if not self._thunks:
            return
        found = core.storage_addresses(value)
        if found is None:  # there are tensors of other classes
            hides = any(_hides_tensors(leaf) for leaf in tree_leaves(value))
            found = set(self._thunks) if hides else addresses(value)
        for address in found & self._thunks.keys():
            self._make(address)

    def _add_thunk(self, tensor: torch.Tensor, run: Callable[[], None], arguments: Any) -> None:
        storage = tensor.untyped_storage()._cdata
        self._thunks.setdefault(storage, []).append(run)
        self._held.append(tensor)
        for read in addresses(arguments):
            self._readers[read].add(storage)

    def _make(self, storage: int) -> None:
        thunks = self._thunks.pop(storage, None)
        if thunks is None:
            return
        with self._making():
            for thunk in thunks:
                thunk()

    def _make_readers(self, storage: int) -> None:
        for reader in self._readers.pop(storage, ()):
            self._make(reader)

    @contextlib.contextmanager
    def _making(self) -> Iterator[None]:
        """Operators run as they did below autograd and autocast, and are not counted."""
        was_making, self.is_making = self.is_making, True
        try:
            with torch.no_grad(), torch._C._ExcludeDispatchKeyGuard(_ABOVE_KERNELS):
                yield
        finally:
            self.is_making = was_making


def _complete(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator; if it is a collective, wait for it: the program may have waited before it was run."""
    output = func(*args, **kwargs)
    if communicates(func):
        wait_for(output)
    return output


def _hides_tensors(leaf: Any) -> bool:
    """Return whether the tensors inside of a tensor of another class cannot be found."""
    if not isinstance(leaf, torch.Tensor) or type(leaf) in {torch.Tensor, torch.nn.Parameter}:
        return False
    return not is_traceable_wrapper_subclass(leaf) and hasattr(type(leaf), "__torch_dispatch__")
