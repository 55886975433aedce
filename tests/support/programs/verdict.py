"""verdict.py: judges one program on one device: stock twice, then offloaded, and everything compared."""

import contextlib
import enum
import os
import re
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

import torch
from torch.testing._internal.two_tensor import TwoTensor

import torchoffload
from devices import Device
from gradients import Live, Run, execute, settled
from programs.interpreter import Interpreter
from programs.notes import Notes, plain_tensors
from programs.program import Program

STOCK_RUNS_AFTER_A_DIFFERENCE = 20
RUNS_TO_LEARN = 2  # before the one that is compared, where the program's contexts learn
SETTLE_TIMEOUT_S = 5.0  # for I/O under way to let go of what it touches
# Kept for these reasons, a byte was not to move: the rest is eligible. See docs/testing.md.
LEARNED = {"lives_on", "needed_soon", "tape_end", "small_copy"}
NOT_ELIGIBLE = {"parameter", "marked", "in_backward", "small", "layout", "tier_full", "device", *LEARNED}
# Where autograd says that a tensor which was written to came from.
_ORIGIN = re.compile(r", which is output \d+ of [\w:]+,")
_TEXT_LENGTH = 700
_WAY_LENGTH = 40


class Kind(enum.StrEnum):
    SAME = "same"
    DIFFERS = "differs"  # a value, a gradient, an error or what was alive
    LEAKS = "leaks"  # handles, records or slots outlive the program
    CRASHES = "crashes"  # the process ended, or the program hung
    UNSTABLE = "unstable"  # not the same twice without offloading: an error of the generator


