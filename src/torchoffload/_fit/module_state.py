"""What a block's modules are made of at the start of its forward, and the same put in place for a recomputation."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torchoffload._fit.operators import addresses, storages, tensors

__all__ = ["ModuleState"]

_CHANGED = (
    "torchoffload: a parameter or buffer of shape {shape} was written to between the forward of a planned block and "
    "its backward, which computes the block again from it. Run backward before writing to it, or clone it in the block."
)

_Tables = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


class ModuleState:
    """The attributes, parameters and buffers of a module and all modules in it, at one moment. The copies are shallow.

    Parameters
    ----------
    module : nn.Module
        The block.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = [(each, _tables(each)) for each in module.modules()]
        # The version of each parameter and buffer, and those that it has behind the block's own writes to it, each with
        # the number of the operator that wrote.
        self._versions: dict[int, list[tuple[int, int]]] = {}
        self._written: list[tuple[int, torch.Tensor]] = []
        for _, (_, parameters, buffers) in self._modules:
            for tensor in (*parameters.values(), *buffers.values()):
                if tensor is not None and not tensor.is_inference():
                    for storage in storages(tensor):
                        self._versions[storage._cdata] = [(-1, tensor._version)]

    def owns(self, storage: int) -> bool:
        """Return whether the storage at this address is of a parameter or a buffer."""
        return storage in self._versions

    def wrote(self, number: int, value: Any) -> None:
        """Note that the operator of this number wrote to the tensors in ``value``."""
        self._written += [(number, tensor) for tensor in tensors(value)]

    def note_versions(self) -> None:
        """Note the versions of what was written to. Autograd raises them once the operator has returned."""
        if not self._written:
            return
        for number, tensor in self._written:
            for storage in storages(tensor):
                versions = self._versions.get(storage._cdata)
                if versions is not None and not tensor.is_inference():
                    versions.append((number, tensor._version))
        self._written.clear()

    def check_unchanged(self, number: int, arguments: Any) -> None:
        """RuntimeError if a tensor in ``arguments`` is not what the operator of this number read in forward."""
        if self._versions.keys().isdisjoint(addresses(arguments)):
            return
        for tensor in tensors(arguments):
            for storage in storages(tensor):
                versions = self._versions.get(storage._cdata)
                if versions is None or tensor.is_inference():
                    continue
                expected = next(version for writer, version in reversed(versions) if writer < number)
                if tensor._version != expected:
                    raise RuntimeError(_CHANGED.format(shape=tuple(tensor.shape)))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Make the modules what they were, and afterwards what they are now, whatever is set in between."""
        present = [(each, _tables(each)) for each, _ in self._modules]
        try:
            for module, tables in self._modules:
                _put(module, tables)
            yield
        finally:
            for module, tables in present:
                _put(module, tables)


def _tables(module: nn.Module) -> _Tables:
    return dict(module.__dict__), dict(module._parameters), dict(module._buffers)


def _put(module: nn.Module, tables: _Tables) -> None:
    current: tuple[dict[str, Any], ...] = (module.__dict__, module._parameters, module._buffers)
    for table, wanted in zip(current, tables, strict=True):
        if len(table) != len(wanted) or any(table.get(name, _tables) is not wanted[name] for name in wanted):
            table.clear()
            table.update(wanted)
