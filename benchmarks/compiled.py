r"""compiled.py: plans for compiled graphs, beside PyTorch's own ways to take less memory.

    python benchmarks/compiled.py --out compiled.json        # A, B and C, each in a process of its own
    python benchmarks/compiled.py --device cpu --steps 1 --warm-up 0 --ways "stock compiled" "ours, 0.5" \
        --workload A:hidden=64,intermediate=128,layers=1,batch=1,tokens=64,heads=4,kv_heads=2,vocabulary=64

The ways: the model compiled as a whole by PyTorch alone; ``activation_memory_budget`` at five values, which computes
again; each layer in a checkpoint and compiled by itself; ``compile_options()`` in a context that moves all values, that
learns, or that keeps all (a budget of 1 byte), and beside ``activation_memory_budget``; and plans:
``compile_options(memory=)`` at several parts of what stock compiled takes beside its weights and its batch, in a
context ("ours, 0.5"), and without moving ("ours, 0.5, kept or computed again"). "fit, 0.5" is ``fit()`` of the compiled
model in that memory and its gradients', with the rest of the device taken away, after the steps until it has settled;
one that runs out of memory is left out, as a user's loop would end.

The Llamas have no mask. Inside of a graph transformers makes one, as it cannot look whether the batch has padding, and
then attention computes all pairs of tokens instead of the causal half: ``--with-mask`` measures that.

Times are medians of forward and backward together. ``same_gradients`` compares bits with those of the compiled model,
which all ways must have that only move, and the plan for any memory. Gradients that the compiled model itself makes in
other bits from step to step, by atomic additions, are left out, and ``unsteady`` counts them; ``--deterministic`` has
PyTorch make none such, in other times. ``compile_s`` is the time of the first step. ``predicted_gib`` is the planned
peak with the gradients of the step before, which a plan does not count; ``predicted_ms`` and ``stock_ms`` are by the
assumed rates of the device. On a CPU no memory is measured, and values move to a disk. ``--trace`` writes a profile of
one more step of each way into a directory, and, on a GPU, the history of its memory.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import re
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
from ballast import Ballast
from hardware import command_line, hardware
from subjects import Subject, make_subject
from torchoffload._compile import planned

GIB = 1 << 30
BUDGETS = (0.8, 0.5, 0.3, 0.1, 0.0)
PARTS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2)
_STEPS_OF_FIT = 12  # it has settled then


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
    unsteady: int = 0
    memory_gib: float = 0.0
    predicted_gib: float = 0.0
    predicted_ms: float = 0.0
    stock_ms: float = 0.0


class Clock:
    """Times and memory of a device; on a CPU the memory is 0."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_cuda:
            torch.cuda.synchronize()

    def allocated(self) -> int:
        """Return the bytes that are allocated now."""
        return torch.cuda.memory_allocated() if self.on_cuda else 0

    def peak(self) -> int:
        """Return the most bytes that were allocated since ``reset``."""
        return torch.cuda.max_memory_allocated() if self.on_cuda else 0

    def reset(self) -> None:
        """Forget the peak."""
        self.synchronize()
        if self.on_cuda:
            torch.cuda.reset_peak_memory_stats()

    def now(self) -> Any:
        """Return this moment of the device's work."""
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_ms(self, begin: Any, end: Any) -> float:
        """Return the time between two moments, after ``synchronize``."""
        return begin.elapsed_time(end) if self.on_cuda else (end - begin) * 1e3


def _gradients(subject: Subject) -> list[torch.Tensor]:
    return [parameter.grad.cpu() for parameter in subject.model.parameters() if parameter.grad is not None]


def _latest_plan() -> Any:
    """Return the plan of the graph that was compiled last."""
    plans = [plan for notes in planned._noted.values() for plan in notes.plans]
    return plans[-1] if plans else None


