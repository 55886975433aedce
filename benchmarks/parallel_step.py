"""One training step under each kind of parallelism, without and with torchoffload, side by side and bit for bit.

    torchrun --standalone --nproc-per-node 2 benchmarks/parallel_step.py --json parallel.json
    torchrun --standalone --nproc-per-node 4 benchmarks/parallel_step.py --kind replicas

| kind | what runs |
|---|---|
| fsdp2 | `fully_shard` on each layer and on the model, a batch for each process |
| tensor | tensor parallelism through DTensor, with the sequence in shards where it can be |
| pipeline | a stage for each process, Schedule1F1B, the context around the whole step |
| replicas | the whole model in each process, nothing exchanged: all that the host's links have to carry at once |

A Llama-shaped model in bf16; no optimizer. First a few steps under deterministic algorithms each way, whose losses
and gradients are compared bit for bit; then plain and offloaded steps in turns, each from a barrier to the end of the
slowest process; then one under `torchoffload.profile()`, for the copies' rates. Before all that, what the host can do:
256 MiB copies of each process alone, and of all at once. On a CPU: `--tier disk` and a small shape; no memory there.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic algorithms; read as CUDA starts

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

import torchoffload
from hardware import command_line, hardware
from link import TOGETHER_COPY_COUNT, WAYS, copy_rate
from llama import Shape
from parallel_jobs import KINDS, Batch, Job, make_job
from pinned import Registered

MIB, GIB = 1 << 20, 1 << 30
LINK_BYTES = 256 * MIB
DEFAULT_SHAPE = Shape(hidden=2048, intermediate=8192, layers=16, heads=32, kv_heads=8, vocabulary=32000)
EXACT_STEPS = {"plain": 2, "offloaded": 4}  # the second one is timed, and what it taught holds from the third on
BIT_EQUAL, DIFFERENT, UNSTABLE = "bit-equal", "DIFFERENT", "not the same twice without it"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="One training step under each kind of parallelism, without and with torchoffload.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--kind", nargs="+", choices=list(KINDS), default=list(KINDS), help="in this order")
    for name, value in asdict(DEFAULT_SHAPE).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help="of the whole model")
    parser.add_argument("--batch", type=int, default=2, help="sequences of a process, or of a micro-batch")
    parser.add_argument("--tokens", type=int, default=4096, help="of a sequence")
    parser.add_argument("--micro-batches", type=int, default=4, help="of the pipeline")
    parser.add_argument(
        "--window-mib", type=int, default=None, help="both windows; chosen from what was seen if absent"
    )
    parser.add_argument("--tier", choices=["host", "disk"], default="host", help="disk is for a CPU")
    parser.add_argument("--warm-up", type=int, default=4, help="offloaded steps before the timed ones")
    parser.add_argument("--steps", type=int, default=5, help="timed steps each way")
    parser.add_argument("--json", type=Path, default=None, help="where hardware, versions and raw numbers go")
    return parser


def main() -> int:
    arguments = make_parser().parse_args()
    if "RANK" not in os.environ:
        raise SystemExit(
            "start this with torchrun: torchrun --standalone --nproc-per-node 2 benchmarks/parallel_step.py"
        )
    device = start(arguments.tier)
    try:
        shape = Shape(**{name: getattr(arguments, name) for name in asdict(DEFAULT_SHAPE)})
        results: dict[str, Any] = {
            "command": command_line(),
            "hardware": hardware(device),
            "processes": dist.get_world_size(),
            "link": link(device),
            "kinds": {},
        }
        for kind in arguments.kind:
            started = time.perf_counter()
            size = Batch(arguments.batch, arguments.tokens, arguments.micro_batches if kind == "pipeline" else 1)
            measured = measure(make_job(kind, shape, size, device), arguments, device)
            took = time.perf_counter() - started
            results["kinds"][kind] = {"shape": asdict(shape), "size": asdict(size), "seconds": took, **measured}
            free(device)
            if dist.get_rank() == 0:
                print(table(kind, results["kinds"][kind], results["link"]), flush=True)
                if arguments.json is not None:
                    arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    finally:
        dist.destroy_process_group()
    return 0 if all(verdict(each) == BIT_EQUAL for each in results["kinds"].values()) else 1


def start(tier: str) -> torch.device:
    """Join the processes that torchrun started, a GPU each, or with the disk tier on the CPU."""
    if tier == "disk":
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return torch.device("cpu")
    rank = int(os.environ["LOCAL_RANK"])
    if rank >= torch.cuda.device_count():
        raise SystemExit(
            f"parallel_step.py: {torch.cuda.device_count()} GPUs for more processes; on a CPU: --tier disk"
        )
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def free(device: torch.device) -> None:
    gc.collect()
    torchoffload.trim()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def gathered(value: Any) -> list[Any]:
    """What each process has."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# ---- what the host can do ----


