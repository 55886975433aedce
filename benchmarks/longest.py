"""longest.py: the longest sequence that a Llama of the 8B shape trains in a given memory, in four ways, on one GPU.

    export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    python benchmarks/longest.py --out longest.json --picture longest.svg
    python benchmarks/longest.py --draw longest.json --picture longest.svg      # the picture alone

One sequence is the batch; weights, gradients and all else take bfloat16, and there is no optimizer. The process may
reserve no more than ``--gib``. The ways: each decoder layer in a checkpoint; the same, with the checkpoints' inputs
moved by torchoffload, and by TRL; and ``torchoffload.fit`` by itself. Each of them computes the same loss, in chunks of
tokens that backward computes again, so that the logits do not decide.

Two short lengths are run first. The most memory of the loss and that of the layers' backward are told apart, since both
grow in proportion, and the length that fits is reckoned from them. It is tried, and then longer or shorter ones, by 4%
at first. What is timed is one step, forward and backward, after a forward alone where that makes host memory ready.
With fit it is the fastest step after the survey; what it says that it needs decides what is tried next.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import math
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torchoffload
from hardware import command_line, hardware
from lengths import MOST_TOKENS, Bounds, Try, most_possible, row_of, search
from offloaders import OFFLOADERS, Options
from peers import CannotRun
from workloads import Workload, build_model, random_tokens

GIB = 1 << 30
PLAIN, MOVED, TRL, FIT = "checkpointing", "checkpointing, inputs moved", "TRL", "fit"
COLOURS = {PLAIN: "#8c8c8c", MOVED: "#67a9cf", TRL: "#d8b365", FIT: "#2166ac"}
EIGHT_B = {"hidden": 4096, "intermediate": 14336, "heads": 32, "kv_heads": 8, "vocabulary": 128_256}
SURVEY_STEPS = 3  # of fit, as a rule
ROOM_TO_SPARE = 0.995  # since what fit needs does not grow quite in proportion
FIT_SECONDS = 3  # times what the other ways may take: it needs several steps at each length
ROOM_FOR_FIT = 0.985  # of what there is beside weights: a length that does not fit shows after a whole survey only


class LlamaLoss(nn.Module):
    """A Llama that returns the loss of the tokens that follow, without the logits of all of them at once."""

    def __init__(self, llama: Any, chunk: int) -> None:
        super().__init__()
        self.llama, self.chunk = llama, chunk
        self.loss_went: Callable[[], None] | None = None  # called as the layers' backward begins

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens of one sequence; the mean over them."""
        hidden = self.llama.model(tokens).last_hidden_state
        loss_went = self.loss_went
        if loss_went is not None:
            hidden.register_hook(lambda _gradient: loss_went())
        following = F.pad(tokens[:, 1:], (0, 1), value=-100)
        chunks = zip(torch.split(hidden, self.chunk, 1), torch.split(following, self.chunk, 1), strict=True)
        sums = [checkpoint(self._sum, states, targets, use_reentrant=False) for states, targets in chunks]
        return torch.stack(sums).sum() / (tokens.numel() - 1)

    def _sum(self, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = F.linear(states, self.llama.lm_head.weight).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class Bench:
    """One model, and the lengths that are tried on it."""

    def __init__(self, options: argparse.Namespace, tried: Callable[[Try], None]) -> None:
        self.options, self.tried = options, tried
        self.device = torch.device(options.device)
        self.is_cuda = self.device.type == "cuda"
        shape = {name: getattr(options, name) for name in EIGHT_B}
        self.workload = Workload(layers=options.layers, batch=1, tokens=MOST_TOKENS, **shape)
        self.limit = int(options.gib * GIB)
        if self.is_cuda:
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.limit / total))
        torch.manual_seed(0)
        llama = build_model(self.workload, self.device, torch.bfloat16 if self.is_cuda else torch.float32)
        self.layers = list(llama.get_submodule("model.layers").children())
        self.model = LlamaLoss(llama, options.chunk).train()
        parameters = list(self.model.parameters())
        self.fixed = 2 * sum(each.numel() * each.element_size() for each in parameters)
        print(f"weights and gradients: {self.fixed / GIB:.2f} GiB of {options.gib:g}", flush=True)
        # On a CPU there is the disk tier alone, and what a small shape saves is small.
        self.moving: dict[str, Any] = {} if self.is_cuda else {"tier": "disk", "min_offload_size": 0}
        self.moved = torchoffload.OffloadActivations(model=self.model, **self.moving)
        self.known: dict[int, tuple[float, float]] = {}  # by length, the loss and the norm of the gradients
        self.longest_ready: dict[str, int] = {}  # to which length host memory was used
        self.deadline = math.inf

    def warm_up(self) -> None:
        """Have all kernels loaded, by a short sequence."""
        with self.checkpoints():
            self.step(min(self.options.first), Try(PLAIN, 0))
        self.give_back()

    @contextlib.contextmanager
    def checkpoints(self) -> Iterator[None]:
        """Have each decoder layer keep its input only."""
        for layer in self.layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        try:
            yield
        finally:
            for layer in self.layers:
                vars(layer).pop("forward", None)

    def context(self, way: str) -> AbstractContextManager[Any]:
        """Return what moves inputs. TRL's is a new one each time: a step that failed leaves it unusable."""
        if way == TRL:
            if not self.is_cuda:
                raise CannotRun("it needs CUDA")
            return OFFLOADERS["trl"].make(self.model.llama, Options(peers=self.options.peers))()
        return self.moved if way == MOVED else contextlib.nullcontext()

    def tokens(self, count: int) -> torch.Tensor:
        """Return the sequence of a length, the same one each time."""
        return random_tokens(replace(self.workload, tokens=count), self.device)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def give_back(self) -> None:
        """Free what a try has left: the next one must find what this one found."""
        gc.collect()
        if self.is_cuda:
            self.synchronize()
            torch.cuda.empty_cache()

    def step(self, count: int, found: Try, way: str = PLAIN, *, splits: bool = False) -> float:
        """Forward and backward, by what the layers are set up for. Returns the seconds; ``found`` gets the rest."""
        tokens = self.tokens(count)
        for parameter in self.model.parameters():
            parameter.grad.zero_()  # type: ignore[union-attr]
        peaks: list[int] = []

        def note_peak() -> None:
            peaks.append(torch.cuda.max_memory_allocated(self.device))
            torch.cuda.reset_peak_memory_stats(self.device)

        splits = splits and self.is_cuda
        self.model.loss_went = note_peak if splits else None
        context = self.context(way)
        self.synchronize()
        if splits:
            torch.cuda.reset_peak_memory_stats(self.device)
        began = time.perf_counter()
        with context:
            loss = self.model(tokens)
            if way == TRL:  # as in TRL's trainers
                loss.backward()
        if way != TRL:
            loss.backward()
        self.synchronize()
        taken = time.perf_counter() - began
        if splits:
            found.reserved_gib = torch.cuda.max_memory_reserved(self.device) / GIB
            note_peak()
            found.peaks_gib = tuple(each / GIB for each in peaks)
            found.peak_gib = max(found.peaks_gib)
        found.loss = loss.item()
        return taken

    def check(self, found: Try) -> None:
        """Compare loss and gradients with those of other ways; ValueError if they are not finite."""
        norms = [torch.linalg.vector_norm(each.grad, dtype=torch.float32) for each in self.model.parameters()]
        loss, norm = float(found.loss or 0), torch.stack(norms).norm().item()
        found.gradient_norm = norm
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise ValueError(f"{found.way}, {found.tokens} tokens: loss {loss}, norm of the gradients {norm}")
        other_loss, other_norm = self.known.setdefault(found.tokens, (loss, norm))
        found.is_same = loss == other_loss and math.isclose(norm, other_norm, rel_tol=0.01)
        if not found.is_same:
            print(f"DIFFERENT: loss {loss}, norm {norm}; in another way {other_loss}, {other_norm}", flush=True)

    def attempt(self, way: str, count: int, is_first: bool) -> Try:
        """Try a length."""
        found, began = Try(way, count, is_first), time.perf_counter()
        try:
            if way == FIT:
                self.run_fit(found, is_first)
            else:
                self.run_checkpointed(found)
            self.check(found)
            found.went = True
        except torch.OutOfMemoryError as error:
            found.why = str(error) if str(error).startswith("fit: ") else "out of memory"
        self.give_back()
        found.seconds = time.perf_counter() - began
        self.tried(found)
        return found

    def run_checkpointed(self, found: Try) -> None:
        """Run one step, after a forward alone if it takes more host memory than any before."""
        with self.checkpoints():
            if found.way != PLAIN and found.tokens > self.longest_ready.get(found.way, 0):
                self.longest_ready[found.way] = found.tokens
                with self.context(found.way):
                    self.model(self.tokens(found.tokens))
                self.give_back()
            found.step_s = self.step(found.tokens, found, found.way, splits=True)

    def run_fit(self, found: Try, is_first: bool) -> None:
        """Run steps until a plan is settled or time is up; the first lengths only in the least memory."""
        memory = "1B" if is_first else self.limit  # with a unit, since a bare 1 is refused
        fitted = torchoffload.fit(
            self.model, memory, margin=self.options.margin, on_unfit="warn" if is_first else "error", **self.moving
        )
        steps: list[tuple[str, float]] = []
        try:
            while fitted.phase not in {"settled", "least memory"} and len(steps) < self.options.steps:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore" if is_first else "default")
                    taken = self.step(found.tokens, found)
                steps.append((fitted.phase, taken))
                if len(steps) > SURVEY_STEPS + 1 and time.monotonic() + taken > self.deadline:
                    break
            if is_first:  # peaks are split once fit does not read them itself
                steps = [(fitted.phase, self.step(found.tokens, found, splits=True))]
            elif self.is_cuda:
                found.peak_gib = torch.cuda.max_memory_allocated(self.device) / GIB
                found.reserved_gib = torch.cuda.max_memory_reserved(self.device) / GIB
            found.step_s = min((taken for phase, taken in steps if phase != "survey"), default=steps[-1][1])
        finally:
            found.phase, found.steps_s = fitted.phase, tuple(taken for _, taken in steps)
            with contextlib.suppress(RuntimeError):  # before the survey is done
                needs = fitted.frontier(2)[0].memory_bytes
                room = (self.limit * (1 - self.options.margin) - self.fixed) * ROOM_TO_SPARE
                found.needs_gib = needs / GIB
                found.at_most = max(0, int(found.tokens * room / max(1, needs - self.fixed)))
                found.report = "" if is_first else fitted.report()
                if is_first and found.peaks_gib:  # what fit expects is what it decides by
                    found.peaks_gib = tuple(each * found.needs_gib / found.peak_gib for each in found.peaks_gib)
            fitted.remove()

    def run(self, way: str, common: int | None) -> list[Try]:
        """Search for the longest, and try ``common`` tokens; None: the longest itself."""
        options, is_fit = self.options, way == FIT
        seconds = options.seconds * (FIT_SECONDS if is_fit else 1)
        self.deadline = time.monotonic() + seconds
        steps = SURVEY_STEPS + 2 if is_fit else 1 if way == PLAIN else 1.3
        room = self.fixed + ROOM_FOR_FIT * (self.limit * (1 - options.margin) - self.fixed) if is_fit else self.limit
        bounds = Bounds(options.first, room / GIB, options.granule, options.tries, seconds, steps)
        tries = search(lambda count, is_first: self.attempt(way, count, is_first), bounds)
        if is_fit:  # the first lengths ran in the least memory, and not as fit would have them
            tries = [each for each in tries if not each.is_first]
        if common is not None and common <= most_possible(tries) and common not in {each.tokens for each in tries}:
            self.deadline = time.monotonic() + seconds
            tries.append(self.attempt(way, common, False))
        torchoffload.trim()
        self.give_back()
        return tries


