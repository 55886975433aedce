"""The parent: which processes run when, so that what is compared was measured side by side.

Ratios are taken between offloaders that took turns on the device, step by step, within minutes: a lineup. With
``pairs`` a lineup is one peer with stock and torchoffload, with ``all`` everything is in one, with ``none`` each
offloader runs by itself. While others run, a process sits still: it keeps its pinned memory, and the device's too if
all fit.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

import figures
from child import PLAIN_STEP_COUNT, VERIFIED_STEP_COUNT
from offloaders import OFFLOADERS, OURS, STOCK, Options
from worker import Worker, WorkerFailed
from workloads import Workload

GIB = 1 << 30
PROCESS_BYTES = GIB  # of the device, beside what PyTorch's allocator holds: CUDA's context, and kernels
MODES = ("auto", "all", "pairs", "none")
SEARCH_STEP_COUNT = 3  # of one try: torchoffload's third step goes by what it learned, and is looked at
SEARCH_TRY_COUNT = 6
SEARCH_MARGIN = 1 / 64  # of the first window, taken off beside what was over: memory moves in whole records

Run = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What is measured, and how: the command line's options."""

    offloaders: list[str]
    at_memory_of: list[str]
    options: Options
    warm_up_count: int
    step_count: int
    mode: str
    patience_s: float