def link(device: torch.device) -> dict[str, Any] | None:
    """Bytes a second of each process, alone and all at once, by way; None on a CPU."""
    if device.type != "cuda":
        return None
    host = {way: Registered(LINK_BYTES) for way in ("out", "in")}
    on_device = {way: torch.zeros(LINK_BYTES, dtype=torch.uint8, device=device) for way in ("out", "in")}

    def rates() -> dict[str, float]:
        tensors = {way: pinned.tensor for way, pinned in host.items()}
        return {way: copy_rate(way, LINK_BYTES, tensors, on_device, TOGETHER_COPY_COUNT) for way in WAYS}

    alone: dict[str, float] = {}
    for rank in range(dist.get_world_size()):
        dist.barrier()
        if rank == dist.get_rank():
            alone = rates()
    dist.barrier()
    together = rates()
    dist.barrier()
    for pinned in host.values():
        pinned.release()
    return {"alone": gathered(alone), "together": gathered(together)}


# ---- one kind ----


class Memory:
    """Device memory of a step over what it began with: at the end of each forward, the most, and the peak."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self._device = device
        self._base = 0
        self._after_forward = 0
        job.model.register_forward_hook(self._look)

    def _look(self, *_: object) -> None:
        if self._device.type == "cuda":
            self._after_forward = max(self._after_forward, torch.cuda.memory_allocated(self._device))

    def begin(self) -> None:
        """A step begins: what is allocated now does not count."""
        self._after_forward = 0
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._base = torch.cuda.memory_allocated(self._device)

    def end(self) -> dict[str, int | None]:
        """Tell what the step took; None on a CPU."""
        if self._device.type != "cuda":
            return {"after_forward_bytes": None, "peak_bytes": None}
        peak = torch.cuda.max_memory_allocated(self._device)
        return {"after_forward_bytes": self._after_forward - self._base, "peak_bytes": peak - self._base}


def measure(job: Job, arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Prove the gradients, then time steps in turns, then look at the copies."""
    window = None if arguments.window_mib is None else arguments.window_mib * MIB
    options = {"tier": arguments.tier, "offload_window_bytes": window, "reload_window_bytes": window}
    manager = torchoffload.get_act_offloading_ctx_manager(job.model, warn_if_no_head=False, **options)
    ways: dict[str, Callable[[], Any]] = {"plain": contextlib.nullcontext, "offloaded": lambda: manager}
    compared = compare(job, ways)
    memory = Memory(job, device)
    for _ in range(arguments.warm_up):
        timed(job, ways["offloaded"], memory, device)
    steps: dict[str, list[dict[str, Any]]] = {"plain": [], "offloaded": []}
    moved = []
    for _ in range(arguments.steps):
        for way, context in ways.items():
            before = torchoffload.stats().bytes_offloaded
            steps[way].append(timed(job, context, memory, device))
            if way == "offloaded":
                moved.append(torchoffload.stats().bytes_offloaded - before)
    mine = {
        "compared": compared,
        "steps": steps,
        "moved_bytes": moved,
        "copies": copies(job, ways["offloaded"], memory, device),
        "pinned_bytes": torchoffload.stats().pinned_bytes,
    }
    ranks = gathered(mine)
    return {"ranks": ranks}