def heading(shape: dict[str, Any], gib: float) -> str:
    """Name what was trained."""
    kind = "an 8B-shape Llama" if EIGHT_B.items() <= shape.items() else f"a Llama, {shape['hidden']} wide"
    return f"Longest sequence of {kind} ({shape['layers']} layers) in {gib:g} GiB"


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw a bar for each way."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no picture: matplotlib is not installed; --draw makes it from the JSON file elsewhere")
        return
    from matplotlib.figure import Figure

    rows = [row for row in document["rows"] if row["longest"]]
    with mpl.rc_context({"svg.hashsalt": "torchoffload", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(9.6, 0.9 + 0.62 * len(rows)), layout="constrained")
        axes = figure.subplots()
        bars = axes.barh(
            [row["way"] for row in rows], [row["longest"] for row in rows], color=[COLOURS[row["way"]] for row in rows]
        )
        axes.bar_label(bars, [_label(row) for row in rows], padding=4)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.85 * max((row["longest"] for row in rows), default=1))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("tokens")
        axes.set_title(heading(document["shape"], document["gib"]))
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _label(row: dict[str, Any]) -> str:
    more = " or more" if row["or_more"] else ""
    text = f"{row['longest']:,}{more}: {row['step_s']:.1f} s a step, {row['ms_a_1000_tokens']:.0f} ms per 1,000 tokens"
    if row.get("common", row["longest"]) != row["longest"]:
        text += f"\nat {row['common']:,}: {row['common_step_s']:.1f} s a step"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=40, help="what the process may reserve (%(default)s)")
    parser.add_argument("--layers", type=int, default=16, help="8B has 32 (%(default)s)")
    for name, default in EIGHT_B.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--ways", nargs="+", choices=tuple(COLOURS), default=tuple(COLOURS))
    parser.add_argument("--first", type=int, nargs=2, default=(8192, 16384), help="the two short lengths")
    parser.add_argument("--granule", type=int, default=2048, help="other lengths are multiples of this")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens whose logits are there at once")
    parser.add_argument("--common", type=int, help="tokens at which ways are compared; the longest that checkpoints go")
    parser.add_argument("--tries", type=int, default=4, help="for each way, after the short lengths")
    parser.add_argument(
        "--seconds", type=float, default=60, help=f"for each way; {FIT_SECONDS} times as much for fit (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=7, help="of fit at one length, if it has not settled by then")
    parser.add_argument("--margin", type=float, default=0.04, help="fit's; %(default)s is its default")
    parser.add_argument("--peers", type=Path, help="a directory with TRL's wheel")
    parser.add_argument("--device", default="cuda", help="cpu: to see that the program works; memory is no limit there")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--draw", type=Path, help="a file that --out wrote, for --picture; nothing is measured")
    options = parser.parse_args()
    if options.draw is not None:
        draw(json.loads(options.draw.read_text()), options.picture or options.draw.with_suffix(".svg"))
        return 0
    return measure(options)


def measure(options: argparse.Namespace) -> int:
    """Run all ways; what was found is written after each try."""
    all_tries: list[Try] = []
    rows: list[dict[str, Any]] = []
    shape = {"layers": options.layers, **{name: getattr(options, name) for name in EIGHT_B}}
    document: dict[str, Any] = {
        "command": command_line(), "hardware": hardware(torch.device(options.device)), "gib": options.gib,
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF"), "margin": options.margin, "shape": shape,
    }  # fmt: skip

    def write() -> None:
        if options.out is not None:
            tries = [asdict(each) for each in all_tries]
            options.out.write_text(json.dumps(document | {"rows": rows, "tries": tries}, indent=1) + "\n")

    def tried(found: Try) -> None:
        all_tries.append(found)
        outcome = f"{found.step_s:.2f} s a step, peak {found.peak_gib:.2f} GiB" if found.went else found.why
        print(f"{found.way}: {found.tokens:,} tokens: {outcome} ({found.seconds:.1f} s)", flush=True)
        write()

    bench, common, has_failed = Bench(options, tried), options.common, False
    bench.warm_up()
    for way in options.ways:
        try:
            bench.context(way)
        except (CannotRun, ImportError) as reason:
            print(f"{way}: left out: {reason}", flush=True)
            continue
        try:
            tries = bench.run(way, common)
        except Exception:  # the other ways are worth something without this one
            traceback.print_exc()
            has_failed = True
            continue
        if way == PLAIN and common is None:
            common = max((each.tokens for each in tries if each.went), default=None)
        rows.append(row_of(way, tries, options.granule, common))
        shown = {name: round(each, 3) if isinstance(each, float) else each for name, each in rows[-1].items()}
        print(shown, flush=True)
        write()
    if options.picture is not None:
        draw(document | {"rows": rows}, options.picture)
    return int(has_failed or any(each.is_same is False for each in all_tries))


if __name__ == "__main__":
    sys.exit(main())
