"""What a step takes on its device: moments, and the most memory between two of them."""

import time
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from torchoffload._fit.operators import storages

__all__ = ["CudaMeter", "Meter", "ReckonedMeter", "meter_for", "unique_bytes"]


def unique_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages of tensors, each counted once."""
    seen = {storage._cdata: storage.nbytes() for storage in storages(list(tensors))}
    return sum(seen.values())


class Meter(Protocol):
    """Moments and memory of one device.

    Attributes
    ----------
    device : torch.device
        The device.
    measures_memory : bool
        Whether the memory can be asked for. Elsewhere what a step takes is reckoned from sizes.
    """

    device: torch.device
    measures_memory: bool

    def now(self) -> Any:
        """Return this moment in the order of the device's work."""

    def between_s(self, begin: Any, end: Any) -> float:
        """Return the seconds between two moments. May wait for the device."""

    def take_peak(self) -> int:
        """Return the most bytes that were allocated since this was last called."""

    def allocated_bytes(self) -> int:
        """Return the bytes that are allocated now; 0 where this cannot be asked for."""

    def reserved_bytes(self) -> int:
        """Return the most bytes that this process had reserved on the device since ``forget_reserved``."""

    def forget_reserved(self) -> None:
        """Give what is reserved and not used back to the device."""

    def total_bytes(self) -> int:
        """Return what this process can have of the device's memory."""

    def oom_count(self) -> int:
        """Return how often an allocation found no memory."""

    def retry_count(self) -> int:
        """Return how often an allocation found no memory at first, and what is cached was given back for it."""

    def keep_host_ahead(self, operator_count: int) -> None:
        """Have the device wait for as long as the host takes to enqueue so many operators."""


class CudaMeter:
    """A CUDA device, by its events and by PyTorch's allocator.

    To take a peak resets PyTorch's peak statistics of the device.
    """

    measures_memory = True
    _CYCLES_AN_OPERATOR = 500_000  # some 300 us at the clock of a GPU: enough for its backward, too
    _CYCLES_AROUND = 10_000_000  # for what the host does beside operators

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> Any:
        """Return an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def between_s(self, begin: Any, end: Any) -> float:
        """Return the seconds between two events."""
        begin.synchronize()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def take_peak(self) -> int:
        """Return the most bytes that were allocated since this was last called."""
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    def allocated_bytes(self) -> int:
        """Return PyTorch's count."""
        return torch.cuda.memory_allocated(self.device)

    def reserved_bytes(self) -> int:
        """Return what PyTorch has reserved, which grows only until it is given back."""
        return torch.cuda.memory_reserved(self.device)

    def forget_reserved(self) -> None:
        """Empty the allocator's cache."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def total_bytes(self) -> int:
        """Return what is free on the device and what PyTorch has reserved of it."""
        free, total = torch.cuda.mem_get_info(self.device)
        fraction = torch.cuda.get_per_process_memory_fraction(self.device)
        return min(free + torch.cuda.memory_reserved(self.device), int(total * fraction))

    def oom_count(self) -> int:
        """Return PyTorch's count."""
        return int(torch.cuda.memory_stats(self.device).get("num_ooms", 0))

    def retry_count(self) -> int:
        """Return PyTorch's count."""
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))

    def keep_host_ahead(self, operator_count: int) -> None:
        """Enqueue a kernel that only takes time."""
        torch.cuda._sleep(self._CYCLES_AROUND + self._CYCLES_AN_OPERATOR * operator_count)  # type: ignore[no-untyped-call]


class ReckonedMeter:
    """A device whose memory cannot be asked for, such as a CPU: the host's clock, and no memory."""

    measures_memory = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> Any:
        """Return the time on the host."""
        return time.perf_counter()

    def between_s(self, begin: Any, end: Any) -> float:
        """Return the seconds between two times."""
        return float(end - begin)

    def allocated_bytes(self) -> int:
        """Return 0."""
        return 0

    def take_peak(self) -> int:
        """Return 0."""
        return 0

    def reserved_bytes(self) -> int:
        """Return 0."""
        return 0

    def forget_reserved(self) -> None:
        """Do nothing."""

    def total_bytes(self) -> int:
        """Raise ValueError: what the device has is not known."""
        raise ValueError(
            f"memory must be given for a model on {self.device.type!r}: what it may use there cannot be asked for. "
            'Give bytes, or a text such as memory="8GiB"'
        )

    def oom_count(self) -> int:
        """Return 0."""
        return 0

    def retry_count(self) -> int:
        """Return 0."""
        return 0

    def keep_host_ahead(self, operator_count: int) -> None:
        """Do nothing: the host computes."""


def meter_for(device: torch.device) -> Meter:
    """Return the meter of a device."""
    return CudaMeter(device) if device.type == "cuda" else ReckonedMeter(device)