class Bench:
    """One model, and the steps that are measured on it."""

    def __init__(self, workload: str, options: argparse.Namespace) -> None:
        self.workload, self.options = workload, options
        self.device = torch.device(options.device)
        self.clock = Clock(self.device)
        self.gradients: list[torch.Tensor | None] | None = None  # of the first way; None: it does not repeat its bits
        self.stock_bytes: tuple[int, int] | None = None  # the stock plan's predicted peak, and the weights of it

    def planned_bytes(self, part: float) -> int:
        """Return the memory for a plan: the weights and the batch, and a part of all else that stock compiled takes."""
        if self.stock_bytes is None:
            raise ValueError("the plan of stock compiled is not known yet")
        peak_bytes, fixed_bytes = self.stock_bytes
        return int(fixed_bytes + part * (peak_bytes - fixed_bytes))

    def measure(
        self, way: str, *, budget: float = 1.0, moves: bool = False, by_layer: bool = False, part: float | None = None,
        fits: bool = False, **context: Any,
    ) -> Row:  # fmt: skip
        """Compile the model anew, warm up, and take the median and the peak of the timed steps."""
        clock = self.clock
        torch._dynamo.reset()
        planned._noted.clear()
        gc.collect()  # the model of the former way is in cycles
        if clock.on_cuda:
            torch.cuda.empty_cache()
        torch.manual_seed(0)
        subject = make_subject(self.workload, self.device)
        if not self.options.with_mask:
            _without_mask(subject.model)
        gradients_bytes = sum(each.grad.nbytes for each in subject.model.parameters() if each.grad is not None)
        weights_bytes = sum(each.nbytes for each in (*subject.model.parameters(), *subject.model.buffers()))
        if not clock.on_cuda:
            context |= {"tier": "disk", "min_offload_size": 1024}
        entered = torchoffload.OffloadActivations(model=subject.model, **context) if moves else contextlib.nullcontext()
        memory = None if part is None else 1 << 50 if self.stock_bytes is None else self.planned_bytes(part)
        given = 0 if memory is None else memory + gradients_bytes
        compiles = _fitted(subject, given) if fits else _compiled(subject, moves or part is not None, by_layer, memory)
        # From a cache nothing is planned, so that nothing would be known about the plan.
        afresh = torch._inductor.config.patch(force_disable_caches=True)
        with torch._functorch.config.patch(activation_memory_budget=budget), afresh, compiles:
            began = time.perf_counter()
            self.step(subject, entered)
            clock.synchronize()
            compile_s = time.perf_counter() - began
            for _ in range(_STEPS_OF_FIT if fits else 0):
                self.step(subject, entered)
            plan = _latest_plan()
            if part is not None and self.stock_bytes is None:
                self.stock_bytes = plan.stock_peak_bytes, weights_bytes
            for _ in range(self.options.warm_up):
                self.step(subject, entered)
            if self.gradients is None:
                self.note_gradients(subject, entered)
            torchoffload.reset_stats()
            clock.reset()
            moments, loss_bytes = [], 0
            for _ in range(self.options.steps + 1):
                begin = clock.now()
                loss_bytes = self.step(subject, entered)
                moments.append((begin, clock.now()))
            clock.synchronize()
            moved_bytes = torchoffload.stats().bytes_offloaded / (self.options.steps + 1)
            peak_bytes = clock.peak()
            if self.options.trace is not None:
                self.trace(way, subject, entered, with_memory=clock.on_cuda and not by_layer)
        row = Row(
            self.workload, way, statistics.median(clock.between_ms(begin, end) for begin, end in moments[1:]),
            max(0, loss_bytes - weights_bytes - gradients_bytes) / GIB, peak_bytes / GIB, moved_bytes / GIB, compile_s,
            self.is_same(subject),
            sum(each is None for each in self.gradients or ()),
        )  # fmt: skip
        if memory is not None and memory < 1 << 50:
            row.memory_gib = given / GIB
        if plan is not None and memory is not None:
            row.predicted_gib = (plan.predicted_peak_bytes + gradients_bytes) / GIB
            row.predicted_ms, row.stock_ms = plan.predicted_s * 1e3, plan.stock_s * 1e3
            print("\n".join(planned.plan_lines()), flush=True)
        print({name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(row).items()},
              flush=True)  # fmt: skip
        del subject
        torchoffload.trim()
        return row

    def step(self, subject: Subject, context: Any) -> int:
        """Run forward under a context, and backward, from gradients of zero; return the bytes at the loss."""
        torch._foreach_zero_([parameter.grad for parameter in subject.model.parameters()])
        with context:
            loss = subject.loss()
        loss_bytes = self.clock.allocated()
        loss.backward()
        return loss_bytes

    def trace(self, way: str, subject: Subject, context: Any, *, with_memory: bool) -> None:
        """Write a profile of a step, and the history of the memory of another one, into the chosen directory.

        A history of a checkpoint's recomputation fails in PyTorch 2.11: it loses the exception that ends it early.
        """
        self.options.trace.mkdir(parents=True, exist_ok=True)
        path = self.options.trace / re.sub(r"[^a-z0-9.]+", "-", f"{self.workload}-{way}".lower())
        with torch.profiler.profile() as profile:
            self.step(subject, context)
            self.clock.synchronize()
        profile.export_chrome_trace(f"{path}.trace.json.gz")
        if with_memory:
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=1_000_000)
            self.step(subject, context)
            torch.cuda.memory._dump_snapshot(f"{path}.memory.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)

    def note_gradients(self, subject: Subject, context: Any) -> None:
        """Note the gradients of one more step of the first way, without those that differ in further ones."""
        self.step(subject, context)
        noted: list[torch.Tensor | None] = list(_gradients(subject))
        for _ in range(3):
            self.step(subject, context)
            for place, (first, other) in enumerate(zip(noted, _gradients(subject), strict=True)):
                noted[place] = first if first is not None and torch.equal(first, other) else None
        self.gradients = noted

    def is_same(self, subject: Subject) -> bool:
        """Whether the gradients of the latest step are those of the first way, bit for bit."""
        pairs = zip(self.gradients or (), _gradients(subject), strict=True)
        return all(first is None or torch.equal(first, latest) for first, latest in pairs)

    @staticmethod
    def ways() -> dict[str, dict[str, Any]]:
        """Return the keywords of ``measure`` for each way, in the order in which they are measured."""
        ways: dict[str, dict[str, Any]] = {"stock compiled": {}}
        ways |= {f"budget {budget}": {"budget": budget} for budget in BUDGETS}
        ways["layers compiled, each in a checkpoint"] = {"by_layer": True}
        ways["ours, all moved"] = {"moves": True, "learn": False}
        ways["ours"] = {"moves": True}
        ways["ours, all kept"] = {"moves": True, "budget_bytes": 1}
        ways |= {f"ours, budget {budget}": {"moves": True, "budget": budget} for budget in BUDGETS[:3]}
        ways["ours, planned for any memory"] = {"part": 1.0}
        ways |= {f"ours, {part}": {"moves": True, "learn": False, "part": part} for part in PARTS}
        ways |= {f"ours, {part}, kept or computed again": {"part": part} for part in PARTS}
        ways |= {f"fit, {part}": {"part": part, "fits": True} for part in PARTS}
        return ways

    def all_ways(self) -> Iterator[Row]:
        """Measure each way; one that runs out of memory is left out."""
        ways = self.ways()
        chosen = self.options.ways or list(ways)
        if any("part" in ways[way] for way in chosen):  # the others need what it predicts for stock compiled
            chosen = [*chosen, "ours, planned for any memory"]
        for way, keywords in ways.items():
            if way not in chosen:
                continue
            try:
                yield self.measure(way, **keywords)
            except torch.cuda.OutOfMemoryError as error:
                print(f"{self.workload}, {way}: {error}", flush=True)


def _without_mask(model: torch.nn.Module) -> None:
    """Have a model of transformers make no mask: its attention is causal then."""
    config = getattr(model, "config", None)
    if getattr(config, "_attn_implementation", None) == "sdpa":
        from transformers import AttentionInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        AttentionInterface.register("sdpa_without_mask", sdpa_attention_forward)  # for others, no mask is made
        config._attn_implementation = "sdpa_without_mask"


@contextlib.contextmanager
def _compiled(subject: Subject, is_ours: bool, by_layer: bool, memory: int | None) -> Iterator[None]:
    """Have the model, or each of its layers in a checkpoint, compiled in place, within ``memory`` bytes if given."""
    options = torchoffload.compile_options(memory=memory) if is_ours else None
    if not by_layer:
        subject.model.compile(options=options)
        yield
        return
    for layer in subject.layers:
        forward = torch.compile(type(layer).forward.__get__(layer), options=options)
        layer.forward = functools.partial(torch_checkpoint.checkpoint, forward, use_reentrant=False)
    yield


@contextlib.contextmanager
def _fitted(subject: Subject, given_bytes: int) -> Iterator[None]:
    """Have the model compiled and fitted, with the rest of the device taken away if that is a GPU."""
    ballast = Ballast()
    subject.model.compile()
    on_gpu = torch.cuda.is_available()
    fitted = torchoffload.fit(subject.model, given_bytes, tier="host" if on_gpu else "disk")
    try:
        if on_gpu:
            ballast.leave(given_bytes)
        yield
        print(fitted.report(), flush=True)
    finally:
        fitted.remove()
        if on_gpu:
            ballast.leave(None)


def _run_all(options: argparse.Namespace) -> None:
    """Measure each workload in a process of its own, and put their rows together."""
    rows: list[Any] = []
    for workload in options.workload:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "rows.json"
            command = [sys.executable, __file__, "--workload", workload, "--alone", "--out", str(path)]
            command += ["--steps", str(options.steps), "--warm-up", str(options.warm_up), "--device", options.device]
            command += ["--deterministic"] * options.deterministic + ["--with-mask"] * options.with_mask
            command += ["--trace", str(options.trace)] if options.trace is not None else []
            if options.ways:
                command += ["--ways", *options.ways]
            subprocess.run(command, check=False)
            if path.exists():
                rows += json.loads(path.read_text())
    if options.out is not None:
        document = {"command": command_line(), "hardware": hardware(torch.device(options.device)), "rows": rows}
        options.out.write_text(json.dumps(document, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="*", default=["A", "B", "C"], help="as in fit.py")
    parser.add_argument("--ways", nargs="*", help="only these ways; all if not given")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--deterministic", action="store_true", help="compare bits, and not times")
    parser.add_argument("--with-mask", action="store_true", help="as transformers compiles a Llama")
    parser.add_argument("--trace", type=Path, help="a directory for the profiles and the histories of the memory")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)  # one workload, in this process
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    known = Bench("", options).ways()
    if unknown := [way for way in options.ways or () if way not in known]:
        parser.error(f"no way {unknown[0]!r}: choose from {', '.join(known)}")
    if not options.alone:
        _run_all(options)
        return
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(mode=True)
    rows: list[Row] = []
    try:
        rows.extend(Bench(options.workload[0], options).all_ways())
    finally:
        if options.out is not None:
            options.out.write_text(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
