"""zoo.py: torchoffload.fit on models that nobody tuned it for, as a user would call it, beside ways by hand.

    python benchmarks/zoo.py --amounts 0.0 0.3 0.7 --out zoo.json          # all models, one process each
    python benchmarks/zoo.py --models resnet lora --devices 2              # two, side by side on two devices

Each model runs in a process of its own, in the allocator's default settings. First the ways by hand are measured with
all of the device: each layer as it is, in a checkpoint, and every second one in a checkpoint, each of these also with
torchoffload moving the saved tensors. Then, for each amount of memory, the rest of the device is taken away by plain
allocations, so that PyTorch finds as much as on a smaller device; the ways by hand that have reserved no more run
again, the fastest first, until one has not run out of memory, and then ``fit`` is called with that amount and trains
like a user's loop, which ends at the first OutOfMemoryError. At the end, faster ways that have reserved a tenth more at
most are tried in each amount, too. Amount 0 is the least memory that a way by hand reserved, and 1 is what stock
reserved. Times are medians of steps with the optimizer, between events.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

import memory_history
import torchoffload
from ballast import Ballast
from hardware import command_line, hardware
from zoo_models import ZOO, make_zoo_model

GIB = 1 << 30
WAYS = ("stock", "half ac", "ac", "half ac, moved", "ac, moved", "stock, moved")
MOST_STEPS = 40
_MORE = 1.1  # a way that has reserved so much more with all of the device may do with less


class Training:
    """One model and its loop."""

    def __init__(self, name: str) -> None:
        self.made = make_zoo_model(name, "real", torch.device("cuda"))
        self.model = self.made.model
        self.step_count = 0

    def step(self, context: Any = None) -> float:
        """Forward under a context, backward, and the optimizer; returns the milliseconds that it took."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        with context or contextlib.nullcontext():
            loss = self.made.loss(self.step_count)
        loss.backward()
        if self.made.optimizer is not None:
            self.made.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        end.record()
        self.step_count += 1
        end.synchronize()
        return begin.elapsed_time(end)

    @contextlib.contextmanager
    def by_hand(self, way: str) -> Any:
        """Have the layers run in checkpoints."""
        layers = [] if way.startswith("stock") else self.made.layers[:: 2 if way.startswith("half") else 1]
        compiled = []
        for layer in layers:
            call = layer._compiled_call_impl
            if call is not None:  # a compiled call is what runs, so the checkpoint goes around it
                compiled.append((layer, call))
                layer._compiled_call_impl = torch._dynamo.disable(
                    functools.partial(torch_checkpoint.checkpoint, call, use_reentrant=False)
                )
            else:
                layer.forward = functools.partial(
                    torch_checkpoint.checkpoint, type(layer).forward.__get__(layer), use_reentrant=False
                )
        try:
            yield
        finally:
            for layer in layers:
                vars(layer).pop("forward", None)
            for layer, call in compiled:
                layer._compiled_call_impl = call

    def measure(self, way: str, steps: int) -> dict[str, Any] | None:
        """Measure a way by hand; None if it runs out of memory."""
        moves = way.endswith(", moved")
        context = torchoffload.OffloadActivations(model=self.model) if moves else None
        try:
            with self.by_hand(way):
                for _ in range(2 + moves):
                    self.step(context)
                return {"way": way, **self._measured(steps, context)}
        except torch.OutOfMemoryError:
            return None
        finally:
            self.model.zero_grad(set_to_none=True)
            torchoffload.trim()
            torch.cuda.empty_cache()

    def _measured(self, steps: int, context: Any = None) -> dict[str, float]:
        torch.cuda.reset_peak_memory_stats()
        taken = [self.step(context) for _ in range(steps)]
        return {
            "ms": statistics.median(taken),
            "peak_gib": torch.cuda.max_memory_allocated() / GIB,
            "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        }

    def fit(self, memory_gib: float, steps: int) -> dict[str, Any]:
        """Train under fit as a user does: the loop ends at the first error."""
        row: dict[str, Any] = {"way": "fit", "given_gib": memory_gib, "error": None}
        taken: list[float] = []
        reserved_gib: list[float] = []
        pinned_gib: list[float] = []
        fitted = None
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
        try:
            fitted = torchoffload.fit(self.model, int(memory_gib * GIB))
            for _ in range(MOST_STEPS):
                torch.cuda.reset_peak_memory_stats()
                taken.append(self.step())
                reserved_gib.append(round(torch.cuda.max_memory_reserved() / GIB, 3))
                pinned_gib.append(round(torchoffload.stats().pinned_bytes / GIB, 3))
                if fitted.phase in {"settled", "least memory"}:
                    break
            row["settled_after"] = len(taken) if fitted.phase in {"settled", "least memory"} else None
            for _ in range(2):  # as the ways by hand have it: the first steps of a plan map memory
                self.step()
            row |= self._measured(steps)
            row["predicted_ms"] = fitted.plan.predicted_s * 1e3 if fitted.plan is not None else None
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:400]}"
            row["trace"] = traceback.format_exc()[-4000:]
        row["first_ms"] = [round(each, 1) for each in taken]
        row |= {"first_reserved_gib": reserved_gib, "first_pinned_gib": pinned_gib}
        row["retries"] = torch.cuda.memory_stats()["num_alloc_retries"] - retries
        if fitted is not None:
            with contextlib.suppress(Exception):
                row["phase"], row["report"] = fitted.phase, fitted.report()
            fitted.remove()
        self.model.zero_grad(set_to_none=True)
        torchoffload.trim()
        torch.cuda.empty_cache()
        return row


