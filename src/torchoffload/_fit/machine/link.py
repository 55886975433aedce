"""How fast bytes move between the device and the tier, measured by copies of its own."""

import os
import tempfile
import time
from dataclasses import dataclass

import torch

from torchoffload._contexts.options import OffloadOptions
from torchoffload._devices import copy_s, host_buffer, meter_for

__all__ = ["LinkRates", "disk_link", "measure_link"]

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
        return disk_link(str(options.disk_dir[0] if isinstance(options.disk_dir, tuple) else options.disk_dir))
    if device.type == "cpu":
        return LinkRates(1e10, 1e10, 1e-5)  # a simulated device, whose copies take no time that could be measured
    return _accelerator(device)


def _accelerator(device: torch.device) -> LinkRates:
    meter = meter_for(device)
    on_host = host_buffer(_NBYTES)
    on_device = torch.empty(_NBYTES, dtype=torch.uint8, device=device)
    with torch.accelerator.device_index(device.index):
        copy_s(meter, on_host, on_device, 1)
        out_s, in_s = copy_s(meter, on_host, on_device, _REPEATS), copy_s(meter, on_device, on_host, _REPEATS)
        latency_s = copy_s(meter, on_host[:4096], on_device[:4096], 16)
    return LinkRates(_NBYTES / out_s, _NBYTES / in_s, latency_s)


def disk_link(directory: str) -> LinkRates:
    """Write a file of 32 MiB through to the disk, and read it, maybe from the system's cache as later reloads may."""
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
