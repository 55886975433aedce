"""A step that fits neither the device's memory nor the host's, but both and a disk.

    export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    python benchmarks/beyond_memory.py --directory /mnt/nvme --json beyond-memory.json
    python benchmarks/beyond_memory.py --workload A:batch=1,tokens=65536,checkpointed=1 --host-gib 2

One sequence is the batch; each decoder layer is a checkpoint that keeps its input, and the loss is computed in chunks
of tokens. The inputs stay on the device, or move to host memory as far as ``--host-gib`` goes, or move to host memory
and then on to the disk. The last way is run first, with all the memory of the device. What it reserved, and 1% more, is
then all that each of the three ways may reserve: the first two have to end in an out-of-memory error, and the third has
to fit. In the end the first one is run with all the memory of the device again, which tells what the step would take
with more memory. Then one step of both under ``torch.use_deterministic_algorithms(True)``, outside of which attention
sums in no fixed order, tells whether they have the same gradients, bit for bit. A GPU is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import torchoffload
from hardware import command_line, hardware
from longest import LlamaLoss
from workloads import build_model, parse_workload, random_tokens

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic algorithms; read as CUDA starts

GIB = 1 << 30
DEVICE, HOST, DISK = "all on the device", "host memory", "host memory, then disk"
MARGIN = 1.01  # of what the way with a disk reserved


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="A step that fits only with a disk: its time, and that of the same step with more memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--directory", nargs="+", type=Path, default=[Path(tempfile.gettempdir())])
    parser.add_argument("--workload", default="B:layers=8,batch=1,tokens=65536,checkpointed=1")
    parser.add_argument("--host-gib", type=float, default=1.0, help="how much host memory may be taken")
    parser.add_argument("--chunk", type=int, default=4096, help="how many tokens the loss is computed of at a time")
    parser.add_argument("--steps", type=int, default=2, help="of each way that fits")
    parser.add_argument("--json", "--out", type=Path, default=None, help="where hardware, versions and raw numbers go")
    return parser


class Bench:
    """The model, its sequence and the three ways."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device = torch.device("cuda")
        workload = replace(parse_workload(arguments.workload), batch=1)
        torch.manual_seed(0)
        self.model = LlamaLoss(build_model(workload, self.device, torch.bfloat16), arguments.chunk).train()
        self.tokens = random_tokens(workload, self.device)
        self.state_bytes = torch.cuda.memory_allocated(self.device)
        budget_bytes = int(arguments.host_gib * GIB)
        disk_dir = [str(directory) for directory in arguments.directory]
        host = torchoffload.OffloadActivations(model=self.model, budget_bytes=budget_bytes)
        disk = torchoffload.OffloadActivations(
            model=self.model, budget_bytes=budget_bytes, on_full="disk", disk_dir=disk_dir
        )
        self.ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
            DEVICE: contextlib.nullcontext,
            HOST: lambda: host,
            DISK: lambda: disk,
        }

    def step(self, way: str) -> dict[str, Any]:
        """Run forward and backward into zeroed gradients."""
        self.model.zero_grad(set_to_none=False)
        torchoffload.reset_stats()
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        began = time.perf_counter()
        with self.ways[way]():
            loss = self.model(self.tokens)
        loss.backward()
        torch.cuda.synchronize(self.device)
        seen = torchoffload.stats()
        return {
            "ms": 1e3 * (time.perf_counter() - began),
            "loss": loss.item(),
            "peak_bytes": torch.cuda.max_memory_allocated(self.device),
            "reserved_bytes": torch.cuda.max_memory_reserved(self.device),
            "bytes_offloaded": seen.bytes_offloaded,
            "bytes_spilled": seen.bytes_spilled,
            "bytes_fetched": seen.bytes_fetched,
            "disk_waits": seen.disk_waits,
            "disk_wait_s": seen.disk_wait_s,
        }

    def attempt(self, way: str, count: int) -> dict[str, Any]:
        """Run some steps of a way; what it leaves is freed before, so that it finds what the others found."""
        self.give_back()
        try:
            return {"way": way, "fits": True, "steps": [self.step(way) for _ in range(count)]}
        except torch.OutOfMemoryError as error:
            return {"way": way, "fits": False, "error": str(error).split(". ")[0]}

    def limit(self, nbytes: float) -> None:
        """Let the process reserve no more than that of the device's memory."""
        total_bytes = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total_bytes))

    def give_back(self) -> None:
        """Free what no step holds."""
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def gradients(self, way: str) -> list[torch.Tensor]:
        """Run a step in the deterministic mode; return copies of its gradients in host memory."""
        self.give_back()
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        try:
            self.step(way)
        finally:
            torch.use_deterministic_algorithms(False)
        return [parameter.grad.cpu() for parameter in self.model.parameters() if parameter.grad is not None]

    def are_gradients_the_same(self) -> bool:
        """Compare the gradients of the way with a disk and of the device alone, bit for bit."""
        pairs = zip(self.gradients(DISK), self.gradients(DEVICE), strict=True)
        return all(torch.equal(ours.view(torch.int16), right.view(torch.int16)) for ours, right in pairs)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Find what the way with a disk needs, give all ways that much, and run the first one with all there is."""
    bench = Bench(arguments)
    bench.attempt(DISK, 1)  # makes host memory and the spill files
    alone = bench.attempt(DISK, 1)
    if not alone["fits"]:
        raise SystemExit(f"{arguments.workload} does not fit in with a disk either: {alone['error']}")
    limit_bytes = MARGIN * alone["steps"][0]["reserved_bytes"]
    bench.limit(limit_bytes)
    attempts = [bench.attempt(way, arguments.steps) for way in (DEVICE, HOST, DISK)]
    bench.limit(torch.cuda.get_device_properties(bench.device).total_memory)
    more = bench.attempt(DEVICE, arguments.steps)
    same = bench.are_gradients_the_same() if more["fits"] else None
    return {
        "state_bytes": bench.state_bytes,
        "limit_bytes": int(limit_bytes),
        "host_bytes": int(arguments.host_gib * GIB),
        "attempts": attempts,
        "with_more_memory": more,
        "gradients_are_the_same": same,
    }


def lines(found: dict[str, Any]) -> list[str]:
    """Return a line for each way, and one on the gradients."""
    limits = f"{found['limit_bytes'] / GIB:.1f} GiB of the device, {found['host_bytes'] / GIB:g} GiB of host memory"
    verdict = {True: "identical", False: "DIFFERENT", None: "not compared"}[found["gradients_are_the_same"]]
    return [
        f"{limits}:",
        *map(_line, found["attempts"]),
        "all the memory of the device:",
        _line(found["with_more_memory"]),
        f"gradients with the disk and with all the memory: {verdict}",
    ]


def _line(attempt: dict[str, Any]) -> str:
    way = f"  {attempt['way']:<24}"
    if not attempt["fits"]:
        return way + "out of memory"
    steps = attempt["steps"]
    last = steps[-1]
    return (
        f"{way}{statistics.median(each['ms'] for each in steps):.0f} ms, peak {last['peak_bytes'] / GIB:.1f} GiB; "
        f"{last['bytes_spilled'] / GIB:.2f} GiB to the disk and {last['bytes_fetched'] / GIB:.2f} GiB from it, "
        f"waits of {last['disk_wait_s']:.2f} s"
    )


def main() -> int:
    parser = make_parser()
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.chunk < 1 or arguments.host_gib <= 0:
        parser.error("--steps and --chunk are at least 1, and --host-gib is more than 0")
    if not torch.cuda.is_available():
        parser.error("a GPU is needed: this is a comparison of what fits in its memory")
    found = measure(arguments)
    print("\n".join(lines(found)))
    if arguments.json is not None:
        told = {"command": command_line(), "hardware": hardware(torch.device("cuda")), **found}
        arguments.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0 if found["attempts"][-1]["fits"] and found["gradients_are_the_same"] is not False else 1


if __name__ == "__main__":
    sys.exit(main())
