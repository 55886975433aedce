"""plan_oracle.py: the best that any plan can do, found by SciPy's HiGHS, and what a step takes under a given plan.

Bytes are counted in pages or MiB, and times in ns or ms, so that the numbers that HiGHS sees are neither tiny nor huge.
"""

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from torchoffload import _C_testing
from torchoffload._fit.plan.step import BlockKind, CallPlan, Step, Way

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


def of_call(step: Step, number: int) -> BlockKind:
    return step.kinds[step.calls[number].kind]


class Record(NamedTuple):
    """What moves as one: its bytes, and when it is there."""

    nbytes: int
    ready_s: float


def records(step: Step, kind: BlockKind, way: Way, outputs: Sequence[int]) -> list[Record]:
    """What moves of a block: its arguments and these outputs."""
    has_input = way.input_bytes >= max(1, step.least_moved_bytes)
    arguments = [Record(way.input_bytes, 0.0)] if has_input else []
    made = [kind.outputs[number] for number in outputs]
    return arguments + [
        Record(nbytes, output.ready_s)
        for output in made
        if output.may_move and output.nbytes >= step.least_moved_bytes
        for nbytes in output.sizes
    ]


def moved_of(step: Step, kind: BlockKind, plan: CallPlan) -> list[Record]:
    """What moves of a call under its plan."""
    return records(step, kind, kind.ways[plan.way], plan.moved) if plan.moves else []


def kept_of(step: Step, kind: BlockKind, plan: CallPlan) -> int:
    """The bytes that stay on the device."""
    return kind.kept_bytes(kind.ways[plan.way]) - sum(each.nbytes for each in moved_of(step, kind, plan))


class Windows(NamedTuple):
    """The windows of a plan, by call and at the loss, and its peak."""

    offload: list[int]
    reload: list[int]
    at_loss: int
    peak_bytes: int


def windows_of(
    step: Step, plans: Sequence[CallPlan], most: int, memory_bytes: int, spare: tuple[int, int] = (0, 0)
) -> Windows | None:
    """The windows that are at most so large; see Note [Memory of a step of blocks]. None: the plan does not fit.

    ``spare``: what those of blocks leave of the room that they could have, in forward and in backward.
    """
    kept, moved = [0], [0]
    for number, plan in enumerate(plans):
        kind = of_call(step, number)
        kept.append(kept[-1] + kept_of(step, kind, plan))
        moved.append(moved[-1] + sum(each.nbytes for each in moved_of(step, kind, plan)))
    most = min(most, moved[-1])
    behind = [moved[-1] - moved[number] for number in range(len(plans))]  # these leave the window at the loss first
    in_forward = [memory_bytes - call.forward_bytes - kept[number + 1] for number, call in enumerate(step.calls)]
    in_backward = [memory_bytes - call.backward_bytes - kept[number] for number, call in enumerate(step.calls)]
    room_at_loss = min([memory_bytes - step.loss_bytes - kept[-1], *map(sum, zip(in_backward, behind, strict=True))])
    if min([room_at_loss, *in_forward, *in_backward]) < 0:
        return None
    at_loss = min(most, room_at_loss)
    held = [max(0, at_loss - passed) for passed in behind]
    rooms = [max(0, room - held_bytes - spare[1]) for room, held_bytes in zip(in_backward, held, strict=True)]
    offload = [min(most, max(0, room - spare[0]), moved[number + 1]) for number, room in enumerate(in_forward)]
    binding = [room if moved[number] > room else most for number, room in enumerate(rooms)]
    # What a call itself asks for counts in its window until it is there, and is part of what was measured.
    reload = [min(most, moved[number + 1], *binding[: number + 1]) for number in range(len(plans))]
    moments = [step.loss_bytes + kept[-1] + at_loss]
    for number, call in enumerate(step.calls):
        moments.append(call.forward_bytes + kept[number + 1] + offload[number])
        moments.append(call.backward_bytes + kept[number] + held[number] + min(reload[number], moved[number]))
    return Windows(offload, reload, at_loss, max(moments))


