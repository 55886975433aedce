"""compiled.py: values that move inside of a compiled graph, beside PyTorch's own ways to take less memory.

    python benchmarks/compiled.py --out compiled.json        # A, B and C, each in a process of its own

The ways: the model compiled as a whole by PyTorch alone; ``activation_memory_budget`` at five values, which computes
again; each layer in a checkpoint and compiled by itself; and ours: compiled with ``compile_options()`` in a context
that moves all values, that learns, or that keeps all (a budget of 1 byte), and beside ``activation_memory_budget``.
Times are medians of forward and backward together. ``same_gradients`` compares bits with those of the compiled model,
which all ways must have that only move. ``compile_s`` is the time of the first step.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch.utils import checkpoint as torch_checkpoint

import torchoffload
from hardware import command_line, hardware
from subjects import Subject, make_subject

GIB = 1 << 30
BUDGETS = (0.8, 0.5, 0.3, 0.1, 0.0)


@dataclass
class Row:
    """The time and memory of one way. Memory in GiB; ``loss_gib`` without weights and gradients."""

    workload: str
    way: str
    step_ms: float
    loss_gib: float
    peak_gib: float
    moved_gib: float
    compile_s: float
    same_gradients: bool


class Bench:
    """One model, and the steps that are measured on it."""

    def __init__(self, workload: str, options: argparse.Namespace) -> None:
        self.workload, self.options = workload, options
        self.gradients: list[torch.Tensor] | None = None

    def measure(
        self, way: str, *, budget: float = 1.0, moves: bool = False, by_layer: bool = False, **context: Any
    ) -> Row:
        """Compile the model anew, warm up, and take the median and the peak of the timed steps."""
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        torch.manual_seed(0)
        subject = make_subject(self.workload, torch.device("cuda"))
        fixed_bytes = torch.cuda.memory_allocated()
        entered = torchoffload.OffloadActivations(model=subject.model, **context) if moves else contextlib.nullcontext()
        with torch._functorch.config.patch(activation_memory_budget=budget), _compiled(subject, moves, by_layer):
            began = time.perf_counter()
            self.step(subject, entered)
            torch.cuda.synchronize()
            compile_s = time.perf_counter() - began
            for _ in range(self.options.warm_up):
                self.step(subject, entered)
            torchoffload.reset_stats()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            events, loss_bytes = [], 0
            for _ in range(self.options.steps + 1):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                loss_bytes = self.step(subject, entered)
                end.record()
                events.append((begin, end))
            torch.cuda.synchronize()
        row = Row(
            self.workload, way, statistics.median(begin.elapsed_time(end) for begin, end in events[1:]),
            (loss_bytes - fixed_bytes) / GIB, torch.cuda.max_memory_allocated() / GIB,
            torchoffload.stats().bytes_offloaded / (self.options.steps + 1) / GIB, compile_s, self.is_same(subject),
        )  # fmt: skip
        print({name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(row).items()},
              flush=True)  # fmt: skip
        del subject
        torchoffload.trim()
        return row

    @staticmethod
    def step(subject: Subject, context: Any) -> int:
        """Run forward under a context, and backward, from gradients of zero; return the bytes at the loss."""
        torch._foreach_zero_([parameter.grad for parameter in subject.model.parameters()])
        with context:
            loss = subject.loss()
        loss_bytes = torch.cuda.memory_allocated()
        loss.backward()
        return loss_bytes

    def is_same(self, subject: Subject) -> bool:
        """Whether the gradients of the latest step are those of the first way, bit for bit."""
        gradients = [parameter.grad.cpu() for parameter in subject.model.parameters() if parameter.grad is not None]
        if self.gradients is None:
            self.gradients = gradients
        return all(torch.equal(a, b) for a, b in zip(self.gradients, gradients, strict=True))

    def all_ways(self) -> Iterator[Row]:
        """Measure each way; one that runs out of memory is left out."""
        ways: dict[str, dict[str, Any]] = {"stock compiled": {}}
        ways |= {f"budget {budget}": {"budget": budget} for budget in BUDGETS}
        ways["layers compiled, each in a checkpoint"] = {"by_layer": True}
        ways["ours, all moved"] = {"moves": True, "learn": False}
        ways["ours"] = {"moves": True}
        ways["ours, all kept"] = {"moves": True, "budget_bytes": 1}
        ways |= {f"ours, budget {budget}": {"moves": True, "budget": budget} for budget in BUDGETS[:3]}
        for way, keywords in ways.items():
            if self.options.ways and way not in self.options.ways:
                continue
            try:
                yield self.measure(way, **keywords)
            except torch.cuda.OutOfMemoryError:
                print(f"{self.workload}, {way}: out of memory", flush=True)


@contextlib.contextmanager
def _compiled(subject: Subject, moves: bool, by_layer: bool) -> Iterator[None]:
    """Have the model, or each of its layers in a checkpoint, compiled in place."""
    options = torchoffload.compile_options() if moves else None
    if not by_layer:
        subject.model.compile(options=options)
        yield
        return
    for layer in subject.layers:
        forward = torch.compile(type(layer).forward.__get__(layer), options=options)
        layer.forward = functools.partial(torch_checkpoint.checkpoint, forward, use_reentrant=False)
    yield


def _run_all(options: argparse.Namespace) -> None:
    """Measure each workload in a process of its own, and put their rows together."""
    rows: list[Any] = []
    for workload in options.workload:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "rows.json"
            command = [sys.executable, __file__, "--workload", workload, "--alone", "--out", str(path)]
            command += ["--steps", str(options.steps), "--warm-up", str(options.warm_up)]
            if options.ways:
                command += ["--ways", *options.ways]
            subprocess.run(command, check=False)
            if path.exists():
                rows += json.loads(path.read_text())
    if options.out is not None:
        document = {"command": command_line(), "hardware": hardware(torch.device("cuda")), "rows": rows}
        options.out.write_text(json.dumps(document, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="*", default=["A", "B", "C"], help="as in fit.py")
    parser.add_argument("--ways", nargs="*", help="only these ways; all if not given")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)  # one workload, in this process
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not options.alone:
        _run_all(options)
        return
    rows: list[Row] = []
    try:
        rows.extend(Bench(options.workload[0], options).all_ways())
    finally:
        if options.out is not None:
            options.out.write_text(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
