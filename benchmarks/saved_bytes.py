"""How much there is to move: the unique bytes that a forward saves, counted by storage and by address.

An offloader's share of moved bytes is taken against this count, which knows nothing of any offloader.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and one past the last byte of the storage that the view reaches."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset() * tensor.element_size()
    return start, start + (last + 1) * tensor.element_size()


@dataclass
class SavedBytes:
    """Counts what is saved inside ``hooks()``. Parameters, and whatever shares their storage, are left out."""

    model: torch.nn.Module
    summed: int = 0  # bytes of every save, as if nothing were saved twice
    _spans: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Make the context that counts: enter it around one forward."""
        parameter_storages = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage().data_ptr()
            if tensor.numel() and storage not in parameter_storages:
                self.summed += tensor.numel() * tensor.element_size()
                self._spans.setdefault(storage, []).append(_span(tensor))
            # The graph holds the alias until backward, so no address is used again while spans are collected.
            return tensor.detach()

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    @property
    def unique(self) -> int:
        """Bytes of the union of all spans."""
        total = 0
        for spans in self._spans.values():
            end = 0
            for start, stop in sorted(spans):
                total += max(0, stop - max(start, end))
                end = max(end, stop)
        return total
