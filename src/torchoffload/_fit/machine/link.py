"""How fast bytes move between the device and the tier, measured by copies of its own."""

import os
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch

from torchoffload._contexts.options import OffloadOptions

__all__ = ["LinkRates", "measure_link"]

_NBYTES = 32 << 20
_REPEATS = 4


@dataclass(frozen=True)
class LinkRates:
    """The time of a copy is bytes / rate + latency.

    Attributes
    ----------
    out_bytes_per_s, in_bytes_per_s : float
        The rates to the tier and back.
    latency_s : float
        The time that each copy takes besides.
    """

    out_bytes_per_s: float
    in_bytes_per_s: float
    latency_s: float


def measure_link(device: torch.device, options: OffloadOptions) -> LinkRates:
    """Measure the link that saved tensors of ``device`` move over. Takes some milliseconds, and 64 MiB of memory."""
    if options.tier == "disk":
        return _disk(str(options.disk_dir[0] if isinstance(options.disk_dir, tuple) else options.disk_dir))
    if device.type != "cuda":
        return LinkRates(1e10, 1e10, 1e-5)  # a simulated device, whose copies take no time that could be measured
    return _cuda(device)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _cuda(device: torch.device) -> LinkRates:
    on_host = torch.empty(_NBYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    on_device = torch.empty(_NBYTES, dtype=torch.uint8, device=device)

    def seconds(target: torch.Tensor, source: torch.Tensor, count: int) -> float:
        begin, end = _event(), _event()
        begin.record()
        for _ in range(count):
            target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / count

    with torch.cuda.device(device):
        seconds(on_host, on_device, 1)
        out_s, in_s = seconds(on_host, on_device, _REPEATS), seconds(on_device, on_host, _REPEATS)
        latency_s = seconds(on_host[:4096], on_device[:4096], 16)
    return LinkRates(_NBYTES / out_s, _NBYTES / in_s, latency_s)


def _disk(directory: str) -> LinkRates:
    """Write a file through to the disk, and read it, which may come from the system's cache as later reloads may."""
    data = bytes(_NBYTES)
    with tempfile.TemporaryFile(dir=directory) as file:
        begin = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        out_s = time.perf_counter() - begin
        file.seek(0)
        begin = time.perf_counter()
        file.read()
        in_s = time.perf_counter() - begin
    return LinkRates(_NBYTES / max(out_s, 1e-9), _NBYTES / max(in_s, 1e-9), 1e-4)
