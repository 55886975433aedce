"""simulated_allocator.py: a device of a given size on the CPU, with an allocator that reserves more than is allocated.

Each operator takes time of a clock that only operators move, and what it makes takes memory until it is freed. If more
would have to be reserved than the device has, there is an OutOfMemoryError, as PyTorch raises it.
"""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchoffload._fit.meter import Counts

__all__ = ["SimulatedAllocator", "SimulatedMeter"]

_OPERATOR_S = 10e-6
_BYTES_PER_S = 1e9


class SimulatedAllocator(TorchDispatchMode):
    """Counts what operators allocate while it is entered, and what that reserves.

    Parameters
    ----------
    growth : float
        What is reserved, over what is allocated.
    cap_bytes : int
        What the device has.
    """

    def __init__(self, growth: float = 1.0, cap_bytes: int = 1 << 60) -> None:
        super().__init__()
        self.growth, self.cap_bytes = growth, cap_bytes
        self.now_s = 0.0
        self.ooms = 0
        self.peak_bytes = self.reserved_bytes = self.most_reserved_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._fixed: dict[int, int] = {}

    def hold(self, tensors: Any) -> None:
        """Count tensors that were there before."""
        for each in tree_leaves(tensors):
            storage = each.untyped_storage()
            self._fixed[storage._cdata] = storage.nbytes()

    @property
    def allocated_bytes(self) -> int:
        self._alive = {key: (alive, size) for key, (alive, size) in self._alive.items() if not alive.expired()}
        return sum(self._fixed.values()) + sum(nbytes for _, nbytes in self._alive.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        made = 0
        for leaf in tree_leaves(output):
            if not isinstance(leaf, torch.Tensor):
                continue
            storage = leaf.untyped_storage()
            known = self._alive.get(storage._cdata)
            if storage._cdata not in self._fixed and (known is None or known[0].expired()):
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                made += storage.nbytes()
        self.now_s += _OPERATOR_S + made / _BYTES_PER_S
        self._account()
        return output

    def _account(self) -> None:
        allocated = self.allocated_bytes
        needed = int(allocated * self.growth)
        if needed > self.cap_bytes:
            self.ooms += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.peak_bytes = max(self.peak_bytes, allocated)
        self.reserved_bytes = max(self.reserved_bytes, needed)
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)


class SimulatedMeter:
    """The meter of such a device."""

    measures_memory = True

    def __init__(self, allocator: SimulatedAllocator) -> None:
        self.allocator = allocator
        self.device = torch.device("cpu")

    def now(self) -> Any:
        return self.allocator.now_s

    def between_s(self, begin: Any, end: Any) -> float:
        return end - begin

    def take_peak(self) -> int:
        peak, self.allocator.peak_bytes = self.allocator.peak_bytes, self.allocator.allocated_bytes
        return peak

    def counts(self) -> Counts:
        allocator = self.allocator
        return Counts(allocator.allocated_bytes, allocator.reserved_bytes, allocator.ooms, 0)

    def forget_reserved(self) -> None:
        self.allocator.reserved_bytes = int(self.allocator.allocated_bytes * self.allocator.growth)

    def total_bytes(self) -> int:
        return self.allocator.cap_bytes

    def keep_host_ahead(self, operator_count: int) -> None:
        pass