@dataclass
class Verdict:
    """What came of one program."""

    seed: int
    device: str
    kind: Kind
    text: str = ""
    done: dict[str, int] = field(default_factory=dict)
    raised: dict[str, int] = field(default_factory=dict)
    finished: bool = False  # at least one backward reached a leaf
    renamed: int = 0  # errors that name another origin, which is known when nothing is dropped
    spared: bool = False  # without offloading autograd adds into a tensor of the program's; see docs/testing.md
    left_by_any_hooks: bool = False  # handles are left, and no more than other hooks leave
    moved_bytes: int = 0
    eligible_bytes: int = 0
    kept_bytes: dict[str, int] = field(default_factory=dict)
    wall_s: float = 0.0

    @property
    def is_failure(self) -> bool:
        return self.kind not in (Kind.SAME, Kind.UNSTABLE)

    def is_like(self, other: "Verdict") -> bool:
        """Fails in the same way: what a program that is cut down must go on doing."""
        return self.kind == other.kind and self._way() == other._way()

    def _way(self) -> list[str]:
        """Of a difference the kind of step and of error on both sides; numbers of steps and bytes left out.

        A run that fell over noted nothing: then its error alone.
        """
        lines = [re.sub(r"[\d.]+", "", line)[:_WAY_LENGTH] for line in self.text.splitlines()]
        fell_over = [line for line in self.text.splitlines() if line.startswith("other ['scope'")]
        return fell_over or lines

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def prepare_process() -> None:
    """One thread and fixed algorithms, as the suite has them: bits differ only where offloading made them differ."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(1)
    if os.environ.get("TORCHOFFLOAD_TESTING") == "1" and not torch.cuda.is_available():
        import private_device

        private_device.register()


Bits = list[tuple[str, Any]]


def run_once(
    program: Program,
    device: Device,
    *,
    stock: bool,
    watches_storages: bool = False,
    may_live: Collection[str] = (),
    knows_origins: bool = False,
    copies_gradients: bool = False,
    context: Callable[..., Any] | None = None,
) -> tuple[Bits, Notes | None]:
    """What a run saw, as bits, and the notes that they come from; None where the run itself fell over."""
    device.seed = program.seed
    notes: list[Notes] = []

    def interpret(run: Run) -> None:
        interpreter = Interpreter(program, run, None, watches_storages, may_live)
        interpreter.copies_gradients = copies_gradients
        with interpreter.knowing_origins() if knows_origins else contextlib.nullcontext():
            notes.append(interpreter.run_all())

    try:
        outcome = execute(interpret, device, stock=stock, context=context)
    except Exception as error:  # a race that only leaving the scope told of
        return [("scope", f"{type(error).__name__}: {error}")], None
    if not notes:
        return [("interpreter", outcome["exception"])], None
    return notes[0].bits(), notes[0]


def judge(program: Program, device: Device) -> Verdict:
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdict = _judge(program, device)
    verdict.wall_s = time.perf_counter() - began
    return verdict


def _judge(program: Program, device: Device, *, is_again: bool = False) -> Verdict:
    verdict = Verdict(program.seed, device.name, Kind.SAME)
    stock, notes = run_once(program, device, stock=True)
    again, watched = run_once(program, device, stock=True, watches_storages=True)
    if stock != again:
        stock, notes = run_once(program, device, stock=True)  # a kernel's first call in a process may round otherwise
    if notes is None or watched is None or stock != again:
        verdict.kind, verdict.text = Kind.UNSTABLE, first_difference(stock, again)
        return verdict
    verdict.done, verdict.raised = dict(notes.done), dict(notes.raised)
    verdict.finished = notes.finished_count > 0
    for _ in range(RUNS_TO_LEARN if program.learns else 0):
        run_once(program, device, stock=False)
    live = settled(Live.now(), timeout_s=0)  # what earlier programs have left for good
    torchoffload.reset_stats()
    offloaded, notes = run_once(
        program, device, stock=False, watches_storages=program.watches_storages, may_live=watched.alive
    )
    stats = torchoffload.stats()
    verdict.moved_bytes, verdict.kept_bytes = stats.bytes_offloaded, dict(stats.bytes_kept)
    kept_bytes = sum(count for reason, count in stats.bytes_kept.items() if reason not in NOT_ELIGIBLE)
    verdict.eligible_bytes = stats.bytes_offloaded + kept_bytes
    if offloaded != stock:
        verdict.renamed = renamed(stock, offloaded)
        is_same = verdict.renamed and same_where_origins_are_known(program, device)
        if not is_same and notes is not None and watched.shared_gradient_count:
            is_same = verdict.spared = same_where_gradients_are_copied(program, device)
        if not is_same:
            verdict.kind, verdict.text = Kind.DIFFERS, first_difference(stock, offloaded)
            # Without offloading, too, some programs are seldom otherwise: this one may have been the same by chance.
            for _ in range(STOCK_RUNS_AFTER_A_DIFFERENCE if device.name == "cuda" else 0):
                again, _ = run_once(program, device, stock=True)
                if again != stock:
                    verdict.kind, verdict.text = Kind.UNSTABLE, first_difference(stock, again)
                    break
            return verdict
    if notes is None:
        raise AssertionError("a run that fell over has other bits than one that did not")
    if not set(notes.alive) <= set(watched.alive):
        # Less than stock's may live: a moved tensor breaks cycles through the graph.
        verdict.kind, verdict.text = Kind.LEAKS, f"storages of {notes.alive} are left, not {watched.alive}"
    # Where a storage outlives it, stock itself keeps graphs for ever.
    elif not watched.alive and (left := settled(live, SETTLE_TIMEOUT_S)) != live:
        if astuple(left) < astuple(live):  # what an earlier run had left has gone meanwhile: once more
            return verdict if is_again else _judge(program, device, is_again=True)
        verdict.left_by_any_hooks = left.handles - live.handles <= handles_left_by_other_hooks(program, device)
        if not verdict.left_by_any_hooks:
            verdict.kind, verdict.text = Kind.LEAKS, f"{left} is left, not {live}"
    return verdict


class _Box:
    """What a pack of other hooks returns; `handles` are ours that it stands for: a wrapper's parts have their own."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self.handles = 1 + (len(list(plain_tensors(tensor))) if isinstance(tensor, TwoTensor) else 0)


def handles_left_by_other_hooks(program: Program, device: Device) -> int:
    """How many saved tensors outlive the program under hooks that do nothing but detach.

    A custom Function's forward may save a view of its input, made there. Such a view requires a gradient by its base
    alone, and no gradient accumulates for it. Any hooks make autograd unpack it as a leaf of its own, which under
    create_graph gets a ``.grad`` whose graph leads back to it, and which nobody can clear: PyTorch's cycle of a leaf.
    """
    boxes: weakref.WeakSet[_Box] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> _Box:
        box = _Box(tensor)
        boxes.add(box)
        return box

    before = settled(Live.now(), timeout_s=0)
    run_once(
        program,
        device,
        stock=False,
        context=lambda **options: torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor),
    )
    of_noop_managers = settled(before, timeout_s=0).handles - before.handles
    return sum(box.handles for box in boxes) + of_noop_managers


