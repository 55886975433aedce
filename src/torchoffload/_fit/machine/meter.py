"""A device's clock and memory: moments, and the most memory between two of them."""

import time
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch

from torchoffload._fit.machine.operators import storages

__all__ = ["Counts", "CudaMeter", "Meter", "ReckonedMeter", "meter_for", "unique_bytes"]


def unique_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages of tensors, each counted once."""
    seen = {storage._cdata: storage.nbytes() for storage in storages(list(tensors))}
    return sum(seen.values())


class Counts(NamedTuple):
    """The state of a device's allocator at one moment.

    Attributes
    ----------
    allocated_bytes, reserved_bytes : int
        The bytes that are allocated, and the bytes that are reserved for these and for later ones.
    failures : int
        How often an allocation found no memory.
    retries : int
        How often one found no memory at first, and cached memory was given back for it.
    """

    allocated_bytes: int = 0
    reserved_bytes: int = 0
    failures: int = 0
    retries: int = 0

    @property
    def waits(self) -> int:
        """How often an allocation found no memory, at first or at all."""
        return self.failures + self.retries


class Meter(Protocol):
    """Moments and memory of one device.

    Attributes
    ----------
    device : torch.device
        The device.
    measures_memory : bool
        Whether the memory can be asked for. If not, the memory of a step is computed from sizes.
    """

    device: torch.device
    measures_memory: bool

    def now(self) -> Any:
        """Return this moment in the order of the device's work."""

    def between_s(self, begin: Any, end: Any) -> float:
        """Return the seconds between two moments. May wait for the device."""

    def take_peak(self) -> int:
        """Return the most bytes that were allocated since this was last called."""

    def counts(self) -> Counts:
        """Return the state of the allocator now; zeros if it cannot be asked."""

    def forget_reserved(self) -> None:
        """Give memory that is reserved and unused back to the device."""

    def total_bytes(self) -> int:
        """Return the bytes that this process can have of the device's memory."""

    def keep_host_ahead(self, operator_count: int) -> None:
        """Have the device wait for as long as the host takes to enqueue so many operators."""


class CudaMeter:
    """A CUDA device, by its events and by PyTorch's allocator.

    To take a peak resets PyTorch's peak statistics of the device.
    """

    measures_memory = True
    _CYCLES_AN_OPERATOR = 500_000  # some 300 us at the clock of a GPU: enough for its backward, too
    _CYCLES_AROUND = 10_000_000  # for the host's work beside operators

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

    def counts(self) -> Counts:
        """Return PyTorch's counts."""
        told = torch.cuda.memory_stats_as_nested_dict(self.device)
        if not told:  # the allocator has not begun, or is another one
            return Counts()
        allocated, reserved = (told[name]["all"]["current"] for name in ("allocated_bytes", "reserved_bytes"))
        return Counts(allocated, reserved, told["num_ooms"], told["num_alloc_retries"])

    def forget_reserved(self) -> None:
        """Empty the allocator's cache."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def total_bytes(self) -> int:
        """Return the bytes that are free on the device and those that PyTorch has reserved of it."""
        free, total = torch.cuda.mem_get_info(self.device)
        fraction = torch.cuda.get_per_process_memory_fraction(self.device)
        return min(free + torch.cuda.memory_reserved(self.device), int(total * fraction))

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

    def counts(self) -> Counts:
        """Return zeros."""
        return Counts()

    def take_peak(self) -> int:
        """Return 0."""
        return 0

    def forget_reserved(self) -> None:
        """Do nothing."""

    def total_bytes(self) -> int:
        """Raise ValueError: the size of the device's memory is not known."""
        raise ValueError(
            f"memory must be given for a model on {self.device.type!r}: what it may use there cannot be asked for. "
            'Give bytes, or a text such as memory="8GiB"'
        )

    def keep_host_ahead(self, operator_count: int) -> None:
        """Do nothing: the host computes."""


def meter_for(device: torch.device) -> Meter:
    """Return the meter of a device."""
    return CudaMeter(device) if device.type == "cuda" else ReckonedMeter(device)
