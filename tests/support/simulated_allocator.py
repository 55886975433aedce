"""simulated_allocator.py: a device of a given size on the CPU, with an allocator that reserves more than is allocated.

Each allocation takes time of a clock that nothing else moves, and memory until it is freed. If more would have to be
reserved than the device has, there is an OutOfMemoryError, as PyTorch raises it.
"""

from typing import Any, Self

import pytest
import torch
from torch.utils._pytree import tree_leaves

from torchoffload._devices import Counts

__all__ = ["SimulatedAllocator", "SimulatedMeter"]

testing = pytest.importorskip("torchoffload._C_testing", reason="it is in the test build alone").testing


class SimulatedAllocator(testing.CountedMemory):
    """Counts what is allocated on the CPU while it is entered, and what that reserves.

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

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def hold(self, tensors: Any) -> None:
        """Count tensors that were there before."""
        sizes = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tree_leaves(tensors)}
        self.fixed_bytes += sum(sizes.values())

    @property
    def allocated_bytes(self) -> int:
        return self.fixed_bytes + self.made_bytes


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
        return Counts(allocator.allocated_bytes, allocator.reserved_bytes, allocator.ooms, 0, allocator.peak_bytes)

    def forget_reserved(self) -> None:
        self.allocator.reserved_bytes = int(self.allocator.allocated_bytes * self.allocator.growth)

    def total_bytes(self) -> int:
        return self.allocator.cap_bytes

    def keep_host_ahead(self, operator_count: int) -> None:
        pass
