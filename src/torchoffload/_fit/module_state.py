"""What a block's modules are made of at the start of its forward, and the same put in place for a recomputation."""

import contextlib
import itertools
from typing import Any

import torch
from torch import nn

from torchoffload._fit.effects import in_place
from torchoffload._fit.operators import addresses, storages, tensors

__all__ = ["ModuleState"]

_CHANGED = (
    "torchoffload: a parameter or buffer of shape {shape} was written to between the forward of a planned block and "
    "its backward, which computes the block again from it. Run backward before writing to it, or clone it in the block."
)


class ModuleState:
    """The attributes, parameters and buffers of a module and all modules in it, at one moment. The copies are shallow.

    Parameters
    ----------
    module : nn.Module
        The block.

    Attributes
    ----------
    unnoted : list of tuple
        What was written to since ``note_versions()``, each with the number of the operator that wrote.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        tables: list[dict[str, Any]] = []
        for each in modules:
            tables += (each.__dict__, each._parameters, each._buffers)
        self._tables = [(table, list(itertools.chain.from_iterable(table.items()))) for table in tables]
        # The version of each parameter and buffer, and those that it has behind the block's own writes to it, each with
        # the number of the operator that wrote.
        self._versions: dict[int, list[tuple[int, int]]] = {}
        self.unnoted: list[tuple[int, torch.Tensor]] = []
        self._own: list[tuple[torch.Tensor, int]] = []
        for each in modules:
            for tensor in (*each._parameters.values(), *each._buffers.values()):
                if tensor is not None and not tensor.is_inference():
                    for storage in storages(tensor):
                        self._versions[storage._cdata] = [(-1, tensor._version)]
                    self._own.append((tensor, tensor._version))

    @property
    def has_changed(self) -> bool:
        """Whether anybody has written to a parameter or buffer since, the block itself included."""
        return any(tensor._version != version for tensor, version in self._own)

    def owns(self, storage: int) -> bool:
        """Return whether the storage at this address is of a parameter or a buffer."""
        return storage in self._versions

    def wrote(self, number: int, value: Any) -> None:
        """Note that the operator of this number wrote to the tensors in ``value``."""
        self.unnoted += [(number, tensor) for tensor in tensors(value)]

    def note_versions(self) -> None:
        """Note the versions of what was written to. Autograd raises them once the operator has returned."""
        if not self.unnoted:
            return
        for number, tensor in self.unnoted:
            for storage in storages(tensor):
                versions = self._versions.get(storage._cdata)
                if versions is not None and not tensor.is_inference():
                    versions.append((number, tensor._version))
        self.unnoted.clear()

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

    def in_place(self) -> contextlib.AbstractContextManager[None]:
        """Make the modules what they were, and afterwards what they are now, whatever is set in between."""
        return in_place(self._tables)
