"""What a measurement was taken on: a number without it says nothing."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
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
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
