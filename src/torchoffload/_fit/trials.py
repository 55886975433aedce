"""Plans that are tried, and what is laid on a step because of what they took."""

import dataclasses
import math
import statistics
from collections.abc import Iterable
from typing import Any

from torchoffload._fit.budget import Budget
from torchoffload._fit.kinds import hull
from torchoffload._fit.step import Call, CallPlan, Step, StepPlan, Way, plan_step
from torchoffload._observe.units import human_bytes

__all__ = [
    "Candidates",
    "Trial",
    "failure_message",
    "overhead_of",
    "plans_to_try",
    "restricted",
    "unfit_message",
    "with_overhead",
]

_TIMED_STEPS = 2
_STEPS_OF_OTHER_SIZES = 12
# Where the allocator had too little room, plans are tried that take a smaller part of the memory.
_WITH_MORE_ROOM = 0.94
_LEAST_PART = 0.7
# Plans differ in what the prediction knows least: the cost of computing again, and the link beside other work.
_CAUTIONS: tuple[tuple[float, float], ...] = ((1.0, 1.0), (1.3, 1.0), (1.0, 0.8))


@dataclasses.dataclass
class Trial:
    """A plan, and what it took when it was tried.

    Attributes
    ----------
    step : Step
        What the plan was made from.
    plan : StepPlan
        The plan.
    step_s : float or None
        The least time of the steps that were timed; None while there is none.
    timed_s : list of float
        The times of these steps.
    reserved_bytes : int
        What was reserved on the device at the end of the latest step; 0 where this cannot be asked for.
    has_failed : bool
        Whether a step ran out of memory, or more was reserved than the user gives.
    waits_for_memory : bool
        Whether PyTorch's allocator had to give back what it caches in the steps that were timed, which takes time.
    """

    step: Step
    plan: StepPlan
    step_s: float | None = None
    timed_s: list[float] = dataclasses.field(default_factory=list)
    reserved_bytes: int = 0
    has_failed: bool = False
    waits_for_memory: bool = False

    @property
    def does(self) -> Any:
        """What the blocks do, as a value to compare."""
        ways = [self._way(call, planned) for call, planned in zip(self.step.calls, self.plan.calls, strict=True)]
        moves = [(planned.moves, planned.moved) for planned in self.plan.calls]
        windows = [(planned.offload_bytes, planned.reload_bytes) for planned in self.plan.calls]
        return [(way.is_plain, way.kept) for way in ways], moves, windows, self.plan.loss_window_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that is on the device, as predicted."""
        return self.step.peak_bytes(self.plan)

    @property
    def again_count(self) -> int:
        """How many calls of blocks compute something again."""
        calls = zip(self.step.calls, self.plan.calls, strict=True)
        return sum(not self._way(call, planned).is_plain for call, planned in calls)

    def take_pace(self, pace: float) -> None:
        """Give what is predicted the pace of steps that took so many times of the survey's."""
        self.step, self.plan = self.step.at_pace(pace), self.plan.at_pace(pace)

    def _way(self, call: Call, planned: CallPlan) -> Way:
        return self.step.kinds[call.kind].ways[planned.way]


class Candidates:
    """The plans that are tried, one after the other.

    Attributes
    ----------
    trials : list of Trial
        All of them.
    current : Trial or None
        The one that is tried now.
    """

    def __init__(self) -> None:
        self.trials: list[Trial] = []
        self.current: Trial | None = None
        self._timed = self._others = 0
        self._part = 1.0  # of the memory that plans may take
        self._roomier: list[Trial] = []  # those that were added last because they take less
        self._has_learned = False

    def add(self, step: Step, plan: StepPlan | None) -> None:
        """Add a plan, unless there is one already that does the same."""
        if plan is not None:
            trial = Trial(step, plan)
            if all(known.does != trial.does for known in self.trials):
                self.trials.append(trial)

    def take_next(self) -> Trial | None:
        """Go on to a plan that was not tried yet; None if there is none."""
        left = (trial for trial in self.trials if trial.step_s is None and not trial.has_failed)
        self.current = next(left, None)
        self._timed = -1  # the first step is not timed: memory is reserved in it
        self._others = 0
        return self.current

    def ends_timed_step(self) -> bool:
        """Take notice of the end of a step. Returns whether its time counts: that of the first one does not."""
        self._timed += 1
        return self._timed > 0

    def note_time(self, step_s: float, *, waits_for_memory: bool) -> bool:
        """Note what a step took. Returns whether that was the last one of this plan."""
        assert self.current is not None
        self.current.waits_for_memory |= waits_for_memory
        self.current.timed_s.append(step_s)
        self.current.step_s = min(self.current.timed_s)
        return self._timed == _TIMED_STEPS

    def note_other_size(self) -> bool:
        """Note a step of another size, whose time says nothing. Returns whether there were too many of them."""
        self._others += 1
        return self._others > _STEPS_OF_OTHER_SIZES

    @property
    def measured(self) -> list[Trial]:
        """The plans that were timed and did what they were to do, the fastest one first."""
        measured = [trial for trial in self.trials if trial.step_s is not None and not trial.has_failed]
        return sorted(measured, key=lambda trial: trial.step_s or 0.0)

    def add_better(self, step: Step, memory_bytes: int, *, learns: bool) -> Step:
        """Add plans because of what the measured ones took. Returns the step, with what was learned if wanted.

        If the allocator had to give memory back under the fastest plan so far, the next ones take less memory: the best
        plan of all, and the best one that moves nothing, since copies in flight cut the memory up, too. That goes on
        until a plan has had room enough.
        """
        if learns and not self._has_learned:
            self._has_learned = True
            step = self._learn(step)
            self.add(step, plan_step(step, memory_bytes))
        is_tight = all(trial.waits_for_memory or trial.has_failed for trial in [self.measured[0], *self._roomier])
        count = len(self.trials)
        while is_tight and len(self.trials) == count and self._part * _WITH_MORE_ROOM >= _LEAST_PART:
            self._part *= _WITH_MORE_ROOM
            for each in (step, dataclasses.replace(step, may_move=False)):
                self.add(step, plan_step(each, int(memory_bytes * self._part), timed_as=step))
            self._roomier = self.trials[count:]
        return step

    def _learn(self, step: Step) -> Step:
        """Return the step with the overhead of computing again, which predictions have from then on."""
        overhead_s = overhead_of(self.measured)
        if overhead_s <= 0:
            return step
        for trial in self.trials:
            trial.plan = trial.plan.with_overhead(overhead_s * trial.again_count)
        return with_overhead(step, overhead_s)

    def take_pace(self) -> float:
        """Give all predictions the pace of the steps that were timed. Returns it, as a factor.

        In a survey the device waits now and then, so that its clock is higher than in steps that follow each other. And
        what the host takes is not in a plan. Steps in which the allocator gave memory back do not count if others do.
        """
        measured = self.measured
        telling = [trial for trial in measured if not trial.waits_for_memory] or measured
        paces = [taken_s / trial.plan.step_s for trial in telling for taken_s in trial.timed_s if trial.plan.step_s > 0]
        pace = statistics.median(paces) if paces else 1.0
        if not 0 < pace < math.inf:
            return 1.0
        for trial in self.trials:
            trial.take_pace(pace)
        return pace