def compare(job: Job, ways: dict[str, Callable[[], Any]]) -> str:
    """Whether losses and gradients of the first steps are the same, bit for bit."""
    expected: list[torch.Tensor] = []
    told = BIT_EQUAL
    # Not warn_only, which attention kernels take for leave to add in any order.
    torch.use_deterministic_algorithms(True)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        for way, context in ways.items():
            for _ in range(EXACT_STEPS[way]):
                losses = job.step(context)
                values = [value.cpu() for value in (*losses, *job.gradients())]
                job.zero_gradients()
                expected = expected or values
                if told == BIT_EQUAL and not all(map(torch.equal, values, expected)):
                    told = UNSTABLE if way == "plain" else DIFFERENT
    torch.use_deterministic_algorithms(False)
    return told


def timed(job: Job, context: Callable[[], Any], memory: Memory, device: torch.device) -> dict[str, Any]:
    """One step: its seconds on the slowest process, and this one's memory."""
    synchronize(device)
    dist.barrier()
    memory.begin()
    start_s = time.perf_counter()
    job.step(context)
    synchronize(device)
    own_s = time.perf_counter() - start_s
    used = memory.end()
    job.zero_gradients()
    return {"seconds": max(gathered(own_s)), **used}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copies(job: Job, context: Callable[[], Any], memory: Memory, device: torch.device) -> dict[str, Any] | None:
    """How fast the copies of one step were, each way; None where the tier tells no time."""
    with torchoffload.profile() as profile:
        timed(job, context, memory, device)
    if not profile.has_times:
        return None
    total = profile.total
    return {
        way: {"nbytes": each.nbytes, "bytes_per_s": each.bytes_per_s, "span_s": each.span_s}
        for way, each in (("out", total.out), ("in", total.back))
    }


# ---- the table ----


def verdict(measured: dict[str, Any]) -> str:
    """Equal bits prove nothing where nothing moved."""
    for told in (UNSTABLE, DIFFERENT):
        if any(each["compared"] == told for each in measured["ranks"]):
            return told
    return BIT_EQUAL if any(any(each["moved_bytes"]) for each in measured["ranks"]) else "NOTHING MOVED"


def table(kind: str, measured: dict[str, Any], links: dict[str, Any] | None) -> str:
    ranks = measured["ranks"]
    lines = [f"{kind}: {len(ranks)} processes, {verdict(measured)}, {measured['seconds']:.0f} s in all"]
    lines.append(f"{'rank':6}{'':12}{'step ms':>10}{'after forward':>16}{'peak':>12}{'moved':>12}")
    for rank, each in enumerate(ranks):
        for way, steps in each["steps"].items():
            step_ms = statistics.median(step["seconds"] for step in steps) * 1000
            held = [size_text(steps[-1][name]) for name in ("after_forward_bytes", "peak_bytes")]
            moved = size_text(each["moved_bytes"][-1]) if way == "offloaded" else ""
            lines.append(f"{rank:<6}{way:12}{step_ms:10.1f}{held[0]:>16}{held[1]:>12}{moved:>12}")
    if links is not None and all(each["copies"] for each in ranks):
        for way in ("out", "in"):
            reached = sum_text(each["copies"][way]["bytes_per_s"] for each in ranks)
            can = sum_text(each[way] for each in links["together"])
            lines.append(f"copies {way:4} GB/s: {reached}; 256 MiB copies of all at once: {can}")
    return "\n".join([*lines, ""])


def sum_text(rates: Iterable[float]) -> str:
    values = [rate / 1e9 for rate in rates]
    return f"{' + '.join(f'{value:.1f}' for value in values)} = {sum(values):.1f}"


def size_text(nbytes: int | None) -> str:
    if nbytes is None:
        return "-"
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.1f} MiB"


if __name__ == "__main__":
    sys.exit(main())
