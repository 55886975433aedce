"""What the machine can do: copies between host and device by size and direction, and what pinning memory costs.

    python benchmarks/link.py                       # less than half a minute
    python benchmarks/link.py --json link.json

Rates are of copies through memory pinned in two ways: registered, as torchoffload does it, and by PyTorch. Out is
device to host; both is the sum of the two ways at once. Copies are queued behind a kernel that sleeps, and timed by
events, so that what is measured is the copy engines and not the host. With several GPUs they then all copy at once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch

from hardware import command_line, hardware
from pinned import Pinned, Registered, pinned_by_pytorch

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
WAYS = ("out", "in", "both")
SIZES = [64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB]
BYTES_OF_ONE_TIMING = 512 * MIB
MOST_COPIES = 400  # what a stream's queue takes without making the host wait
REPEAT_COUNT = 3
SLEEP_CYCLES_PER_COPY = 60_000  # about 30 us: more than PyTorch takes to queue it
TOGETHER_SIZE = 256 * MIB
TOGETHER_COPY_COUNT = 64


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Rates of copies between host and device by size, and what pinning memory costs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--largest-mib", type=int, default=1024, help="the largest copy, and what is pinned for it")
    parser.add_argument("--json", type=Path, default=None, help="where hardware, versions and raw numbers go")
    return parser


def main() -> int:
    parser = make_parser()
    arguments = parser.parse_args()
    if arguments.largest_mib < 1:
        parser.error("--largest-mib is at least 1")
    if not torch.cuda.is_available():
        raise SystemExit("link.py: there is no CUDA device")
    measured = measure(torch.device("cuda", 0), arguments.largest_mib * MIB)
    measured["together"] = together(torch.cuda.device_count(), min(TOGETHER_SIZE, arguments.largest_mib * MIB))
    print(tables(measured))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"command": command_line(), **measured}, indent=1) + "\n")
    return 0


def measure(device: torch.device, largest_bytes: int) -> dict[str, Any]:
    """Pin, and copy every size each way, through both kinds of memory."""
    torch.cuda.set_device(device)
    torch.cuda.init()
    on_device = _device_buffers(device, largest_bytes)
    pinning, rates = [], []
    for memory, take in (("registered", Registered), ("pytorch", pinned_by_pytorch)):
        host: dict[str, Pinned] = {way: take(largest_bytes) for way in ("out", "in")}
        pinning += [{"memory": memory, "bytes": largest_bytes, "seconds": pinned.seconds} for pinned in host.values()]
        for size_bytes in [size for size in SIZES if size <= largest_bytes]:
            for way in WAYS:
                rate = copy_rate(way, size_bytes, {each: pinned.tensor for each, pinned in host.items()}, on_device)
                rates.append({"memory": memory, "size_bytes": size_bytes, "way": way, "bytes_per_s": rate})
        for pinned in host.values():
            if isinstance(pinned, Registered):
                pinned.release()
    return {"hardware": hardware(device), "pinning": pinning, "rates": rates}


def copy_rate(
    way: str, size_bytes: int, host: dict[str, torch.Tensor], on_device: dict[str, torch.Tensor], count: int = 0
) -> float:
    """Bytes a second of copies of one size, all ways of ``way`` at once: the median of some timings."""
    ways = ("out", "in") if way == "both" else (way,)
    count = count or max(4, min(MOST_COPIES, BYTES_OF_ONE_TIMING // size_bytes))
    streams = {each: torch.cuda.Stream() for each in ways}
    pairs = {each: _pairs(each, size_bytes, host[each], on_device[each]) for each in ways}
    seconds = []
    for _ in range(REPEAT_COUNT + 1):
        gate = torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(SLEEP_CYCLES_PER_COPY * count * len(ways))
        gate.record()
        ends = []
        for stream in streams.values():
            stream.wait_event(gate)
        for number in range(count):
            for each, stream in streams.items():
                target, source = pairs[each][number % len(pairs[each])]
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
        for stream in streams.values():
            ends.append(torch.cuda.Event(enable_timing=True))
            ends[-1].record(stream)
        torch.cuda.synchronize()
        seconds.append(max(gate.elapsed_time(end) for end in ends) / 1000)
    return len(ways) * count * size_bytes / statistics.median(seconds[1:])


def together(gpu_count: int, size_bytes: int) -> list[dict[str, Any]]:
    """All GPUs copy at once, a process each; empty for a single one."""
    if gpu_count < 2:
        return []
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(gpu_count)
    connections, processes = [], []
    for index in range(gpu_count):
        ours, theirs = context.Pipe()
        processes.append(
            context.Process(target=_copy_beside_others, args=(index, size_bytes, barrier, theirs), daemon=True)
        )
        processes[-1].start()
        connections.append(ours)
    rates = [connection.recv() if connection.poll(120) else {} for connection in connections]
    for process in processes:
        process.join(10)
    if not all(rates):
        raise SystemExit("link.py: a GPU's process did not answer")
    return [{"way": way, "size_bytes": size_bytes, "bytes_per_s": [each[way] for each in rates]} for way in WAYS]


def _copy_beside_others(index: int, size_bytes: int, barrier: Barrier, connection: Connection) -> None:
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    on_device = _device_buffers(device, size_bytes)
    host = {way: Registered(size_bytes) for way in ("out", "in")}
    tensors = {way: pinned.tensor for way, pinned in host.items()}
    rates = {}
    for way in WAYS:
        barrier.wait()
        rates[way] = copy_rate(way, size_bytes, tensors, on_device, TOGETHER_COPY_COUNT)
    barrier.wait()
    for pinned in host.values():
        pinned.release()
    connection.send(rates)


def _device_buffers(device: torch.device, nbytes: int) -> dict[str, torch.Tensor]:
    return {way: torch.zeros(nbytes, dtype=torch.uint8, device=device) for way in ("out", "in")}


def _pairs(
    way: str, size_bytes: int, host: torch.Tensor, on_device: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Targets and sources of one size, one after the other through both buffers."""
    whole = host.numel() // size_bytes
    blocks = list(zip(host.split(size_bytes)[:whole], on_device.split(size_bytes)[:whole], strict=True))
    return blocks if way == "out" else [(target, source) for source, target in blocks]


