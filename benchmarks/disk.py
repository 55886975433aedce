"""Host memory, then a disk: our rates each way beside the disk's own, and a step with half of its bytes on the disk.

    python benchmarks/disk.py --directory /mnt/nvme --json disk.json
    python benchmarks/disk.py --directory /mnt/a /mnt/b --device cuda --gib 32
    python benchmarks/disk.py --device cpu --gib 0.25 --workload none       # the spill file of CPU tensors

**Rates.** In turns, once a round: a file is written and read past the page cache (O_DIRECT), by as many threads and in
pieces as large as ours; and a chain of operators is trained that saves as many bytes and computes next to nothing, with
little host memory. What counts is the ratio of the two rates, each way, of neighbours in time.

**A step.** The workload is trained with all that it moves in host memory, and with half of that, in turns. What counts
is the ratio of the medians. A GPU is needed for it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import torchoffload
from hardware import command_line, hardware
from workloads import Workload, build_model, parse_workload, random_tokens

MIB, GIB = 1 << 20, 1 << 30
THREADS_OF_A_DIRECTORY = 2  # as torchoffload has for each direction
PIECE_BYTES = 64 * MIB  # as large as our records
RECORD_BYTES = 64 * MIB
_LEAST_BYTES = 128 * MIB
MEMORY_BYTES = 1 * GIB  # of host memory, while rates are measured


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Rates of offloading to a disk beside the disk's own, and a step with half of its bytes there.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--directory", nargs="+", type=Path, default=[Path(tempfile.gettempdir())])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gib", type=float, default=16.0, help="how much is written and read in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workload", default="D", help="a name of workloads.py, with changes if wanted, or none")
    parser.add_argument("--steps", type=int, default=5, help="of each kind, after three that warm up")
    parser.add_argument("--json", "--out", type=Path, default=None, help="where hardware, versions and raw numbers go")
    return parser


# ---- the disk by itself ----


def _transfer(directory: Path, nbytes: int, piece_bytes: int, number: int) -> tuple[float, float]:
    """Write and read one file past the page cache; return the seconds of each."""
    buffer = mmap.mmap(-1, piece_bytes)  # at a page, as O_DIRECT wants it
    buffer.write(os.urandom(piece_bytes))
    path = directory / f"disk-benchmark-{os.getpid()}-{number}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    try:
        file = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:  # a file system in memory, or without O_DIRECT
        file = os.open(path, flags, 0o600)
    try:
        os.unlink(path)
        os.posix_fallocate(file, 0, nbytes)
        for _ in range(2):  # what is written for the first time may be slower, and later steps write over it
            begin = time.perf_counter()
            for offset in range(0, nbytes, piece_bytes):
                os.pwritev(file, [buffer], offset)
            out_s = time.perf_counter() - begin
        begin = time.perf_counter()
        for offset in range(0, nbytes, piece_bytes):
            os.preadv(file, [buffer], offset)
        return out_s, time.perf_counter() - begin
    finally:
        os.close(file)


def disk_rates(directories: list[Path], nbytes: int) -> dict[str, float]:
    """Bytes each second that all directories together write and read, by several threads at each."""
    places = [directory for directory in directories for _ in range(THREADS_OF_A_DIRECTORY)]
    piece_bytes = min(PIECE_BYTES, nbytes // len(places) // MIB * MIB)
    share = nbytes // len(places) // piece_bytes * piece_bytes
    with concurrent.futures.ThreadPoolExecutor(len(places)) as pool:
        seconds = list(pool.map(lambda place: _transfer(place[1], share, piece_bytes, place[0]), enumerate(places)))
    total_bytes = share * len(places)
    return {
        "bytes": total_bytes,
        "out_bytes_per_s": total_bytes / max(out_s for out_s, _ in seconds),
        "in_bytes_per_s": total_bytes / max(in_s for _, in_s in seconds),
    }


# ---- ours, where the disk is what takes the time ----


class Keeps(torch.autograd.Function):
    """Saves its input, and computes no more than its double."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Save and double ``x``."""
        ctx.save_for_backward(x)
        return x + x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Read what was saved."""
        (saved,) = ctx.saved_tensors
        return gradient + saved


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _options(device: torch.device, directories: list[Path], memory_bytes: int) -> dict[str, Any]:
    disk_dir = [str(directory) for directory in directories]
    if device.type != "cuda":
        return {"tier": "disk", "disk_dir": disk_dir}
    return {"on_full": "disk", "disk_dir": disk_dir, "budget_bytes": memory_bytes}


def our_rates(device: torch.device, directories: list[Path], nbytes: int) -> dict[str, float]:
    """Bytes each second that went to the disk in a forward, and came from it in the backward."""
    record_bytes = min(RECORD_BYTES, nbytes // 8)
    memory_bytes = min(MEMORY_BYTES, nbytes // 4)
    context = torchoffload.OffloadActivations(
        min_offload_size=0,
        learn=False,
        offload_window_bytes=4 * record_bytes,
        reload_window_bytes=4 * record_bytes,
        **_options(device, directories, memory_bytes),
    )
    x = torch.rand(record_bytes // 4, device=device).requires_grad_()
    torchoffload.reset_stats()
    _synchronize(device)
    begin = time.perf_counter()
    with context:
        y = x
        for _ in range(nbytes // record_bytes):
            y = Keeps.apply(y)
    _synchronize(device)
    out_s = time.perf_counter() - begin
    seen = torchoffload.stats()
    out_bytes = seen.bytes_spilled if device.type == "cuda" else seen.bytes_offloaded
    begin = time.perf_counter()
    y.backward(torch.ones_like(y))
    _synchronize(device)
    in_s = time.perf_counter() - begin
    seen = torchoffload.stats()
    in_bytes = seen.bytes_fetched if device.type == "cuda" else seen.bytes_reloaded
    return {
        "out_bytes": out_bytes,
        "in_bytes": in_bytes,
        "out_bytes_per_s": out_bytes / out_s,
        "in_bytes_per_s": in_bytes / in_s,
        "disk_waits": seen.disk_waits,
        "disk_wait_s": seen.disk_wait_s,
    }


def measure_rates(device: torch.device, directories: list[Path], nbytes: int, rounds: int) -> dict[str, Any]:
    """Measure the disk and ours in turns."""
    our_rates(device, directories, nbytes)  # takes the pinned memory, and makes the spill files
    measured = [
        {"disk": disk_rates(directories, nbytes), "ours": our_rates(device, directories, nbytes)} for _ in range(rounds)
    ]
    ratios = {
        way: statistics.median(each["ours"][way] / each["disk"][way] for each in measured)
        for way in ("out_bytes_per_s", "in_bytes_per_s")
    }
    return {"rounds": measured, "ratios": ratios}


# ---- a step with half of its bytes on the disk ----


def measure_step(device: torch.device, directories: list[Path], workload: Workload, count: int) -> dict[str, Any]:
    """Times of steps with all that moves in host memory, and with half of it on the disk, in turns."""
    torch.manual_seed(0)
    model = build_model(workload, device, torch.bfloat16)
    tokens = random_tokens(workload, device)

    def step(context: torchoffload.OffloadActivations) -> dict[str, Any]:
        model.zero_grad(set_to_none=False)
        torchoffload.reset_stats()
        _synchronize(device)
        begin = time.perf_counter()
        with context:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        _synchronize(device)
        seen = torchoffload.stats()
        return {
            "ms": 1e3 * (time.perf_counter() - begin),
            "loss": float(loss.detach()),
            "bytes_offloaded": seen.bytes_offloaded,
            "peak_slot_bytes": seen.peak_slot_bytes,
            "bytes_spilled": seen.bytes_spilled,
            "bytes_fetched": seen.bytes_fetched,
            "disk_waits": seen.disk_waits,
            "disk_wait_s": seen.disk_wait_s,
        }

    in_memory = torchoffload.OffloadActivations(model=model)
    warm = [step(in_memory) for _ in range(3)]
    half_bytes = warm[-1]["peak_slot_bytes"] // 2
    on_disk = torchoffload.OffloadActivations(model=model, **_options(device, directories, half_bytes))
    warm += [step(on_disk) for _ in range(3)]
    steps: dict[str, list[dict[str, Any]]] = {"in_memory": [], "half_on_disk": []}
    for _ in range(count):
        steps["in_memory"].append(step(in_memory))
        steps["half_on_disk"].append(step(on_disk))
    medians = {name: statistics.median(each["ms"] for each in timed) for name, timed in steps.items()}
    return {
        "budget_bytes": half_bytes,
        "warm_up": warm,
        "steps": steps,
        "median_ms": medians,
        "ratio": medians["half_on_disk"] / medians["in_memory"],
    }


# ---- what is printed ----


def rate_lines(rates: dict[str, Any]) -> list[str]:
    """Return a line for each round, and one with the ratios."""
    lines = [f"{'':>8}{'disk out':>12}{'ours out':>12}{'disk in':>12}{'ours in':>12}   GB/s"]
    for number, each in enumerate(rates["rounds"], start=1):
        cells = [each[who][way] / 1e9 for way in ("out_bytes_per_s", "in_bytes_per_s") for who in ("disk", "ours")]
        lines.append(f"round {number:<2}" + "".join(f"{cell:>12.2f}" for cell in cells))
    ratios = rates["ratios"]
    lines.append(f"ours / disk: {ratios['out_bytes_per_s']:.3f} out, {ratios['in_bytes_per_s']:.3f} in")
    return lines


def step_lines(step: dict[str, Any]) -> list[str]:
    """Return lines on the times of both kinds of step, and on what went to the disk."""
    medians, last = step["median_ms"], step["steps"]["half_on_disk"][-1]
    return [
        f"all in host memory {medians['in_memory']:.0f} ms, half on the disk {medians['half_on_disk']:.0f} ms: "
        f"{step['ratio']:.3f} of its time",
        f"  of the latest step {last['bytes_spilled'] / GIB:.2f} GiB were written and "
        f"{last['bytes_fetched'] / GIB:.2f} GiB read; {last['disk_waits']} waits, {last['disk_wait_s']:.3f} s",
    ]


def main() -> int:
    parser = make_parser()
    arguments = parser.parse_args()
    nbytes = int(arguments.gib * GIB) // _LEAST_BYTES * _LEAST_BYTES
    if nbytes < _LEAST_BYTES:
        parser.error(f"--gib is at least {_LEAST_BYTES / GIB}")
    if arguments.rounds < 1 or arguments.steps < 1:
        parser.error("--rounds and --steps are at least 1")
    device = torch.device(arguments.device)
    if arguments.workload != "none" and device.type != "cuda":
        parser.error("a step with half of its bytes on the disk needs a GPU: give --workload none")
    result: dict[str, Any] = {"command": command_line(), "hardware": hardware(device), "gib": nbytes / GIB}
    result["rates"] = measure_rates(device, arguments.directory, nbytes, arguments.rounds)
    print("\n".join(rate_lines(result["rates"])))
    if arguments.workload != "none":
        workload = parse_workload(arguments.workload)
        result["step"] = measure_step(device, arguments.directory, workload, arguments.steps)
        print("\n".join(step_lines(result["step"])))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
