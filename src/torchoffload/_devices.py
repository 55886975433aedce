"""A device's name, clock and memory, and the accelerator that this machine has.

All questions to a device are asked here: by ``torch.cuda`` for CUDA, and for every other accelerator by what PyTorch
has for all of them, ``torch.accelerator`` and ``torch.Event``. The rest of the package asks the ``Meter`` of a device.
The exceptions are settings that CUDA alone has: its allocator's segments and cuDNN's dropout.
"""

import functools
import os
import time
from typing import Any, NamedTuple, Protocol

import torch

__all__ = [
    "Counts",
    "Meter",
    "accelerator",
    "accelerators",
    "accelerators_in_use",
    "copy_s",
    "cuda_device_count",
    "cuda_properties",
    "description",
    "host_buffer",
    "is_capturing",
    "meter_for",
    "other_accelerator_is_there",
]

_PROBE_BYTES = 1 << 20
# A guard, an allocator or a Python module of a device that lacks a method says so by one of these.
_NOT_HAD = (RuntimeError, NotImplementedError, AttributeError, ValueError, TypeError)


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
    peak_bytes : int
        The most bytes that were allocated since the peak was last taken, or reset by the program.
    """

    allocated_bytes: int = 0
    reserved_bytes: int = 0
    failures: int = 0
    retries: int = 0
    peak_bytes: int = 0

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

    def synchronize(self) -> None:
        """Wait for all work of the device."""

    def take_peak(self) -> int:
        """Return the most bytes that were allocated since this was last called; 0 if it cannot be asked."""

    def used_bytes(self) -> tuple[int, int]:
        """Return the bytes in use now, and the most that ever were; zeros if it cannot be asked."""

    def counts(self) -> Counts:
        """Return the state of the allocator now; zeros for what cannot be asked."""

    def forget_reserved(self) -> None:
        """Give memory that is reserved and unused back to the device."""

    def total_bytes(self) -> int:
        """Return the bytes that this process can have of the device's memory.

        ValueError: it cannot be asked.
        """

    def keep_host_ahead(self, operator_count: int) -> None:
        """Have the device wait for as long as the host takes to enqueue so many operators, if it can."""


def _total_is_unknown(device: torch.device) -> ValueError:
    return ValueError(
        f"memory must be given for a model on {device.type!r}: what it may use there cannot be asked for. "
        'Give bytes, or a text such as memory="8GiB"'
    )


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

    def synchronize(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize(self.device)

    def take_peak(self) -> int:
        """Return the most bytes that were allocated since this was last called."""
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    def used_bytes(self) -> tuple[int, int]:
        """Return PyTorch's figures; zeros if CUDA was not used yet."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return 0, 0
        return torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device)

    def counts(self) -> Counts:
        """Return PyTorch's counts."""
        told = torch.cuda.memory_stats_as_nested_dict(self.device)
        if not told:  # the allocator has not begun, or is another one
            return Counts()
        allocated, reserved = (told[name]["all"] for name in ("allocated_bytes", "reserved_bytes"))
        failures, retries = told["num_ooms"], told["num_alloc_retries"]
        return Counts(allocated["current"], reserved["current"], failures, retries, allocated["peak"])

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