class Benchmark:
    """One workload under all offloaders. ``runs`` is what was measured, by row; ``notes`` what a reader has to know."""

    def __init__(self, text: str, workload: Workload, plan: Plan, scratch: Path) -> None:
        self.runs: dict[str, Run] = {}
        self.notes: list[str] = []
        self._text, self._workload, self._plan, self._scratch = text, workload, plan, scratch
        self._workers: dict[str, Worker] = {}
        self._short = text.partition(":")[0]
        self._begun: set[str] = set()  # workers that hold a model
        self._progress = tqdm(total=self._planned_step_count(), unit="step", mininterval=1, desc=self._short)

    def measure(self, publish: Callable[[], None]) -> None:
        """Run everything; ``publish`` is called whenever more is known."""
        try:
            if self._plan.mode != "none":
                self._start(self._plan.offloaders)
            if not self._get_ready(STOCK):
                self._note("stock failed or does not agree with itself; nothing can be compared")
                return
            mode = self._mode()
            lineups = _lineups(self._plan, mode)
            for number, lineup in enumerate(lineups):
                ready = [run for run in lineup if self._get_ready(run, gives_pinned=mode == "none")]
                self._take_turns(number, ready)
                self._end(set(self._workers) - {_offloader(run) for later in lineups[number + 1 :] for run in later})
                publish()
        except BaseException:
            for worker in self._workers.values():
                worker.kill()
            raise
        finally:
            self._progress.close()
            self._end(set(self._workers))

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self._progress.write(f"{self._text}: {text}", file=sys.stderr)

    # Processes

    def _start(self, names: list[str]) -> None:
        for name in names:
            options = self._plan.options
            self._workers[name] = Worker(name, self._workload, options, self._plan.patience_s)

    def _end(self, names: set[str]) -> None:
        for name in names:
            self._workers.pop(name).stop()
            self._begun.discard(name)

    def _call(self, run: str, method: str, /, **arguments: object) -> Any:
        name = _offloader(run)
        if name not in self._workers:
            self._start([name])
        self._progress.set_description(f"{self._short} {run}")
        return self._workers[name].call(method, **arguments)

    def _turn(self, run: str, phase: str, count: int, lineup: int | None = None) -> list[dict[str, Any]]:
        turn = self._call(run, "take_turn", run=run, phase=phase, count=count)
        steps: list[dict[str, Any]] = turn.pop("steps")
        if lineup is not None:
            steps = [step | {"lineup": lineup} for step in steps]
        self.runs[run]["steps"] += steps
        self.runs[run] |= turn
        self._progress.update(count)
        return steps

    # Getting ready: first steps, the proof, warm-up

    def _get_ready(self, run: str, gives_pinned: bool = False) -> bool:
        """Bring ``run`` to where it can be timed, once; False where it cannot be."""
        if run not in self.runs:
            self.runs[run] = {"steps": []}
            try:
                self._have_others_give_back(run, gives_pinned)
                (self._prepare_at_memory if "@" in run else self._prepare)(run)
            except WorkerFailed as error:
                self._fail(run, error)
        return "error" not in self.runs[run] and (run != STOCK or not self.runs[run]["different"])

    def _have_others_give_back(self, run: str, pinned: bool) -> None:
        for other in self._begun - {_offloader(run)}:
            try:
                self._workers[other].call("give_back", pinned=pinned)
            except WorkerFailed as error:
                self._fail(other, error)

    def _prepare(self, run: str) -> None:
        record = self.runs[run]
        record |= self._call(run, "facts")
        self._begun.add(run)
        record["steps"] += self._call(run, "begin")
        self._progress.update(len(record["steps"]))
        self._prove(run)
        if run == STOCK:
            record |= self._call(run, "observe")
        self._call(run, "give_back", pinned=False)  # what plain and deterministic steps took and others do not need
        self._turn(run, "warm-up", self._plan.warm_up_count)

    def _prove(self, run: str) -> None:
        writes = run in {STOCK, *(OFFLOADERS[name].compared_with for name in self._plan.offloaders)}
        reference = run if writes else OFFLOADERS[_offloader(run)].compared_with
        path = self._scratch / f"{reference}.pt"
        different = self._call(run, "prove", run=run, reference_path=path, writes=writes)
        self.runs[run] |= {"different": different, "compared_with": reference}
        self._progress.update(VERIFIED_STEP_COUNT)

    def _prepare_at_memory(self, run: str) -> None:
        """Find windows for torchoffload at which it holds no more than the peer, at the loss and at the peak."""
        peer = self.runs.get(run.partition("@")[2], {"error": ""})
        if "error" in peer or "error" in self.runs[OURS]:
            raise WorkerFailed("cannot run: there is nothing to compare with")
        limit = figures.memory(peer, "warm-up")

        def bytes_over(offload_window_bytes: int, reload_window_bytes: int) -> tuple[int, int]:
            windows = {"offload_window_bytes": offload_window_bytes, "reload_window_bytes": reload_window_bytes}
            self._call(run, "add_run", run=run, options=replace(self._plan.options, **windows))
            steps = self._turn(run, "search", SEARCH_STEP_COUNT)
            self.runs[run]["windows"] = windows
            return tuple(steps[-1][key] - limit[key] for key in ("at_loss_bytes", "peak_bytes"))

        search_windows(limit["at_loss_bytes"], bytes_over)
        # Before the proof: what torchoffload learns of times is to be of the default mode.
        self._turn(run, "warm-up", max(2, self._plan.warm_up_count))
        held = figures.memory(self.runs[run], "warm-up")
        if any(held[key] > limit[key] for key in limit):
            self._note(f"{run} holds more than {run.partition('@')[2]}, even with no window")
        self._prove(run)

    # Turns

    def _take_turns(self, number: int, lineup: list[str]) -> None:
        if not lineup:
            return
        fit = self._fit_together(lineup)
        by_themselves = len({_offloader(run) for run in lineup}) == 1
        # A turn after giving memory back begins with a step that counts for nothing: then fewer, longer turns.
        steps_of_turn = self._plan.step_count if by_themselves else 1 if fit else 2
        done = 0
        while done < self._plan.step_count:
            count = min(steps_of_turn, self._plan.step_count - done)
            for run in [run for run in lineup if "error" not in self.runs[run]]:
                try:
                    self._turn(run, "timed", count, number)
                    if not fit:
                        self._call(run, "give_back", pinned=False)
                except WorkerFailed as error:
                    self._fail(run, error)
            done += count

    def _fit_together(self, lineup: list[str]) -> bool:
        """Whether all can keep the device memory that they took in warm-up while the others run."""
        record = self.runs[STOCK]
        held: dict[str, int] = {}
        for run in lineup:
            held[_offloader(run)] = max(held.get(_offloader(run), 0), self.runs[run].get("reserved_bytes", 0))
        idle = sum(self.runs[name]["state_bytes"] for name in self._begun - held.keys())
        needed = sum(held.values()) + idle + PROCESS_BYTES * len(self._begun)
        return bool(needed <= record["device_bytes"]) or not record["device_bytes"]

    def _fail(self, run: str, error: WorkerFailed) -> None:
        self.runs[run]["error"] = str(error)
        self._note(f"{run}: {error}")
        name = _offloader(run)
        if name in self._workers and not ("@" in run and str(error).startswith("cannot run")):
            self._end({name})

    # Who is measured with whom

    def _mode(self) -> str:
        """The command line's choice; ``auto``: as many in turns as host memory surely holds at once."""
        if self._plan.mode != "auto" or not self.runs[STOCK]["device_bytes"]:
            return "all" if self._plan.mode == "auto" else self._plan.mode
        import torchoffload

        saved = self.runs[STOCK]["saved"]
        peer_count = sum(name not in (STOCK, OURS, "compiled") for name in self._plan.offloaders)
        room = torchoffload.host_memory().default_budget_bytes - saved["unique_bytes"]
        # A peer may move each save by itself.
        if peer_count * saved["summed_bytes"] <= room:
            return "all"
        mode = "pairs" if saved["summed_bytes"] <= room else "none"
        meaning = {"pairs": "each peer takes turns with stock and torchoffload only", "none": "nobody takes turns"}
        self._note(f"host memory may not hold what all offload at once: {meaning[mode]}")
        return mode

    def _planned_step_count(self) -> int:
        """Steps of the progress bar; searches and steps that count for nothing come on top."""
        runs = set(itertools.chain(*_lineups(self._plan, "all")))
        ready = len(runs) * (PLAIN_STEP_COUNT + 1 + VERIFIED_STEP_COUNT + self._plan.warm_up_count)
        mode = "all" if self._plan.mode == "auto" else self._plan.mode
        return ready + self._plan.step_count * sum(map(len, _lineups(self._plan, mode)))