def renamed(stock: Bits, offloaded: Bits) -> int:
    """How many errors name another origin, where nothing else differs; else 0.

    Without offloading the graph holds the program's own tensor, and knows what it comes from now. With it, a tensor
    that was changed in place and then dropped took that name with it; and what a backward saves for a second one is the
    tensor that it unpacked, which is not the program's own, and comes from where that came from at its save. What a
    checkpoint saves is read outside of backward where no node says whose it is.
    """
    differing = [(mine, theirs) for mine, theirs in zip(stock, offloaded, strict=False) if mine != theirs]
    if len(stock) != len(offloaded):
        return 0
    for (my_step, mine), (their_step, theirs) in differing:
        are_texts = isinstance(mine, str) and isinstance(theirs, str)
        if my_step != their_step or not are_texts or _ORIGIN.sub("", mine) != _ORIGIN.sub("", theirs):
            return 0
    return len(differing)


def same_where_origins_are_known(program: Program, device: Device) -> bool:
    """Every text, too, must be stock's where no tensor dies, no backward makes a graph, and nothing is read."""
    stock, _ = run_once(program, device, stock=True, knows_origins=True)
    offloaded, _ = run_once(program, device, stock=False, knows_origins=True)
    return stock == offloaded


def same_where_gradients_are_copied(program: Program, device: Device) -> bool:
    """All must be stock's where each ``.grad`` gets memory of its own after the backward that made it.

    A backward that returns what was saved, by way of a view, gives a leaf a ``.grad`` on the memory of what was saved.
    Without offloading that is the program's, and the next backward adds into it; with it, it is a reloaded copy.
    """
    stock, _ = run_once(program, device, stock=True, copies_gradients=True)
    offloaded, _ = run_once(program, device, stock=False, copies_gradients=True)
    return stock == offloaded


def first_difference(expected: list[tuple[str, Any]], actual: list[tuple[str, Any]]) -> str:
    for mine, theirs in zip(expected, actual, strict=False):
        if mine != theirs:
            return f"stock {_short(mine)}\nother {_short(theirs)}"
    return f"{len(expected)} notes, not {len(actual)}; the next: {_short((expected + actual)[-1:])}"


def _short(note: Any) -> str:
    def shown(value: Any) -> Any:
        if isinstance(value, bytes):
            return f"<{len(value)} bytes {hash(value) & 0xFFFF:04x}>"
        return [shown(each) for each in value] if isinstance(value, list | tuple) else value

    text = repr(shown(note))
    return text if len(text) <= _TEXT_LENGTH else text[:_TEXT_LENGTH] + "..."


def total(verdicts: list[Verdict]) -> dict[str, Any]:
    """The summary of many: what CI asserts and the command prints."""
    kept: Counter[str] = Counter()
    done: Counter[str] = Counter()
    raised: Counter[str] = Counter()
    for verdict in verdicts:
        kept.update(verdict.kept_bytes)
        done.update(verdict.done)
        raised.update(verdict.raised)
    count = max(len(verdicts), 1)
    eligible_bytes = sum(verdict.eligible_bytes for verdict in verdicts)
    moved_bytes = sum(verdict.moved_bytes for verdict in verdicts)
    return {
        "programs": len(verdicts),
        "kinds": dict(Counter(str(verdict.kind) for verdict in verdicts)),
        "finished_fraction": sum(verdict.finished for verdict in verdicts) / count,
        "renamed": sum(verdict.renamed for verdict in verdicts),
        "spared": sum(verdict.spared for verdict in verdicts),
        "left_by_any_hooks": sum(verdict.left_by_any_hooks for verdict in verdicts),
        "moved_bytes": moved_bytes,
        "eligible_bytes": eligible_bytes,
        "moved_fraction": moved_bytes / max(eligible_bytes, 1),
        "kept_bytes": dict(kept.most_common()),
        "raised": dict(raised.most_common()),
        "done": dict(done.most_common()),
    }
