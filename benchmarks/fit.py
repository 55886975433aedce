"""fit.py: torchoffload.fit at several budgets, beside what can be made by hand, in one process.

    python benchmarks/fit.py --workload A --budgets 8 --out fit-A.json

The hand-made ways: each decoder layer as it is, in a checkpoint, every second one in a checkpoint, or in a selective
checkpoint that saves attention's outputs, or these and those of matrix products; each with and without torchoffload
moving what is saved. The budgets lie between the least memory and that of stock, as ``Fitted.frontier`` predicts them.
Times are medians of forward and backward together, of steps that follow each other as in training; ``alone_ms`` is that
of steps that begin on an idle device, where the host has no lead. ``best by hand`` is the fastest of the ways whose
allocated memory peaks no higher than that of fit, as measured or predicted. ``--cap`` leaves the process no more memory
than each budget, as on a device of that size, so that PyTorch's allocator has to give back what it caches; the ways by
hand are then measured once more under the same limit, the fastest first, until one has not run out of memory.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

import torchoffload
from ballast import Ballast
from hardware import command_line, hardware
from subjects import OTHER_SUBJECTS, make_subject

GIB = 1 << 30
aten = torch.ops.aten
SDPA = [
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
]
SELECTIVE = {"sac sdpa": SDPA, "sac mm+sdpa": [*SDPA, aten.mm.default, aten.addmm.default]}
WAYS = ("stock", "ac", "half ac", *SELECTIVE)


@dataclass
class Row:
    """What one way took. Memory in GiB; ``loss_gib`` without weights and gradients."""

    way: str
    step_ms: float
    alone_ms: float
    loss_gib: float
    peak_gib: float
    reserved_gib: float
    same_gradients: bool
    retries: float  # in a step: how often PyTorch's allocator gave back what it caches, for which the device waits
    budget_gib: float | None = None
    predicted_ms: float | None = None
    predicted_peak_gib: float | None = None
    settle_s: float | None = None  # until the plan was settled

    @property
    def allowed_gib(self) -> float:
        """The peak up to which a way by hand is compared with this one."""
        return max(self.peak_gib, self.predicted_peak_gib or 0.0)


class Bench:
    """One model, and the steps that are measured on it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device("cuda")
        torch.manual_seed(0)
        self.subject = make_subject(options.workload, self.device)
        self.model, self.layers = self.subject.model, self.subject.layers
        self.fixed_bytes = torch.cuda.memory_allocated()
        self.ballast = Ballast()
        self.gradients: list[torch.Tensor] | None = None
        self.loss_bytes = 0

    def step(self, context: Any) -> None:
        """Forward under a context, and backward."""
        with context:
            loss = self.subject.loss()
        self.loss_bytes = torch.cuda.memory_allocated() - self.fixed_bytes
        loss.backward()

    def clear(self) -> None:
        """Set the gradients to zero."""
        torch._foreach_zero_([parameter.grad for parameter in self.model.parameters()])

    def measure(self, way: str, context: Callable[[], Any], **more: Any) -> Row:
        """Some steps to warm up, then the median of the timed ones; the peak is that of the timed ones."""
        for _ in range(self.options.warm_up):
            self.clear()
            self.step(context())
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.clear()
        self.step(context())
        torch.cuda.reset_peak_memory_stats()
        retried = torch.cuda.memory_stats()["num_alloc_retries"]
        alone_ms, step_ms = self.time(context, waits=True), self.time(context, waits=False)
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        retries = (torch.cuda.memory_stats()["num_alloc_retries"] - retried) / (2 * self.options.steps + 1)
        row = Row(way, step_ms, alone_ms, self.loss_bytes / GIB, peak / GIB, reserved / GIB, self.is_same(), retries,
                  **more)  # fmt: skip
        print({name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(row).items()},
              flush=True)  # fmt: skip
        return row

    def time(self, context: Callable[[], Any], *, waits: bool) -> float:
        """The median time of some steps, which begin on an idle device or follow one that is left out."""
        events = []
        for number in range(self.options.steps + (not waits)):
            self.clear()
            if waits or number == 0:
                torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self.step(context())
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in events[not waits :])

    def is_same(self) -> bool:
        """Whether the gradients of the latest step are those of stock, bit for bit."""
        gradients = [parameter.grad for parameter in self.model.parameters()]
        if self.gradients is None:
            self.gradients = [gradient.cpu() for gradient in gradients]
        return all(torch.equal(a, b.cpu()) for a, b in zip(self.gradients, gradients, strict=True))

    @contextlib.contextmanager
    def by_hand(self, way: str, moves: bool) -> Iterator[None]:
        """Have the layers run in checkpoints."""
        for number, layer in enumerate(self.layers):
            if way == "stock" or (way == "half ac" and number % 2):
                continue
            options: dict[str, Any] = {"use_reentrant": False}
            if way in SELECTIVE:
                make = torch_checkpoint.create_selective_checkpoint_contexts
                if moves:
                    make = torchoffload.selective_checkpoint_context_fn
                options["context_fn"] = functools.partial(make, SELECTIVE[way])
            layer.forward = functools.partial(
                torch_checkpoint.checkpoint, type(layer).forward.__get__(layer), **options
            )
        try:
            yield
        finally:
            for layer in self.layers:
                vars(layer).pop("forward", None)

    def all_by_hand(self) -> Iterator[Row]:
        """Measure the hand-made ways."""
        for way in WAYS:
            for name in (way, f"{way}, moved"):
                if not self.options.ways or name in self.options.ways:
                    row = self.measure_by_hand(name)
                    if row is not None:
                        yield row

    def measure_by_hand(self, name: str, **more: Any) -> Row | None:
        """Measure one hand-made way; None if it runs out of memory."""
        way, comma, _ = name.partition(",")
        moves = bool(comma)
        context = torchoffload.OffloadActivations(model=self.model) if moves else contextlib.nullcontext()
        try:
            with self.by_hand(way, moves):
                return self.measure(name, lambda: context, **more)
        except torch.cuda.OutOfMemoryError:
            print(f"{name}: out of memory", flush=True)
            return None
        finally:
            torchoffload.trim()

    def best_in_the_same_memory(self, rows: list[Row]) -> Iterator[Row]:
        """Measure for each budget the fastest hand-made way once more, under the same limit."""
        by_hand = [row for row in rows if row.way != "fit"]
        for fitted in [row for row in rows if row.way == "fit"]:
            self.limit((fitted.budget_gib or 0) * GIB)
            possible = [row for row in by_hand if row.peak_gib <= fitted.allowed_gib]
            for row in sorted(possible, key=lambda each: each.step_ms):
                found = self.measure_by_hand(row.way, budget_gib=fitted.budget_gib)
                if found is not None:
                    yield found
                    break
        self.limit(None)

    def all_fitted(self) -> Iterator[Row]:
        """Measure fit at each budget."""
        fitted = torchoffload.fit(self.model, 1.0, margin=self.options.margin)
        self.run_until_settled(fitted)
        print(fitted.report(), flush=True)
        points = fitted.frontier(64)
        low, high = points[0].memory_bytes, points[-1].memory_bytes
        count = self.options.budgets
        budgets = [low + (high - low) * number // max(1, count - 1) for number in range(count)]
        for budget in [*(int(each * GIB) for each in self.options.gib), *budgets]:
            memory = int(budget / (1 - self.options.margin)) + 1
            began = time.perf_counter()
            self.limit(memory)
            try:
                fitted.replan(memory)
                self.run_until_settled(fitted)
                settle_s = time.perf_counter() - began
                plan = fitted.plan
                row = self.measure(
                    "fit", contextlib.nullcontext, budget_gib=memory / GIB, predicted_ms=plan.predicted_s * 1e3,
                    predicted_peak_gib=plan.predicted_peak_bytes / GIB, settle_s=settle_s,
                )  # fmt: skip
            except RuntimeError as error:
                print(f"{memory / GIB:.1f} GiB: {error}", flush=True)
                continue
            yield row
            if self.options.reports is not None:
                self.options.reports.mkdir(parents=True, exist_ok=True)
                name = f"{self.options.workload.partition(':')[0]}-{memory / GIB:.1f}"
                (self.options.reports / f"report-{name}.txt").write_text(f"{fitted.report()}\n")
                fitted.save(self.options.reports / f"plan-{name}.json")
        self.limit(None)
        fitted.remove()

    def limit(self, nbytes: float | None) -> None:
        """Leave the process so much memory, if that is wanted; None: all of the device."""
        if self.options.cap:
            self.ballast.leave(nbytes)

    def run_until_settled(self, fitted: torchoffload.Fitted) -> None:
        """Run steps until a plan is settled."""
        for _ in range(60):
            if fitted.phase in {"settled", "least memory"}:
                return
            self.clear()
            self.step(contextlib.nullcontext())
        raise RuntimeError(f"not settled after 60 steps: {fitted.report()}")


def compare(rows: list[Row]) -> list[dict[str, Any]]:
    """Each budget of fit beside the best way by hand with the same or less peak."""
    by_hand = [row for row in rows if row.way != "fit" and row.budget_gib is None]
    stock_ms = next((row.step_ms for row in by_hand if row.way == "stock"), None)
    table = []
    for row in rows:
        if row.way == "fit":
            possible = [each for each in by_hand if each.peak_gib <= row.allowed_gib]
            best = min(possible, key=lambda each: each.step_ms, default=None)
            capped = [each for each in rows if each.way != "fit" and each.budget_gib == row.budget_gib]
            table.append({
                "budget_gib": row.budget_gib, "fit_ms": row.step_ms, "peak_gib": row.peak_gib, "loss_gib": row.loss_gib,
                "of_stock": row.step_ms / stock_ms if stock_ms else None,
                "best_by_hand": best.way if best else None, "best_ms": best.step_ms if best else None,
                "of_best": row.step_ms / best.step_ms if best else None,
                "best_in_the_same_memory": capped[0].way if capped else None,
                "of_best_in_the_same_memory": row.step_ms / capped[0].step_ms if capped else None,
                "of_predicted": row.step_ms / row.predicted_ms,
                "within_budget": row.reserved_gib <= row.budget_gib,
            })  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workload",
        default="A",
        help=f"as in train_step.py, such as A or C:layers=2, or one of {', '.join(OTHER_SUBJECTS)}",
    )
    parser.add_argument("--budgets", type=int, default=8, help="how many between the least memory and that of stock")
    parser.add_argument("--gib", type=float, nargs="*", default=[], help="peaks in GiB to plan for besides")
    parser.add_argument("--margin", type=float, default=0.04)
    parser.add_argument("--ways", nargs="*", help="only these hand-made ways; all if not given")
    parser.add_argument("--cap", action="store_true", help="leave the process no more memory than each budget")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--reports", type=Path, help="a folder for what Fitted.report() says at each budget")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    bench = Bench(options)
    rows: list[Row] = []
    try:
        rows += bench.all_by_hand()
        for row in bench.all_fitted():
            rows.append(row)
        if options.cap:
            for row in bench.best_in_the_same_memory(list(rows)):
                rows.append(row)
    finally:
        table = compare(rows)
        for line in table:
            print({name: round(value, 3) if isinstance(value, float) else value for name, value in line.items()})
        if options.out is not None:
            document = {
                "command": command_line(), "hardware": hardware(bench.device), "workload": options.workload,
                "margin": options.margin, "rows": [asdict(row) for row in rows], "comparison": table,
            }  # fmt: skip
            options.out.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