def _best_by_hand(training: Training, rows: list[dict[str, Any]], steps: int) -> dict[str, Any] | None:
    """Measure ways by hand again, the fastest first, until one has not run out of memory; None if all have."""
    for row in sorted(rows, key=lambda each: each["ms"]):
        best = training.measure(row["way"], steps)
        if best is not None:
            return best
    return None


def run_model(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one model, in this process."""
    training, ballast = Training(name), Ballast()
    rows = []
    for way in options.ways:
        row = training.measure(way, options.steps)
        rows.append(row or {"way": way, "error": "out of memory with all of the device"})
        print(name, rows[-1], flush=True)
    ran = [row for row in rows if "ms" in row]
    low = min(row["reserved_gib"] for row in ran)
    high = max(row["reserved_gib"] for row in ran if row["way"] == ran[0]["way"])
    amounts = []
    for share in options.amounts:
        given = low + share * (high - low) + 0.02
        ballast.leave(given * GIB)
        best = _best_by_hand(training, [row for row in ran if row["reserved_gib"] <= given], options.steps)
        fitted = training.fit(given, options.steps)
        fitted["report"] = fitted.get("report") if options.reports else None
        amounts.append({"share": share, "given_gib": given, "best_by_hand": best, "fit": fitted})
        print(name, {key: value for key, value in fitted.items() if key != "report"}, best, flush=True)
        ballast.leave(None)
        if _as_it_was is not None:
            _as_it_was()
    # Ways that may run out of memory come last. PyTorch keeps the algorithm that cuDNN had room for, though it be slow:
    # after one such way a diffusion UNet took four times as long by every way.
    for each in amounts:
        best, given = each["best_by_hand"], each["given_gib"]
        most_ms = math.inf if best is None else best["ms"]
        ways = [row for row in ran if given < row["reserved_gib"] <= _MORE * given and row["ms"] < most_ms]
        ballast.leave(given * GIB)
        found = _best_by_hand(training, ways, options.steps)
        if found is not None and found["ms"] < most_ms:
            each["best_by_hand"] = found
        ballast.leave(None)
    return {"model": name, "by_hand": rows, "amounts": amounts, "hardware": hardware(torch.device("cuda"))}


def _restores_allocator() -> Any:
    """Return what puts the allocator's default back, since fit may have changed it; None if that cannot be had."""
    change = getattr(torch.cuda.memory, "_set_allocator_settings", None)
    return None if change is None else functools.partial(change, "expandable_segments:False")


_as_it_was = _restores_allocator()


def table(results: list[dict[str, Any]]) -> str:
    """Return the table of the docs: a line for each model and amount."""
    lines = [
        "| model | stock ms, GiB | given GiB | best by hand | fit ms | of the best | reserved GiB | settled after | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        if "amounts" not in result:
            lines.append(f"| {result['model']} | | | | | | | | {result['error']} |")
            continue
        stock = result["by_hand"][0]
        for each in result["amounts"]:
            best, fitted = each["best_by_hand"], each["fit"]
            by_hand = f"{best['ms']:.0f} ({best['way']})" if best else "none runs"
            ms = f"{fitted['ms']:.0f}" if "ms" in fitted else ""
            ratio = f"{fitted['ms'] / best['ms']:.2f}" if best and "ms" in fitted else ""
            reserved = f"{fitted.get('reserved_gib', 0):.1f}" if "ms" in fitted else ""
            lines.append(
                f"| {result['model']} | {stock.get('ms', 0):.0f}, {stock.get('reserved_gib', 0):.1f} "
                f"| {each['given_gib']:.1f} | {by_hand} | {ms} | {ratio} | {reserved} "
                f"| {fitted.get('settled_after', '')} | {fitted['error'] or ''} |"
            )
    return "\n".join(lines)


def _ends(text: str, length: int = 6000) -> str:
    """Return the first and the last part of a text: a crash is told in the first lines, an exception in the last."""
    return text if len(text) <= 2 * length else f"{text[:length]}\n...\n{text[-length:]}"


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure each model in a process of its own, as many at a time as there are devices."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    free: SimpleQueue[str] = SimpleQueue()
    for device in given.split(",") if given else map(str, range(options.devices)):
        free.put(device)

    def run(name: str) -> dict[str, Any]:
        device = free.get()
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "result.json")
            command = [sys.executable, __file__, "--child", name, "--out", str(out), "--steps", str(options.steps)]
            command += ["--amounts", *map(str, options.amounts), "--ways", *options.ways]
            command += ["--reports"] * options.reports
            if options.history is not None:
                options.history.mkdir(parents=True, exist_ok=True)
                command += ["--history", str(options.history / f"{name}.txt")]
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": device}
            try:
                done = subprocess.run(
                    command, env=environment, timeout=options.timeout_s, capture_output=True, text=True, check=False
                )
                output = f"{done.stdout[-6000:]}\n{_ends(done.stderr)}"
            except subprocess.TimeoutExpired as expired:
                output = f"{(expired.stdout or b'').decode()[-3000:]}\nended after {options.timeout_s} s"
            finally:
                free.put(device)
            result = json.loads(out.read_text()) if out.exists() else {"model": name, "error": output[-400:]}
        print(f"--- {name}\n{table([result])}", flush=True)
        return {**result, "output": output} if options.reports or "error" in result else result

    results: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.devices) as pool:
        for done in as_completed([pool.submit(run, name) for name in options.models]):
            results.append(done.result())
            if options.out is not None:  # after each model: a run of all of them takes long
                options.out.write_text(json.dumps({"command": command_line(), "results": results}, indent=1))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(ZOO), choices=list(ZOO), help="all if not given")
    parser.add_argument("--amounts", nargs="+", type=float, default=[0.0, 0.3, 0.7])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, help="the first one is stock")
    parser.add_argument("--steps", type=int, default=5, help="how many are timed")
    parser.add_argument("--devices", type=int, default=1, help="how many models run at a time, one on each")
    parser.add_argument("--timeout-s", type=float, default=300, help="for each model")
    parser.add_argument("--reports", action="store_true", help="keep what Fitted.report() says")
    parser.add_argument("--history", type=Path, help="a folder: what held the memory at each failed allocation")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        if options.history is not None:
            memory_history.record(options.history)
        try:
            result = run_model(options.child, options)
        except Exception:
            result = {"model": options.child, "error": traceback.format_exc()[-400:]}
        options.out.write_text(json.dumps(result))
        return
    print(table(run_all(options)))


if __name__ == "__main__":
    main()