class AcceleratorMeter:
    """An accelerator other than CUDA, by as much of PyTorch's common interface as the device implements.

    If its events tell no time, a moment is the host's time once the device has ended its work. If its allocator tells
    no peaks that can be reset, or nothing tells how much memory there is, its memory is not measured. The first meter
    of a device finds out, and resets PyTorch's peak statistics of the device for that; so does taking a peak.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._has_timed_events = _has_timed_events(device)
        self.measures_memory = _free_and_total_bytes(device) is not None and _tells_peaks(device)

    def now(self) -> Any:
        """Return an event on the current stream, or the host's time after all work of the device, in seconds."""
        if not self._has_timed_events:
            self.synchronize()
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def between_s(self, begin: Any, end: Any) -> float:
        """Return the seconds between two moments."""
        if not self._has_timed_events:
            return float(end - begin)
        begin.synchronize()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def synchronize(self) -> None:
        """Wait for all streams. If PyTorch cannot wait for the device, its operators have ended when they return."""
        try:
            torch.accelerator.synchronize(self.device)
        except _NOT_HAD:
            return

    def take_peak(self) -> int:
        """Return the most bytes that were allocated since this was last called; 0 if the memory is not measured."""
        if not self.measures_memory:
            return 0
        peak = torch.accelerator.max_memory_allocated(self.device)
        torch.accelerator.reset_peak_memory_stats(self.device)
        return peak

    def used_bytes(self) -> tuple[int, int]:
        """Return the figures of the device's allocator; zeros if it tells none."""
        told = _memory_stats(self.device)
        return told.get("allocated_bytes.all.current", 0), told.get("allocated_bytes.all.peak", 0)

    def counts(self) -> Counts:
        """Return the counts of the device's allocator; zeros for those that it does not tell."""
        told = _memory_stats(self.device)
        names = ("allocated_bytes.all.current", "reserved_bytes.all.current", "num_ooms", "num_alloc_retries")
        return Counts(*(told.get(name, 0) for name in (*names, "allocated_bytes.all.peak")))

    def forget_reserved(self) -> None:
        """Empty the allocator's cache, if it has one."""
        self.synchronize()
        try:
            torch.accelerator.empty_cache()
        except _NOT_HAD:
            return

    def total_bytes(self) -> int:
        """Return the bytes that are free on the device and those that PyTorch has reserved of it."""
        known = _free_and_total_bytes(self.device)
        if known is None:
            raise _total_is_unknown(self.device)
        free, total = known
        return min(free + self.counts().reserved_bytes, total)

    def keep_host_ahead(self, operator_count: int) -> None:
        """Do nothing: PyTorch has no kernel for all devices that only takes time."""


class HostMeter:
    """The host itself, or a device whose memory is the host's: the host's clock, and no memory."""

    measures_memory = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> Any:
        """Return the time on the host."""
        return time.perf_counter()

    def between_s(self, begin: Any, end: Any) -> float:
        """Return the seconds between two times."""
        return float(end - begin)

    def synchronize(self) -> None:
        """Do nothing: an operator has ended when it returns."""

    def take_peak(self) -> int:
        """Return 0."""
        return 0

    def used_bytes(self) -> tuple[int, int]:
        """Return the resident memory of this process, and 0 for its peak, which is not followed."""
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"), 0

    def counts(self) -> Counts:
        """Return zeros."""
        return Counts()

    def forget_reserved(self) -> None:
        """Do nothing."""

    def total_bytes(self) -> int:
        """Raise ValueError: the size of the device's memory is not known."""
        raise _total_is_unknown(self.device)

    def keep_host_ahead(self, operator_count: int) -> None:
        """Do nothing: the host computes."""


def meter_for(device: torch.device) -> Meter:
    """Return the meter of a device."""
    if device.type == "cuda":
        return CudaMeter(device)
    return HostMeter(device) if device.type in ("cpu", "meta") else AcceleratorMeter(device)


def _accelerator_type() -> str | None:
    """Return the type of the accelerator that PyTorch has here, without initializing it; None if there is none."""
    if torch.cuda.is_available():
        return "cuda"
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def cuda_device_count() -> int:
    """Return the number of CUDA devices, which PyTorch counts through NVML if it can: CUDA is not initialized then."""
    return torch.cuda.device_count()


def cuda_properties() -> Any:
    """Return PyTorch's properties of the current CUDA device."""
    return torch.cuda.get_device_properties(torch.cuda.current_device())


def other_accelerator_is_there() -> bool:
    """Return whether PyTorch has an accelerator that is not CUDA. CUDA is not asked."""
    found = torch.accelerator.current_accelerator()
    return found is not None and found.type != "cuda" and bool(torch.get_device_module(found.type).is_available())