def plans_to_try(step: Step, memory_bytes: int, *, has_allocator: bool = True) -> list[StepPlan]:
    """Return the best plans within a memory: as predicted, with some caution, and without moving anything.

    What is held while blocks run may leave the device's allocator, if it has one, with pieces that it cannot join. So
    one plan takes as little memory there as it can then, and a little longer. Plans that take less memory come first,
    so that one is known to run before the others are tried.
    """
    steps = [_cautious(step, recompute, rate) for recompute, rate in _CAUTIONS]
    if step.may_move:
        steps.append(dataclasses.replace(step, may_move=False))
        if has_allocator:
            steps.append(dataclasses.replace(step, leaves_room=True))
    plans = [plan for each in steps if (plan := plan_step(each, memory_bytes, timed_as=step)) is not None]
    return sorted(plans, key=step.peak_bytes)


def _cautious(step: Step, recompute: float, rate: float) -> Step:
    """Return a step in which computing again takes longer, or copies do."""
    kinds = tuple(
        dataclasses.replace(
            kind,
            ways=tuple(dataclasses.replace(way, recompute_s=way.recompute_s * recompute) for way in kind.ways),
        )
        for kind in step.kinds
    )
    return dataclasses.replace(
        step, kinds=kinds, out_bytes_per_s=step.out_bytes_per_s * rate, in_bytes_per_s=step.in_bytes_per_s * rate
    )


def overhead_of(trials: Iterable[Trial]) -> float:
    """Return how much longer than predicted each call took that was computed again; 0 if that is not known.

    Only plans that move nothing tell: others may have waited for copies.
    """
    overheads = [
        (trial.step_s - trial.plan.step_s) / trial.again_count
        for trial in trials
        if trial.step_s is not None and trial.again_count and not trial.plan.moved_bytes
    ]
    return max(0.0, statistics.median(overheads)) if overheads else 0.0


def with_overhead(step: Step, overhead_s: float) -> Step:
    """Return a step in which each call of a block that is computed again takes so much longer."""
    kinds = []
    for kind in step.kinds:
        ways = [
            way if way.is_plain else dataclasses.replace(way, recompute_s=way.recompute_s + overhead_s)
            for way in kind.ways
        ]
        kinds.append(dataclasses.replace(kind, ways=tuple(hull(ways, kind.outputs))))
    return dataclasses.replace(step, kinds=tuple(kinds))


def restricted(step: Step, *, may_recompute: bool, may_move: bool) -> Step:
    """Return a step in which nothing is computed again, or nothing moves."""
    if not may_recompute:
        kinds = [dataclasses.replace(kind, ways=tuple(way for way in kind.ways if way.is_plain)) for kind in step.kinds]
        step = dataclasses.replace(step, kinds=tuple(kinds))
    return step if may_move else dataclasses.replace(step, may_move=False)


def failure_message(trial: Trial, budget: Budget) -> str:
    """Say what follows from a step that ran out of memory under a plan."""
    return (
        f"a step ran out of memory, under a plan that was predicted to take {human_bytes(trial.peak_bytes)}: from then "
        f"on plans take at most {human_bytes(budget.usable_bytes)}"
    )


def unfit_message(step: Step, least: StepPlan, budget: Budget) -> str:
    """Say how much memory a step needs at least, and what takes it."""
    needed = step.peak_bytes(least)
    suggestion = needed / (1 - budget.margin)
    parts = dict(step.fixed)
    fixed = sum(parts.values())
    parts["at the loss"] = max(0, step.loss_bytes - fixed)
    parts["one block computed again"] = max(0, max((call.backward_bytes for call in step.calls), default=0) - fixed)
    parts["outside of forward and backward, as the optimizer"] = max(0, step.other_bytes - fixed)
    told = ", ".join(f"{name} {human_bytes(nbytes)}" for name, nbytes in parts.items())
    return (
        f"fit: {budget.limit} is too little. This step needs at least {human_bytes(needed)}, and "
        f"{budget.margin:.0%} of the memory is left free. It takes: {told}; the last three not all at once. Give "
        f'memory="{suggestion / (1 << 30) + 0.05:.1f}GiB", a smaller batch, or smaller blocks.'
    )
