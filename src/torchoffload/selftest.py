"""``python -m torchoffload.selftest`` compares small programs with stock on the device that is there."""

import argparse
import contextlib
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

import torchoffload
from torchoffload import info
from torchoffload._contexts.disabling import is_disabled
from torchoffload._contexts.options import default_disk_dir
from torchoffload._devices import accelerator, accelerators, copy_s, meter_for
from torchoffload._fit.machine.link import disk_link
from torchoffload._observe.units import human_bytes
from torchoffload._selftest.cases import CASES, Run
from torchoffload._selftest.comparison import Outcome, Result, compare, deterministic

__all__ = ["main"]

_LIMIT_S = 100.0  # after which no case is begun
_PLAIN_BYTES = 64 << 20
_PLAIN_COPIES = 3
_FIT_MEMORY = "1GiB"
_TITLE_COLUMNS = 34


def _title(case: Callable[[Run], Any]) -> str:
    return case.__name__.replace("_", " ")


def _line(title: str, result: Result) -> str:
    moved = f"{human_bytes(result.moved_bytes)} moved, " if result.moved_bytes else ""
    told = f"{moved}{result.taken_s:.1f} s" if result.outcome is Outcome.PASSED else result.text
    return f"  {result.outcome.value:<6}{title:<{_TITLE_COLUMNS}}{told}"


def _rate_line(name: str, out_bytes_per_s: float, in_bytes_per_s: float) -> str:
    return f"  {name:<22}{out_bytes_per_s / 1e9:.1f} GB/s out, {in_bytes_per_s / 1e9:.1f} GB/s in"


def _plain_line(device: torch.device) -> str:
    """Return a line with the rates of copies of memory that is not page-locked."""
    host = torch.empty(_PLAIN_BYTES, dtype=torch.uint8, device="cpu").fill_(1)
    on_device = torch.empty(_PLAIN_BYTES, dtype=torch.uint8, device=device)
    meter = meter_for(device)
    out_s = min(copy_s(meter, host, on_device, 1) for _ in range(_PLAIN_COPIES))
    in_s = min(copy_s(meter, on_device, host, 1) for _ in range(_PLAIN_COPIES))
    return _rate_line("plain host memory", _PLAIN_BYTES / out_s, _PLAIN_BYTES / in_s)


def _rates(device: torch.device, directory: str) -> list[str]:
    if device.type == "cpu":
        disk = disk_link(directory)
        return [_rate_line("disk", disk.out_bytes_per_s, disk.in_bytes_per_s)]
    link = info.link_rate(device)
    if "not_measured" in link:
        return [f"  not measured: {link['not_measured']}"]
    locked = _rate_line("page-locked memory", 1e9 * link["out_gb_per_s"], 1e9 * link["in_gb_per_s"])
    return [locked, _plain_line(device)]


def _device(given: str | None) -> torch.device:
    """Return the device to test: the one that was given, or the accelerator, or the CPU."""
    if given is None:
        return accelerator() or torch.device("cpu")
    device = torch.device(given)
    if device.type == "cpu":
        return torch.device("cpu")
    same = [each for each in accelerators() if each.type == device.type and device.index in (None, each.index)]
    if not same:
        there = ", ".join(map(str, accelerators())) or "only the CPU"
        raise ValueError(f"PyTorch has no device {given!r} here, but {there}")
    return same[0]


def _print(*lines: str) -> None:
    print("\n".join(lines), flush=True)


def _run_cases(device: torch.device, directory: str, wanted: str) -> Counter[str]:
    """Run the cases whose titles have the wanted text. Print a line for each, and return how many came out how."""
    on_disk: dict[str, Any] = {"tier": "disk", "disk_dir": directory} if device.type == "cpu" else {}

    def context(**options: Any) -> Any:
        # Each source is dropped at once, so that backward reads what has moved.
        chosen = {"min_offload_size": 0, "learn": False, "offload_window_bytes": 0} | on_disk
        return torchoffload.OffloadActivations(**(chosen | options))

    def fit(model: torch.nn.Module) -> Any:
        return torchoffload.fit(model, memory=_FIT_MEMORY, min_offload_size=0, allocator="as it is", **on_disk)

    outcomes: Counter[str] = Counter()
    began = time.perf_counter()
    index = contextlib.nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)
    with deterministic(), warnings.catch_warnings(), index:
        warnings.simplefilter("ignore")
        for case in (case for case in CASES if wanted in _title(case)):
            if time.perf_counter() - began > _LIMIT_S:
                result = Result(Outcome.NO_ANSWER, f"not run: {_LIMIT_S:.0f} s were over", 0, 0.0)
            else:
                result = compare(case, device, context, fit)
            outcomes[result.outcome.value] += 1
            _print(_line(_title(case), result))
    return outcomes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchoffload.selftest",
        description="Compare small programs with and without offloading, bit for bit, on the accelerator that is there "
        "or on the CPU with a disk, measure the link, and print a block to paste into an issue. It takes two minutes "
        "at most. The exit status is 1 if anything fails, or if nothing could be compared.",
    )
    parser.add_argument("--device", help="the device, such as xpu:1 or cpu; default: the accelerator, or else the CPU")
    parser.add_argument("--disk-dir", metavar="DIR", help="the directory for the CPU's saved tensors")
    parser.add_argument("--no-link", action="store_true", help="do not measure the link rate")
    parser.add_argument("--only", metavar="TEXT", default="", help="run the cases whose names have this text")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases, and print a block of text for an issue. This is the command ``python -m torchoffload.selftest``.

    Each case runs twice without offloading and once with it, and has to come out the same, bit for bit. It takes some
    two minutes at most.

    Parameters
    ----------
    arguments : sequence of str, optional
        The arguments of the command line. Default: those of the process.

    Returns
    -------
    int
        The exit status: 1 if a case failed, or if none gave an answer; else 0.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    if is_disabled():
        parser.error("TORCHOFFLOAD_DISABLE=1 is set, so nothing would move: unset it")
    if not any(given.only in _title(case) for case in CASES):
        parser.error(f"no case has {given.only!r} in its name: {', '.join(_title(case) for case in CASES)}")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # of which cuBLAS wants one to compute the same twice
    try:
        device = _device(given.device)
    except (RuntimeError, ValueError) as error:
        parser.error(str(error).splitlines()[0])
    directory = given.disk_dir or default_disk_dir()
    if not os.path.isdir(directory):
        parser.error(f"there is no directory {directory!r}")
    began = time.perf_counter()
    found = info.collect(directory, measure_link=False)
    del found["link"]  # comes with the rates
    _print("```text", f"torchoffload.selftest on {device}, tier {'disk' if device.type == 'cpu' else 'host'}")
    _print(info.text(found), "cases, each compared with stock, bit for bit:")
    outcomes = _run_cases(device, directory, given.only)
    _print("rates:", *(["  not measured: not asked for"] if given.no_link else _rates(device, directory)))
    told = f"{outcomes['pass']} passed, {outcomes['FAIL']} failed, {outcomes['none']} gave no answer"
    _print(f"result: {told}; {time.perf_counter() - began:.0f} s", "```")
    return 1 if outcomes["FAIL"] or not outcomes["pass"] else 0


if __name__ == "__main__":
    sys.exit(main())