def accelerator() -> torch.device | None:
    """Return the current device of the accelerator that PyTorch has here; None if there is none.

    PyTorch has one type of accelerator at a time. Asking for its current device initializes it.
    """
    type_ = _accelerator_type()
    if type_ is None:
        return None
    index = torch.cuda.current_device() if type_ == "cuda" else torch.accelerator.current_device_index()
    return torch.device(type_, index)


def accelerators() -> list[torch.device]:
    """Return all devices of the accelerator that PyTorch has here, without initializing them."""
    type_ = _accelerator_type()
    if type_ is None:
        return []
    count = torch.cuda.device_count() if type_ == "cuda" else torch.accelerator.device_count()
    return [torch.device(type_, index) for index in range(count)]


def accelerators_in_use() -> list[torch.device]:
    """Return the devices of the accelerator, if this process may have used it. CUDA is not initialized by this."""
    may_be_used = torch.cuda.is_initialized() or other_accelerator_is_there()  # type: ignore[no-untyped-call]
    return accelerators() if may_be_used else []


def description(device: torch.device) -> dict[str, Any]:
    """Return the name of an accelerator, its memory in bytes and its capability, each as far as PyTorch knows it.

    Returns
    -------
    dict
        ``device``, such as ``"cuda:0"``; ``name``, by default that of its type; and if they are known ``memory_bytes``
        and ``capability``.
    """
    told: dict[str, Any] = {"device": str(device), "name": device.type}
    module: Any = torch.get_device_module(device.type)
    try:
        properties = module.get_device_properties(device)
    except _NOT_HAD:
        properties = None
    name = getattr(properties, "name", None)
    if name:
        told["name"] = str(name)
    known = _free_and_total_bytes(device) if device.type != "cuda" else None
    memory_bytes = getattr(properties, "total_memory", None) or (known[1] if known else None)
    if memory_bytes:
        told["memory_bytes"] = int(memory_bytes)
    if hasattr(properties, "major") and hasattr(properties, "minor"):
        told["capability"] = f"{properties.major}.{properties.minor}"
    return told


def host_buffer(nbytes: int) -> torch.Tensor:
    """Return a tensor of bytes in host memory: page-locked, if the accelerator has such memory."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except NotImplementedError:  # of a device without an allocator of such memory
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def copy_s(meter: Meter, target: torch.Tensor, source: torch.Tensor, count: int) -> float:
    """Return the seconds that one of ``count`` copies takes, made one behind the other on the current stream."""
    begin = meter.now()
    for _ in range(count):
        target.copy_(source, non_blocking=True)
    end = meter.now()
    return max(meter.between_s(begin, end) / count, 1e-9)


def is_capturing() -> bool:
    """Return whether a graph is being captured from the current stream. CUDA's alone are asked for."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@functools.cache
def _has_timed_events(device: torch.device) -> bool:
    """Return whether two events of the device tell the time between them."""
    try:
        begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        begin.record()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) >= 0
    except _NOT_HAD:
        return False


@functools.cache
def _tells_peaks(device: torch.device) -> bool:
    """Return whether the device's allocator counts what is allocated, and the most of it since a reset."""
    try:
        before_bytes = torch.accelerator.memory_allocated(device)
        probe = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=device)
        held_bytes = torch.accelerator.memory_allocated(device)
        del probe
        torch.accelerator.reset_peak_memory_stats(device)
        return held_bytes >= before_bytes + _PROBE_BYTES and torch.accelerator.max_memory_allocated(device) < held_bytes
    except _NOT_HAD:
        return False


def _memory_stats(device: torch.device) -> dict[str, Any]:
    try:
        return torch.accelerator.memory_stats(device)
    except _NOT_HAD:
        return {}


def _free_and_total_bytes(device: torch.device) -> tuple[int, int] | None:
    """Return the free bytes of an accelerator and all that it has; None if PyTorch does not know them."""
    asked: list[Any] = [
        getattr(torch.accelerator, "get_memory_info", None),  # since torch 2.10
        getattr(torch.get_device_module(device.type), "mem_get_info", None),
    ]
    for ask in asked:
        try:
            free, total = ask(device)
        except _NOT_HAD:
            continue
        return int(free), int(total)
    return None