def seconds(step: Step, plans: Sequence[CallPlan], windows: Windows) -> float:
    """What a step takes under a plan, by the simulation of the core."""
    ways = [of_call(step, number).ways[plan.way] for number, plan in enumerate(plans)]
    kinds = [of_call(step, number) for number in range(len(plans))]
    starts = list(itertools.accumulate((kind.forward_s for kind in kinds), initial=step.head_s))
    clock_s = starts[-1] + step.loss_s
    begins = [0.0] * len(plans)
    for number in reversed(range(len(plans))):
        begins[number] = clock_s
        clock_s += ways[number].recompute_s + kinds[number].backward_s
    nbytes: list[int] = []
    moments: list[tuple[float, float]] = []
    kept: list[bool] = []
    in_force: list[tuple[int, int]] = []  # by record: the windows

    def wait(at_s: float, window: int) -> None:  # until no more is on its way out
        nbytes.append(0)
        moments.append((at_s, -1.0))
        kept.append(True)
        in_force.append((window, 0))

    for number, kind in enumerate(kinds):
        wait(starts[number], windows.offload[number])
        for size, ready_s in moved_of(step, kind, plans[number]):
            # Backward goes through a plain block the other way round, and asks for all of another one as it begins.
            at_s = starts[number] + ready_s
            part = (at_s - starts[number]) / kind.forward_s if ways[number].is_plain and kind.forward_s > 0 else 1.0
            nbytes.append(size)
            # Of what is asked for at the same moment the last one comes first.
            needed_s = begins[number] + (1 - min(max(part, 0), 1)) * kind.backward_s - 1e-9 * len(moments)
            moments.append((at_s, needed_s))
            kept.append(False)
            in_force.append((windows.offload[number], windows.reload[number]))
    wait(starts[-1], windows.at_loss)
    compute_s = clock_s + step.end_s
    if all(kept):
        return compute_s
    link = (step.out_bytes_per_s, step.in_bytes_per_s, step.latency_s)
    step_times = testing.StepTimes(moments, compute_s, *link)
    offload, reload = (list(each) for each in zip(*in_force, strict=True))
    found = testing.simulate(nbytes, list(range(len(nbytes))), step_times, kept, offload, reload)
    return float(found["step_s"])


def stock_s(step: Step) -> float:
    """What a step takes that computes nothing again and moves nothing."""
    kinds = (step.kinds[call.kind] for call in step.calls)
    return step.head_s + step.loss_s + step.end_s + sum(kind.forward_s + kind.backward_s for kind in kinds)


# ---- the best plan of a step ----


class MemoryRows:
    """The conditions on memory, call by call: what the calls keep so far, and the windows, have to fit.

    ``windows``: for each call the variables of its offload window and of its reload window; ``loss_window``: that of
    the offload window at the loss. Without them there are no windows.
    """

    def __init__(
        self, program: Program, step: Step, memory_bytes: int, windows: Sequence[tuple[int, int]] = (),
        loss_window: int | None = None,
    ) -> None:  # fmt: skip
        self._program, self._step, self._memory_bytes = program, step, memory_bytes
        self._windows, self._loss_window = windows, loss_window
        self._kept: dict[int, float] = {}
        self._in_backward: list[Terms] = []  # by call: what is held in its backward, with its reload window
        self._moved: list[Terms] = []

    def before(self, number: int) -> None:
        held = self._with_windows(self._windows[number][1] if self._windows else None)
        self._in_backward.append(held)
        self._fits(self._step.calls[number].backward_bytes, held)

    def after(self, number: int, kept: Terms, moved: Terms = MappingProxyType({})) -> None:
        self._kept = total(self._kept, kept)
        self._moved.append(moved)
        held = self._with_windows(self._windows[number][0] if self._windows else None)
        self._fits(self._step.calls[number].forward_bytes, held)

    def at_loss(self) -> None:
        """What the calls behind one have moved leaves the window of the loss before its backward, or is not in it."""
        self._fits(self._step.loss_bytes, self._with_windows(self._loss_window))
        if self._loss_window is None:
            return
        in_window = {self._loss_window: 1.0}
        for call, held, moved in reversed(list(zip(self._step.calls, self._in_backward, self._moved, strict=True))):
            in_window = total(in_window, times(-1, moved))
            self._fits(call.backward_bytes, total(held, in_window))

    def _with_windows(self, window: int | None) -> dict[int, float]:
        return dict(self._kept) if window is None else total(self._kept, {window: 1.0})

    def _fits(self, taken_bytes: int, held: Terms) -> None:
        self._program.at_most(held, (self._memory_bytes - taken_bytes) / MIB)


def best_without_moving(step: Step, memory_bytes: int) -> float | None:
    """The least time of a step in which nothing moves, in seconds; None if no choice of ways fits."""
    program = Program()
    memory = MemoryRows(program, step, memory_bytes)
    for number in range(len(step.calls)):
        kind = of_call(step, number)
        ways = [program.choice(way.recompute_s / MS) for way in kind.ways]
        program.one_of(ways)
        memory.before(number)
        memory.after(number, {each: kind.kept_bytes(way) / MIB for each, way in zip(ways, kind.ways, strict=True)})
    memory.at_loss()
    found = program.least()
    return None if found is None else stock_s(step) + found * MS