def tables(measured: dict[str, Any]) -> str:
    """Format what was measured."""
    memories = list(dict.fromkeys(row["memory"] for row in measured["rates"]))
    sizes = list(dict.fromkeys(row["size_bytes"] for row in measured["rates"]))
    rates = {(row["memory"], row["size_bytes"], row["way"]): row["bytes_per_s"] / 1e9 for row in measured["rates"]}
    lines = [
        f"{measured['hardware']['device']}: GB/s of copies through pinned memory",
        f"{'':10}" + "".join(f"{memory:>24}" for memory in memories),
        f"{'size':10}" + "".join(f"{way:>8}" for _ in memories for way in WAYS),
    ]
    for size in sizes:
        cells = [f"{rates[memory, size, way]:8.1f}" for memory in memories for way in WAYS]
        lines.append(f"{size_text(size):10}" + "".join(cells))
    for memory in memories:
        taken = [row for row in measured["pinning"] if row["memory"] == memory]
        parts = {
            part: statistics.fmean(row["seconds"][part] / (row["bytes"] / GIB) for row in taken)
            for part in taken[0]["seconds"]
        }
        text = " + ".join(f"{1000 * seconds:.0f} ms to {part}" for part, seconds in parts.items())
        lines.append(f"pinning a GiB, {memory}: {text}")
    for row in measured["together"]:
        each = [rate / 1e9 for rate in row["bytes_per_s"]]
        lines.append(
            f"{len(each)} GPUs at once, {row['way']}: {sum(each):.0f} GB/s ({min(each):.1f} to {max(each):.1f} each)"
        )
    return "\n".join(lines)


def size_text(nbytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes // KIB} KiB"


if __name__ == "__main__":
    sys.exit(main())
