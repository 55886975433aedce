"""How the examples measure memory: the peak of a run over its state before the first step, and one step's course.

On CUDA these are the allocator's own statistics. On a CPU they are the resident memory of the process, which is why
each run has a process of its own, and why ``RETURN_FREED_MEMORY`` belongs into the environment of all of them.
"""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType
from typing import Self

import torch

# glibc keeps freed blocks for itself, and raises the size from which it does not whenever one is freed: the resident
# memory would then tell what was freed last week. Fixed thresholds send every large block back to the kernel at once.
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18), "MALLOC_TRIM_THRESHOLD_": str(1 << 18)}

SAMPLE_INTERVAL_S = 0.001


def _status_bytes(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def _try_reset_resident_peak() -> bool:
    """Make VmHWM start again from the present resident memory; False where the kernel does not offer it."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as clear_refs:
            clear_refs.write("5")
    except OSError:
        return False
    return True


def memory_in_use_bytes(device: torch.device) -> int:
    """Allocated bytes of a CUDA device, or resident bytes of this process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class MemorySampler:
    """Samples memory from a thread while its ``with`` block runs: ``points`` are (seconds since entry, bytes)."""

    def __init__(self, device: torch.device) -> None:
        self.points: list[tuple[float, int]] = []
        self._device = device
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        start = time.perf_counter()
        while True:
            self.points.append((time.perf_counter() - start, memory_in_use_bytes(self._device)))
            if self._stop.wait(SAMPLE_INTERVAL_S):
                return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()


class PeakMemory:
    """The peak over the state at construction, in bytes. Construct it right before the first step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sampler: MemorySampler | None = None
        self._noted_bytes = 0
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        elif not _try_reset_resident_peak():
            self._sampler = MemorySampler(device)
            self._sampler.__enter__()
        self.state_bytes = memory_in_use_bytes(device)

    def note_step(self) -> None:
        """Note the peak of a step that has ended, where ``fit`` resets PyTorch's statistics of it in a later one.

        What it resets inside of a step is not seen: that is in the survey, whose steps run in the least memory.
        """
        if self._device.type == "cuda":
            self._noted_bytes = max(self._noted_bytes, torch.cuda.max_memory_allocated(self._device))

    def read(self) -> int:
        """Peak minus state. Call it once, after the last step."""
        if self._device.type == "cuda":
            return max(self._noted_bytes, torch.cuda.max_memory_allocated(self._device)) - self.state_bytes
        if self._sampler is None:
            return _status_bytes("VmHWM") - self.state_bytes
        self._sampler.__exit__(None, None, None)
        return max(in_use for _, in_use in self._sampler.points) - self.state_bytes
