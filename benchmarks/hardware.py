"""What a measurement was taken on, and by which command: a number without it says nothing."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def hardware(device: torch.device) -> dict[str, Any]:
    """Name the device, and the versions of what runs on it; transformers is None where it is not installed."""
    try:
        transformers = version("transformers")
    except PackageNotFoundError:
        transformers = None
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "cpu_count": os.cpu_count(),
        "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def command_line() -> str:
    """Tell the command of this process without the machine's own directories: results are published."""
    script, *arguments = sys.argv
    return shlex.join([Path(sys.executable).name, f"benchmarks/{Path(script).name}", *map(_without_place, arguments)])


def _without_place(argument: str) -> str:
    """Keep the last name of an absolute path, alone or after ``--option=``."""
    option, equals, value = argument.rpartition("=")
    return f"{option}{equals}{Path(value).name}" if value.startswith("/") else argument
