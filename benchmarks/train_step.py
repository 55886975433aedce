"""One training step, forward and backward, under each offloader: time, memory, and the same gradients or not.

    python benchmarks/train_step.py                                  # workloads A and B
    python benchmarks/train_step.py --workload C --offloader none torchoffload
    python benchmarks/train_step.py --workload A:layers=4,tokens=2048 --json result.json
    python benchmarks/train_step.py --offloader torchoffload torchtune --peers wheels --at-memory-of torchtune

Each offloader runs in a process of its own, and the processes take turns on the device, so that what is compared was
measured side by side (``turns.py``). Each process first runs plain steps, then its first offloaded step, then proves
its gradients, then warms up, then is timed:

1. The proof: two steps under ``torch.use_deterministic_algorithms(True)``. Stock ("none", always run, always first)
   must agree with itself, and writes the loss and every gradient to a file; each other offloader is compared with that
   file, bit for bit. PyTorch's flash attention sums in no fixed order outside this mode, so stock could not agree with
   itself.
2. Timed steps in PyTorch's default mode, the one that people train in. The gradients are zeroed, and the device
   synchronised, between steps. Loss and gradient norm of each are compared with stock's, within a tolerance.

Memory is torch.cuda.memory_allocated() less weights and gradients: right after forward ("at loss"), and at the peak.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import figures
from hardware import command_line
from offloaders import OFFLOADERS, OURS, STOCK, Options
from table import text_table
from turns import MODES, Benchmark, Plan
from workloads import parse_workload

GIB = 1 << 30
DEFAULT_OFFLOADERS = [STOCK, OURS, "save_on_cpu"]  # what needs no package of others


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Time and memory of one training step under each offloader, gradients compared bit for bit.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--workload",
        nargs="+",
        default=["A", "B"],
        help="A, B, C or D, each with changes if wanted: A:layers=4,tokens=2048 (see workloads.py)",
    )
    parser.add_argument("--offloader", nargs="+", choices=list(OFFLOADERS), default=DEFAULT_OFFLOADERS)
    parser.add_argument(
        "--peers", type=Path, default=None, help="a directory with the peers' wheels, or with the packages unpacked"
    )
    parser.add_argument(
        "--at-memory-of",
        nargs="+",
        metavar="OFFLOADER",
        default=[],
        help="run torchoffload again, with windows at which it holds no more than this one at the loss and at the peak",
    )
    parser.add_argument(
        "--turns",
        choices=MODES,
        default="auto",
        help="who takes turns: all; pairs: each peer with stock and torchoffload; none; auto: what host memory allows",
    )
    parser.add_argument("--warm-up", type=int, default=3, help="steps before the timed ones; some learn for longer")
    parser.add_argument("--steps", type=int, default=5, help="timed steps, of which the median is taken")
    parser.add_argument(
        "--tier", choices=("host", "disk"), default="host", help="torchoffload's tier; disk: on the CPU"
    )
    parser.add_argument("--offload-window-mib", type=float, default=None, help="torchoffload's option, in MiB")
    parser.add_argument("--reload-window-mib", type=float, default=None, help="torchoffload's option, in MiB")
    parser.add_argument("--json", type=Path, default=None, help="where hardware, versions and raw numbers go")
    parser.add_argument(
        "--scratch", type=Path, default=None, help="directory for stock's gradients; default: /dev/shm if they fit"
    )
    parser.add_argument(
        "--patience-s", type=float, default=300, help="an offloader that is silent for longer has failed"
    )
    return parser


def main() -> int:
    parser = make_parser()
    arguments = parser.parse_args()
    try:
        workloads = {text: parse_workload(text) for text in arguments.workload}
    except ValueError as error:
        parser.error(str(error))
    plan = _plan(parser, arguments)
    if arguments.tier == "host" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --tier disk runs on the CPU")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to be deterministic
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # a time limit: keep what is known

    results: dict[str, Any] = {}

    def publish() -> None:
        if arguments.json is not None:
            arguments.json.write_text(json.dumps({"command": command_line(), "results": results}, indent=1) + "\n")

    for text, workload in workloads.items():
        with tempfile.TemporaryDirectory(prefix="torchoffload-bench-", dir=_scratch_directory(arguments)) as scratch:
            benchmark = Benchmark(text, workload, plan, Path(scratch))
            results[text] = {"workload": vars(workload), "offloaders": benchmark.runs, "notes": benchmark.notes}
            try:
                benchmark.measure(publish)
            finally:
                publish()
                print(text_table(text, results[text]), flush=True)
    return 1 if any(_failures(result["offloaders"]) for result in results.values()) else 0


def _failures(runs: figures.Runs) -> list[str]:
    """Stock's and torchoffload's rows that are not as they should be; what is wrong with a peer is a finding."""
    own = [name for name in runs if name.partition("@")[0] in (STOCK, OURS)]
    without_peer = {name for name in own if "@" in name and runs[name].get("error", "").startswith("cannot run")}
    return [name for name in own if name not in without_peer and not figures.is_right(runs[name], runs)]


def _plan(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Plan:
    chosen = list(dict.fromkeys([STOCK, *arguments.offloader]))
    for name in list(chosen):
        if OFFLOADERS[name].compared_with not in chosen:
            chosen.insert(chosen.index(name), OFFLOADERS[name].compared_with)
    for name in arguments.at_memory_of:
        if name in (STOCK, OURS) or name not in chosen or OURS not in chosen:
            parser.error(f"--at-memory-of {name}: {name} and torchoffload have to be among the offloaders, as two")
    if arguments.steps < 1 or arguments.warm_up < 1:
        parser.error("--steps and --warm-up are at least 1")
    if arguments.peers is not None and not arguments.peers.is_dir():
        parser.error(f"--peers: there is no directory {arguments.peers}")
    return Plan(
        offloaders=chosen,
        at_memory_of=arguments.at_memory_of,
        options=Options(
            tier=arguments.tier,
            offload_window_bytes=_bytes(arguments.offload_window_mib),
            reload_window_bytes=_bytes(arguments.reload_window_mib),
            peers=arguments.peers,
        ),
        warm_up_count=arguments.warm_up,
        step_count=arguments.steps,
        mode=arguments.turns,
        patience_s=arguments.patience_s,
    )


def _bytes(mib: float | None) -> int | None:
    return None if mib is None else int(mib * (1 << 20))


def _scratch_directory(arguments: argparse.Namespace) -> Path:
    """Where stock's gradients rest: in memory when at least 16 GiB are free there."""
    if arguments.scratch is not None:
        return arguments.scratch
    shared_memory = Path("/dev/shm")
    if shared_memory.is_dir() and shutil.disk_usage(shared_memory).free > 16 * GIB:
        return shared_memory
    return Path(tempfile.gettempdir())


if __name__ == "__main__":
    sys.exit(main())
