"""The options that all examples have: where saved tensors go, and how large the windows are."""

from __future__ import annotations

import argparse
from typing import Any

import torch

MIB = 1 << 20


def add_offload_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--tier``, ``--disk-dir`` and the two windows."""
    parser.add_argument(
        "--tier",
        choices=("auto", "host", "disk"),
        default="auto",
        help="where saved tensors go: pinned memory (trains on CUDA), or a spill file (trains on the CPU); "
        "auto, the default, takes CUDA when it is there",
    )
    parser.add_argument(
        "--disk-dir", default=None, help="directory of the spill file, with tier disk (default: tempfile's)"
    )
    parser.add_argument(
        "--offload-window-mib", type=float, default=None, help="most bytes on their way out (default: the library's)"
    )
    parser.add_argument(
        "--reload-window-mib", type=float, default=None, help="most bytes back ahead of use (default: the library's)"
    )


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def device_of(arguments: argparse.Namespace) -> torch.device:
    """CUDA when it is there, except under the disk tier, which the examples use for CPU tensors."""
    return torch.device("cuda" if torch.cuda.is_available() and arguments.tier != "disk" else "cpu")


def tier_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Collect the keyword options that ``OffloadActivations`` and ``fit`` have in common: where what moves goes."""
    tier = arguments.tier
    if tier == "auto":
        tier = "host" if device_of(arguments).type == "cuda" else "disk"
    options: dict[str, Any] = {"tier": tier}
    if arguments.disk_dir is not None:
        options["disk_dir"] = arguments.disk_dir
    return options


def offload_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Collect the keyword options of ``OffloadActivations`` that the command line asks for."""
    options = tier_options(arguments)
    if arguments.offload_window_mib is not None:
        options["offload_window_bytes"] = int(arguments.offload_window_mib * MIB)
    if arguments.reload_window_mib is not None:
        options["reload_window_bytes"] = int(arguments.reload_window_mib * MIB)
    return options


def least_memory_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Collect the options of the command line; on the disk tier with windows of nothing, where none were given.

    The windows that are chosen by default would hold much of what a small model saves.
    """
    options = offload_options(arguments)
    if options["tier"] == "disk":
        options = {"offload_window_bytes": 0, "reload_window_bytes": 0} | options
    return options
