"""plan_oracle.py: the best that any plan can do, found by SciPy's HiGHS, and what a step takes under a given plan.

Bytes are counted in pages or MiB, and times in ns or ms, so that the numbers that HiGHS sees are neither tiny nor huge.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from torchoffload import _C_testing
from torchoffload._fit.step import CallPlan, Kind, Step, Way

testing = _C_testing.testing

PAGE = 4096
MIB = 1 << 20
MS = 1e-3
UNLIMITED = float("inf")

Terms = Mapping[int, float]  # by variable: its factor


def total(*parts: Terms) -> dict[int, float]:
    """The sum of linear expressions."""
    added: dict[int, float] = {}
    for part in parts:
        for variable, factor in part.items():
            added[variable] = added.get(variable, 0.0) + factor
    return added


def times(factor: float, terms: Terms) -> dict[int, float]:
    return {variable: factor * each for variable, each in terms.items()}


class Program:
    """A linear program whose variables are at least 0, some of them integers. It is written down row by row."""

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._most: list[float] = []
        self._is_integer: list[bool] = []
        self._rows: list[tuple[Terms, float]] = []

    def variable(self, *, cost: float = 0.0, most: float = UNLIMITED, is_integer: bool = False) -> int:
        self._costs.append(cost)
        self._most.append(most)
        self._is_integer.append(is_integer)
        return len(self._costs) - 1

    def choice(self, cost: float = 0.0) -> int:
        """A variable that is 0 or 1."""
        return self.variable(cost=cost, most=1.0, is_integer=True)

    def at_most(self, terms: Terms, limit: float) -> None:
        self._rows.append((terms, limit))

    def at_least(self, terms: Terms, limit: float) -> None:
        self.at_most(times(-1, terms), -limit)

    def one_of(self, variables: Sequence[int]) -> None:
        self.at_most(dict.fromkeys(variables, 1.0), 1)
        self.at_least(dict.fromkeys(variables, 1.0), 1)

    def least(self) -> float | None:
        """The least cost; None if no choice obeys all rows."""
        if not self._costs:
            return 0.0
        constraints = []
        if self._rows:
            entries = [(number, *term) for number, (terms, _) in enumerate(self._rows) for term in terms.items()]
            rows, columns, factors = zip(*entries, strict=True) if entries else ((), (), ())
            matrix = coo_array((factors, (rows, columns)), shape=(len(self._rows), len(self._costs))).tocsr()
            constraints = [LinearConstraint(matrix, -np.inf, np.array([limit for _, limit in self._rows]))]
        found = milp(
            np.array(self._costs),
            integrality=np.array(self._is_integer, dtype=int),
            bounds=Bounds(0.0, np.array(self._most)),
            constraints=constraints,
            options={"mip_rel_gap": 0.0},
        )
        assert found.status in {0, 2}, found.message
        return None if found.status == 2 else float(found.fun)


# ---- one block ----


def pages(nbytes: int) -> int:
    return -(-nbytes // PAGE)


def best_of_block(
    groups: Sequence[Any], draws: Sequence[int], *, ns: int = 0, page: int = 0, most_pages: int | None = None
) -> float | None:
    """The least cost of a choice for a block, by the rules of ``frontier.h``; None: no choice obeys them.

    Parameters
    ----------
    groups, draws
        As for ``block_frontier``.
    ns, page
        What a nanosecond and a page cost.
    most_pages
        The most that may be kept.
    """
    program = Program()
    # A group is there (kept or computed again), and it is computed again.
    there = [program.choice(page * pages(group.nbytes)) for group in groups]
    again = [program.choice(ns * group.duration_ns - page * pages(group.nbytes)) for group in groups]
    for number, group in enumerate(groups):
        program.at_most({again[number]: 1, there[number]: -1}, 0)
        if not group.may_keep:
            program.at_most({there[number]: 1, again[number]: -1}, 0)
        if not group.may_recompute:
            program.at_most({again[number]: 1}, 0)
        for each in group.inputs:
            program.at_most({again[number]: 1, there[each]: -1}, 0)
        if group.is_needed:
            program.at_least({there[number]: 1}, 1)
    for each in draws:
        program.at_least({there[each]: 1}, 1)
    for before, after in itertools.pairwise(draws):
        if before != after:
            program.at_most({again[after]: 1, again[before]: -1}, 0)
    if most_pages is not None:
        sizes = [pages(group.nbytes) for group in groups]
        kept = total(dict(zip(there, sizes, strict=True)), times(-1, dict(zip(again, sizes, strict=True))))
        program.at_most(kept, most_pages)
    return program.least()


# ---- a step of blocks under a plan ----


def of_call(step: Step, number: int) -> Kind:
    return step.kinds[step.calls[number].kind]


def records(step: Step, kind: Kind, way: Way, outputs: Sequence[int]) -> list[tuple[int, float]]:
    """What moves of a block: its arguments and these outputs, as bytes and the time at which they are there."""
    arguments = [(way.input_bytes, 0.0)] if way.input_bytes >= max(1, step.least_moved_bytes) else []
    return arguments + [
        (nbytes, kind.outputs[number].ready_s)
        for number in outputs
        if kind.outputs[number].may_move and kind.outputs[number].nbytes >= step.least_moved_bytes
        for nbytes in kind.outputs[number].sizes
    ]


def moved_of(step: Step, kind: Kind, plan: CallPlan) -> list[tuple[int, float]]:
    """What moves of a call under its plan."""
    return records(step, kind, kind.ways[plan.way], plan.moved) if plan.moves else []


def kept_of(step: Step, kind: Kind, plan: CallPlan) -> int:
    """The bytes that stay on the device."""
    return kind.kept_bytes(kind.ways[plan.way]) - sum(nbytes for nbytes, _ in moved_of(step, kind, plan))


def going_out_until(step: Step, number: int) -> int:
    """The bytes that go out at least between the end of forward and the backward of a call."""
    passed_s = step.loss_s
    for behind in reversed(range(number + 1, len(step.calls))):
        passed_s += of_call(step, behind).backward_s
    return int(passed_s * step.out_bytes_per_s)


def peak_bytes(step: Step, plans: Sequence[CallPlan], window_bytes: int) -> int:
    """The peak of a plan; see Note [Memory of a step of blocks] in ``joint_plan.h``."""
    kept = peak = 0
    for number, (call, plan) in enumerate(zip(step.calls, plans, strict=True)):
        windows = max(0, window_bytes - going_out_until(step, number)) + (window_bytes if number > 0 else 0)
        peak = max(peak, call.backward_bytes + kept + windows)
        kept += kept_of(step, of_call(step, number), plan)
        peak = max(peak, call.forward_bytes + kept + window_bytes)
    return max(peak, step.loss_bytes + kept + window_bytes)


def seconds(step: Step, plans: Sequence[CallPlan], window_bytes: int) -> float:
    """What a step takes under a plan, by the simulation of the core."""
    ways = [of_call(step, number).ways[plan.way] for number, plan in enumerate(plans)]
    kinds = [of_call(step, number) for number in range(len(plans))]
    starts = list(itertools.accumulate((kind.forward_s for kind in kinds), initial=step.head_s))
    clock_s = starts[-1] + step.loss_s
    begins = [0.0] * len(plans)
    for number in reversed(range(len(plans))):
        begins[number] = clock_s
        clock_s += ways[number].recompute_s + kinds[number].backward_s
    nbytes, moments = [], []
    for number, kind in enumerate(kinds):
        for size, ready_s in moved_of(step, kind, plans[number]):
            # Backward goes through a plain block the other way round, and asks for all of another one as it begins.
            at_s = starts[number] + ready_s
            part = (at_s - starts[number]) / kind.forward_s if ways[number].is_plain and kind.forward_s > 0 else 1.0
            nbytes.append(size)
            # Of what is asked for at the same moment the last one comes first.
            needed_s = begins[number] + (1 - min(max(part, 0), 1)) * kind.backward_s - 1e-9 * len(moments)
            moments.append((at_s, needed_s))
    compute_s = clock_s + step.end_s
    if not nbytes:
        return compute_s
    link = (step.out_bytes_per_s, step.in_bytes_per_s, step.latency_s)
    step_times = testing.StepTimes(moments, compute_s, *link)
    kept = [False] * len(nbytes)
    found = testing.simulate(nbytes, list(range(len(nbytes))), step_times, kept, window_bytes, window_bytes)
    return float(found["step_s"])


def stock_s(step: Step) -> float:
    """What a step takes that computes nothing again and moves nothing."""
    kinds = (step.kinds[call.kind] for call in step.calls)
    return step.head_s + step.loss_s + step.end_s + sum(kind.forward_s + kind.backward_s for kind in kinds)


# ---- the best plan of a step ----


class MemoryRows:
    """The conditions on memory, call by call: what the calls keep so far, and the windows, have to fit."""

    def __init__(self, program: Program, step: Step, memory_bytes: int, window: Terms) -> None:
        self._program, self._step, self._memory_bytes, self._window = program, step, memory_bytes, window
        self._kept: dict[int, float] = {}

    def before(self, number: int) -> None:
        reload_windows = 1 if number > 0 else 0
        taken_bytes = self._step.calls[number].backward_bytes
        self._fits(taken_bytes, reload_windows)
        self._fits(taken_bytes - going_out_until(self._step, number), reload_windows + 1)

    def after(self, number: int, kept: Terms) -> None:
        self._kept = total(self._kept, kept)
        self._fits(self._step.calls[number].forward_bytes, 1)

    def at_loss(self) -> None:
        self._fits(self._step.loss_bytes, 1)

    def _fits(self, taken_bytes: int, windows: int) -> None:
        held = total(self._kept, times(windows, self._window)) if self._window else self._kept
        self._program.at_most(held, (self._memory_bytes - taken_bytes) / MIB)


def best_without_moving(step: Step, memory_bytes: int) -> float | None:
    """The least time of a step in which nothing moves, in seconds; None if no choice of ways fits."""
    program = Program()
    memory = MemoryRows(program, step, memory_bytes, {})
    for number in range(len(step.calls)):
        kind = of_call(step, number)
        ways = [program.choice(way.recompute_s / MS) for way in kind.ways]
        program.one_of(ways)
        memory.before(number)
        memory.after(number, {each: kind.kept_bytes(way) / MIB for each, way in zip(ways, kind.ways, strict=True)})
    memory.at_loss()
    found = program.least()
    return None if found is None else stock_s(step) + found * MS