def search_windows(first_bytes: int, bytes_over: Callable[[int, int], tuple[int, int]]) -> tuple[int, int]:
    """Find large windows, at most ``first_bytes`` each, at which nothing that ``bytes_over`` tells is positive.

    It is given the offload and the reload window, and tells by what the memory at the loss and at the peak are over.
    At the loss counts what the reload window lets stay. A peak may be forward's, where what is on its way out counts:
    the offload window gives way first, and the reload window where that did not help. 0 and 0, the least there is,
    where nothing fitted in a few tries. The last call is with what is returned.
    """
    offload = reload = first_bytes
    lowered_bytes: int | None = None
    last_peak_over = 0
    for _ in range(SEARCH_TRY_COUNT):
        at_loss_over, peak_over = bytes_over(offload, reload)
        if at_loss_over <= 0 and peak_over <= 0:
            return offload, reload
        margin = int(SEARCH_MARGIN * first_bytes)
        at_loss_over, peak_over = (over + margin if over > 0 else 0 for over in (at_loss_over, peak_over))
        has_helped = lowered_bytes is None or (offload > 0 and last_peak_over - peak_over >= lowered_bytes / 2)
        reload = max(0, reload - at_loss_over - (0 if has_helped else peak_over))
        lowest = min(offload, reload)
        offload = max(0, lowest - peak_over) if has_helped else lowest
        lowered_bytes, last_peak_over = lowest - offload, peak_over
    bytes_over(0, 0)
    return 0, 0


def _offloader(run: str) -> str:
    """The offloader whose process a row runs in."""
    return run.partition("@")[0]


def _lineups(plan: Plan, mode: str) -> list[list[str]]:
    """Rows that take turns, in order; torchoffload at a peer's memory comes after that peer has shown what it holds."""
    permanent = [name for name in (STOCK, OURS) if name in plan.offloaders]
    # A peer, with the one that its gradients are compared with where that is not stock.
    others = [name for name in plan.offloaders if name not in permanent]
    references = {OFFLOADERS[name].compared_with for name in others} - {STOCK}
    teams = [[name] for name in others if name not in references]
    teams = [[*references.intersection([OFFLOADERS[name].compared_with]), name] for [name] in teams]
    peers = [[*team, *(f"{OURS}@{name}" for name in team if name in plan.at_memory_of)] for team in teams]
    if mode == "none":
        return [[run] for run in itertools.chain(permanent, *peers)]
    if mode == "pairs" and peers:
        return [[*permanent, *team] for team in peers]
    return [[*permanent, *itertools.chain(*peers)]]
