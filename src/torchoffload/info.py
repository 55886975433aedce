"""``python -m torchoffload.info`` prints versions, devices, link rate, host memory and limits, for bug reports."""

import argparse
import ctypes
import json
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

import torchoffload
from torchoffload._contexts.options import default_disk_dir, file_system_of
from torchoffload._core import build_info, core
from torchoffload._devices import Meter, accelerator, accelerators, copy_s, description, host_buffer, meter_for
from torchoffload._observe.units import human_bytes

__all__ = ["collect", "link_rate", "main", "text"]

_LINK_COPY_BYTES = 256 * 1024 * 1024
_LINK_COPIES = 5
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "OMP_NUM_THREADS",
    "PMI_LOCAL_SIZE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "SLURM_NODEID",
    "SLURM_STEP_TASKS_PER_NODE",
    "TMPDIR",
)


def _driver_version() -> str | None:
    """Return the newest CUDA version that the driver supports, such as ``"13.0"``; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _best_rate(target: torch.Tensor, source: torch.Tensor, meter: Meter) -> float:
    """Return the rate in GB/s (1e9 bytes) of the fastest of a few copies, measured by the clock of the device."""
    # The first copy warms up, and is seldom the fastest.
    best_s = min(copy_s(meter, target, source, 1) for _ in range(1 + _LINK_COPIES))
    return source.numel() / best_s / 1e9


def link_rate(device: torch.device | None) -> dict[str, Any]:
    """Measure how fast bytes move between host memory and a device, by copies of 256 MiB each way.

    Parameters
    ----------
    device : torch.device or None
        The device; None if there is no accelerator.

    Returns
    -------
    dict
        ``out_gb_per_s`` and ``in_gb_per_s``, in GB/s (1e9 bytes per second); or ``not_measured``, the reason.
    """
    if device is None:
        return {"not_measured": "no accelerator"}
    try:
        host = host_buffer(_LINK_COPY_BYTES)
        on_device = torch.empty(_LINK_COPY_BYTES, dtype=torch.uint8, device=device)
        meter = meter_for(device)
        return {
            "out_gb_per_s": round(_best_rate(host, on_device, meter), 1),
            "in_gb_per_s": round(_best_rate(on_device, host, meter), 1),
        }
    except RuntimeError as error:  # a full or broken device must not prevent the rest of the bug report
        return {"not_measured": str(error).splitlines()[0]}


def _disk(directory: str) -> dict[str, Any]:
    try:
        usage = shutil.disk_usage(directory)
        return {
            "dir": directory,
            "file_system": file_system_of(directory),
            "total_bytes": usage.total,
            "free_bytes": usage.free,
        }
    except OSError as error:
        return {"dir": directory, "error": str(error)}


def collect(disk_dir: str | None = None, *, measure_link: bool = True) -> dict[str, Any]:
    """Collect everything that ``main`` prints, as plain values.

    Parameters
    ----------
    disk_dir : str, optional
        The directory whose file system is described. Default: the one that ``tier="disk"`` uses by default.
    measure_link : bool, default True
        Whether to measure the rate of the link between host and device, by copying 256 MiB each way a few times.

    Returns
    -------
    dict
        The sections ``versions``, ``devices`` (those of the accelerator that PyTorch has), ``link``, ``host_memory``,
        ``disk`` and ``environment``, and ``host_tier_available``. Sizes are ints in bytes, rates are floats in GB/s
        (1e9 bytes per second).
    """
    names = sorted({*_VARIABLES, *(name for name in os.environ if name.startswith("TORCHOFFLOAD_"))})
    return {
        "versions": {
            "torchoffload": torchoffload.__version__,
            "torch": torch.__version__,
            "built_for_torch": build_info.torch_version,
            "built_with_cuda": core.built_with_cuda,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "cuda_runtime": torch.version.cuda,
            "hip_runtime": torch.version.hip,
            "cuda_driver": _driver_version(),
        },
        "devices": [description(device) for device in accelerators()],
        "host_tier_available": core.accelerator_available(),
        "link": link_rate(accelerator()) if measure_link else {"not_measured": "not asked for"},
        "host_memory": asdict(torchoffload.host_memory()),
        "disk": _disk(disk_dir or default_disk_dir()),
        "environment": {name: os.environ[name] for name in names if name in os.environ},
    }


def _section(title: str, values: dict[str, Any]) -> list[str]:
    lines = [f"{title}:"]
    for name, value in values.items():
        if name.endswith("_bytes"):
            name = name.removesuffix("_bytes")
            value = "no limit" if value is None else f"{human_bytes(value)} ({value} bytes)"
        elif value is None:
            value = "none"
        elif isinstance(value, bool):
            value = "yes" if value else "no"
        lines.append(f"  {name.replace('_', ' '):<22}{value}")
    return lines


def _link_lines(link: dict[str, Any]) -> list[str]:
    if "not_measured" in link:
        return ["link:", f"  not measured: {link['not_measured']}"]
    return ["link:", f"  {'out':<22}{link['out_gb_per_s']} GB/s", f"  {'in':<22}{link['in_gb_per_s']} GB/s"]


def _device_line(device: dict[str, Any]) -> str:
    parts = [device["name"]]
    if "memory_bytes" in device:
        parts.append(human_bytes(device["memory_bytes"]))
    if "capability" in device:
        parts.append(f"capability {device['capability']}")
    return f"  {device['device']:<22}{', '.join(parts)}"


def _host_tier(found: dict[str, Any]) -> str:
    if not found["host_tier_available"]:
        return "no accelerator for it"
    types = {device["device"].partition(":")[0] for device in found["devices"]}
    is_generic = bool(types) and (types != {"cuda"} or os.environ.get("TORCHOFFLOAD_GENERIC_BACKEND") == "1")
    return "available, by the generic backend" if is_generic else "available"


def text(found: dict[str, Any]) -> str:
    """Return the findings of ``collect`` as lines of text; without those of the link, if they were taken out."""
    lines = _section("versions", found["versions"])
    lines.append("devices:")
    lines += [_device_line(device) for device in found["devices"]] or ["  no accelerator"]
    lines.append(f"  {'tier host':<22}{_host_tier(found)}")
    lines += _link_lines(found["link"]) if "link" in found else []
    lines += _section("host memory", found["host_memory"])
    lines += _section("disk tier", found["disk"])
    lines.append("environment:")
    environment = found["environment"]
    lines += [f"  {name}={value}" for name, value in environment.items()] or ["  nothing set that matters here"]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the findings of ``collect``. This is the command ``python -m torchoffload.info``.

    Parameters
    ----------
    arguments : sequence of str, optional
        The arguments of the command line. Default: those of the process.

    Returns
    -------
    int
        The exit status, 0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m torchoffload.info",
        description="Print versions, devices, link rate, host memory and limits. Paste it into a bug report.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes and rates in GB/s")
    parser.add_argument("--disk-dir", metavar="DIR", help="look at this directory instead of the disk tier's default")
    parser.add_argument("--no-link", action="store_true", help="do not measure the link rate")
    given = parser.parse_args(arguments)
    found = collect(given.disk_dir, measure_link=not given.no_link)
    print(json.dumps(found, indent=2) if given.json else text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
