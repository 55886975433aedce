r"""What the hooks cost the CPU in a whole training step: microseconds a saved tensor, the mean over all of them.

    PYTHONPATH=build/gpu python3 benchmarks/hooks_in_step.py --json hooks-in-step.json          # after: make site
    python benchmarks/hooks_in_step.py --tier disk --min-offload-size 65536 \
        --workload A:hidden=256,intermediate=512,layers=2,tokens=256,heads=4,kv_heads=2,vocabulary=512

A step of the workload goes forward and backward plain, under empty Python hooks, and under torchoffload: as its
options are, and with ``learn=False``, where each tensor that may move does. They run in turns, one step each, and the
table has medians of the paired differences, divided by the saved tensors that ``stats()`` counts; beside it how many
moved, joined and stayed.

On CUDA the clock is the host's time to issue forward and backward, with the device idle at the start of each. It says
something while the host is ahead of the device and the device's queues have room: ``ahead`` tells in how many of the
timed passes the device was still computing when the host was through. Where stock's host time is near the device's own,
the queues were full; shorten the sequence then (``--workload A:batch=1,tokens=1024``). On the disk tier it is the CPU
time of the calling thread.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import torchoffload
from hardware import command_line, hardware
from workloads import build_model, parse_workload, random_tokens

STOCK, EMPTY, OURS, ALL_MOVE = "stock", "empty", "torchoffload", "torchoffload, learn=False"
WAYS = ("pack", "unpack")
CLASSES = ("handles", "records_offloaded", "records_deduplicated", "kept")


class Step:
    """One model, its tokens, and the contexts it trains under."""

    def __init__(self, text: str, tier: str, min_offload_size: int | None) -> None:
        self.workload = parse_workload(text)
        self.device = torch.device("cpu" if tier == "disk" else "cuda")
        torch.manual_seed(0)
        self.model = build_model(self.workload, self.device, torch.bfloat16)
        self.tokens = random_tokens(self.workload, self.device)
        options: dict[str, Any] = {"tier": tier, "min_offload_size": min_offload_size}
        self._contexts = {
            OURS: torchoffload.get_act_offloading_ctx_manager(self.model, **options),
            ALL_MOVE: torchoffload.get_act_offloading_ctx_manager(self.model, learn=False, **options),
        }

    def context(self, name: str) -> Any:
        """Return what the step runs under; torchoffload's lives through all steps."""
        if name == EMPTY:
            return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        return self._contexts.get(name) or contextlib.nullcontext()

    def run(self, name: str) -> dict[str, Any]:
        """Go forward and backward once: seconds of the host each way, and what was ahead."""
        clock = time.thread_time if self.device.type == "cpu" else time.perf_counter
        context = self.context(name)
        self._synchronize()
        start = clock()
        with context:
            loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        packed = clock() - start
        ahead = self._is_computing()
        forward = self._synchronize()
        start = clock()
        loss.backward()
        del loss
        unpacked = clock() - start
        ahead += self._is_computing()
        return {"pack": packed, "unpack": unpacked, "ahead": ahead, "device_s": forward + self._synchronize()}

    def count(self, name: str) -> dict[str, int]:
        """Return how many tensors of one step were saved, moved, joined another's record, and stayed."""
        torchoffload.reset_stats()
        self.run(name)
        seen = asdict(torchoffload.stats())
        seen["kept"] = sum(seen["records_kept"].values())
        return {name: seen[name] for name in CLASSES}

    def _is_computing(self) -> int:
        return int(self.device.type == "cuda" and not torch.cuda.current_stream(self.device).query())

    def _synchronize(self) -> float:
        start = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start


def measure(step: Step, repeats: int, warm_up: int) -> dict[str, Any]:
    """Take ``repeats`` steps of each kind in turns."""
    names = (STOCK, EMPTY, OURS, ALL_MOVE)
    for name in names:
        for _ in range(warm_up):
            step.run(name)
    counts = {name: step.count(name) for name in (OURS, ALL_MOVE)}
    gc.collect()
    gc.disable()
    taken = [{name: step.run(name) for name in names} for _ in tqdm(range(repeats), unit="turn")]
    gc.enable()
    return {"counts": counts, "steps": taken}


def rows_of(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """For each kind of hooks: microseconds a saved tensor over stock, medians of paired differences."""
    rows = []
    taken = measured["steps"]
    for name in (EMPTY, OURS, ALL_MOVE):
        counts = measured["counts"].get(name, {"handles": measured["counts"][OURS]["handles"]})
        row: dict[str, Any] = {"hooks": name, **counts}
        for way in WAYS:
            above = [turn[name][way] - turn[STOCK][way] for turn in taken]
            row[way] = statistics.median(above) * 1e6 / counts["handles"]
        row["ahead"] = sum(turn[name]["ahead"] for turn in taken)
        rows.append(row)
    return rows


def table(text: str, measured: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Lay the rows out, with what stock's step took the host and the device below."""
    taken = measured["steps"]
    passes = 2 * len(taken)
    lines = [
        f"workload {text}: us of the host a saved tensor, over stock",
        f"{'hooks':28}{'saved':>7}{'moved':>7}{'joined':>8}{'kept':>6}{'pack':>8}{'unpack':>8}{'ahead':>10}",
    ]
    for row in rows:
        cells = [row.get(name, "") for name in CLASSES]
        lines.append(
            f"{row['hooks']:28}{cells[0]:>7}{cells[1]:>7}{cells[2]:>8}{cells[3]:>6}"
            f"{row['pack']:8.2f}{row['unpack']:8.2f}{row['ahead']:>5} of {passes}"
        )
    host = [statistics.median(turn[STOCK][way] for turn in taken) * 1e3 for way in WAYS]
    left = statistics.median(turn[STOCK]["device_s"] for turn in taken) * 1e3
    lines.append(f"stock: {host[0]:.1f} + {host[1]:.1f} ms of the host, {left:.1f} ms more of the device")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="CPU cost of the saved-tensor hooks in a training step: microseconds a saved tensor, over stock.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--workload", default="A", help="as for train_step.py")
    parser.add_argument("--tier", choices=("host", "disk"), default="host", help="disk: a CPU, the disk tier")
    parser.add_argument("--min-offload-size", type=int, default=None, help="bytes; default: the tier's")
    parser.add_argument("--repeats", type=int, default=20, help="timed steps of each kind")
    parser.add_argument("--warm-up", type=int, default=6, help="steps of each kind before")
    parser.add_argument("--json", type=Path, default=None, help="where hardware, versions and raw numbers go")
    arguments = parser.parse_args()
    if arguments.repeats < 1 or arguments.warm_up < 1:
        raise SystemExit("hooks_in_step.py: --repeats and --warm-up are at least 1")
    if arguments.tier == "host" and not torch.cuda.is_available():
        raise SystemExit("hooks_in_step.py: there is no CUDA device; --tier disk measures on the CPU")
    try:
        step = Step(arguments.workload, arguments.tier, arguments.min_offload_size)
    except ValueError as error:
        raise SystemExit(f"hooks_in_step.py: {error}") from None
    measured = measure(step, arguments.repeats, arguments.warm_up)
    rows = rows_of(measured)
    print(table(arguments.workload, measured, rows))
    if arguments.json is not None:
        about = {"command": command_line(), "hardware": hardware(step.device), "workload": arguments.workload}
        arguments.json.write_text(json.dumps(about | {"rows": rows} | measured, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
