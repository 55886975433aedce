"""A step made of blocks, as it was surveyed, and the plan for it that the core finds: bytes, times, and moves."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

from torchoffload._core import core
from torchoffload._fit.block.graph import BlockPlan

__all__ = [
    "BlockCall",
    "BlockKind",
    "CallPlan",
    "Output",
    "Step",
    "StepPlan",
    "Way",
    "backward_order",
    "least_plan",
    "plan_step",
    "plan_steps",
    "survey_plan",
    "times_of",
]

_AS_IT_IS = (1.0, 1.0, 1.0)  # the factors of a step's own times


@dataclass(frozen=True, slots=True)
class Output:
    """Something that a block may keep from its forward.

    Attributes
    ----------
    sizes : tuple of int
        The sizes of its storages in bytes. Each moves by itself.
    ready_s : float
        When it is there, in seconds from the start of the block's forward.
    operators : tuple of int
        The numbers of the operators that make it.
    may_move : bool
        Whether it may move.
    """

    sizes: tuple[int, ...]
    ready_s: float
    operators: tuple[int, ...] = ()
    may_move: bool = True

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a block.

    Attributes
    ----------
    recompute_s : float
        How much longer it takes than a call that computes nothing again.
    kept : tuple of int
        The numbers of the outputs that it keeps.
    input_bytes : int
        The bytes of its arguments that it keeps.
    plan : BlockPlan or None
        How its recomputation goes; None if nothing is computed again.
    """

    recompute_s: float
    kept: tuple[int, ...]
    input_bytes: int
    plan: BlockPlan | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the block is called as it is."""
        return self.plan is None

    def plan_with(self, outputs: Sequence[Output], moved: Iterable[int]) -> BlockPlan | None:
        """Return the plan, in which the outputs of these numbers move."""
        if self.plan is None:
            return None
        moving = {operator for number in moved for operator in outputs[number].operators}
        return replace(self.plan, moved=self.plan.kept & moving)


@dataclass(frozen=True, slots=True)
class BlockKind:
    """Blocks that do the same.

    Attributes
    ----------
    forward_s, backward_s : float
        How long they take; backward without the time of computing again.
    outputs : tuple of Output
        The outputs that they may keep.
    ways : tuple of Way
        The ways to run one, from the least bytes to the least time: the corners of a convex hull.
    """

    forward_s: float
    backward_s: float
    outputs: tuple[Output, ...]
    ways: tuple[Way, ...]

    def with_times(self, pace: float, again: float) -> "BlockKind":
        """Return the same kind with all times ``pace`` times as long, and computing again ``again`` times that."""
        return replace(
            self,
            forward_s=self.forward_s * pace,
            backward_s=self.backward_s * pace,
            outputs=tuple(replace(output, ready_s=output.ready_s * pace) for output in self.outputs),
            ways=tuple(replace(way, recompute_s=way.recompute_s * pace * again) for way in self.ways),
        )

    def kept_bytes(self, way: Way) -> int:
        """Return the bytes that a way keeps."""
        return way.input_bytes + sum(self.outputs[number].nbytes for number in way.kept)

    def moved_bytes(self, planned: "CallPlan") -> int:
        """Return the bytes that a call moves."""
        if not planned.moves:
            return 0
        way = self.ways[planned.way]
        # A call that is not computed again moves outputs by themselves, and its arguments with all of them.
        return way.input_bytes + sum(self.outputs[number].nbytes for number in planned.moved)


@dataclass(frozen=True, slots=True)
class BlockCall:
    """One call of a block.

    Attributes
    ----------
    kind : int
        The number of its kind.
    forward_bytes, backward_bytes : int
        The most on the device while its forward and its backward run, if no block keeps anything.
    """

    kind: int
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step as it was surveyed. Note [Memory of a step of blocks] in ``joint_plan.h`` defines the bytes.

    Attributes
    ----------
    kinds, calls : tuple
        The kinds of blocks, and the calls in the order of forward.
    head_s, loss_s, end_s : float
        The time outside of the blocks: in forward, between forward and backward, and at the end.
    loss_bytes : int
        The most on the device between the forward of the last block and its backward.
    other_bytes : int
        The most on the device outside of forward and backward.
    fixed : dict of str to int
        The bytes that every plan takes, by their names for messages.
    late : tuple of int
        The numbers of the calls whose backward begins behind the step's first backward, as that of a generator behind
        its critic's.
    between : tuple of tuple of int
        The calls behind the first backward and those behind each later one, if any call is late: for each, the number
        of the call that it repeats.
    between_bytes : int
        The most on the device while they run.
    between_waits : bool
        Whether some of them wait for their backward while a late call runs its own, as in a pipeline that runs a
        forward and a backward by turns.
    least_moved_bytes, tier_bytes : int
        The size below which nothing moves, and the room of the tier.
    may_move : bool
        Whether anything may move.
    leaves_room : bool
        Whether, of plans that take nearly the same time, the one with the least memory while blocks run is best.
    out_bytes_per_s, in_bytes_per_s, latency_s : float
        The time of a copy is the bytes that the link carries / rate + latency.
    """

    kinds: tuple[BlockKind, ...]
    calls: tuple[BlockCall, ...]
    head_s: float = 0.0
    loss_s: float = 0.0
    end_s: float = 0.0
    loss_bytes: int = 0
    other_bytes: int = 0
    fixed: dict[str, int] = field(default_factory=dict)
    late: tuple[int, ...] = ()
    between: tuple[tuple[int, ...], ...] = ()
    between_bytes: int = 0
    between_waits: bool = False
    least_moved_bytes: int = 1
    tier_bytes: int = 2**62
    may_move: bool = True
    leaves_room: bool = False
    out_bytes_per_s: float = 1.0
    in_bytes_per_s: float = 1.0
    latency_s: float = 0.0

    def peak_bytes(self, plan: "StepPlan") -> int:
        """Return the most that is on the device under a plan, outside of forward and backward as well."""
        return max(plan.peak_bytes, self.other_bytes)

    def stays_bytes(self, plan: "StepPlan", number: int) -> int:
        """Return how many bytes of a call stay on the device under a plan."""
        kind, planned = self.kinds[self.calls[number].kind], plan.calls[number]
        return max(0, kind.kept_bytes(kind.ways[planned.way]) - kind.moved_bytes(planned))

    def room_between(self, plan: "StepPlan") -> int:
        """Return the bytes left for windows if the calls between the backwards keep as much as those that they repeat.

        A negative number: they have to keep less.
        """
        stays_bytes = sum(self.stays_bytes(plan, number) for calls in self.between for number in calls)
        return self.room_beside_late(plan) - stays_bytes

    def room_beside_late(self, plan: "StepPlan") -> int:
        """Return the bytes left beside the late calls for the calls between the backwards and for windows.

        If the calls between wait for their backward meanwhile, that holds in the backward of each late call as well.
        """
        before_bytes = most_bytes = 0
        for number in self.late:
            if self.between_waits:
                most_bytes = max(most_bytes, self.calls[number].backward_bytes + before_bytes)
            before_bytes += self.stays_bytes(plan, number)
        return plan.peak_bytes - max(most_bytes, self.between_bytes + before_bytes)

    def room_ahead(self, plan: "StepPlan") -> int:
        """Return the bytes left for windows at the loss, and while calls that are not late have their backward."""
        room = plan.peak_bytes
        before_bytes = sum(self.stays_bytes(plan, number) for number in self.late)
        for number, call in enumerate(self.calls):
            if number not in self.late:
                room = min(room, plan.peak_bytes - call.backward_bytes - before_bytes)
                before_bytes += self.stays_bytes(plan, number)
        return min(room, plan.peak_bytes - self.loss_bytes - before_bytes)

    @property
    def is_retained(self) -> bool:
        """Whether several backwards run through one graph: all calls are late then."""
        return len(self.late) == len(self.calls) > 0

    @property
    def backward_order(self) -> list[int]:
        """The numbers of the calls, in the reversed order of their backwards."""
        return backward_order(self.late, len(self.calls))

    @property
    def as_one_backward(self) -> "Step":
        """The step with its calls in ``backward_order``, as if there were one backward: the core knows no other ones.

        Calls that are not late may be called before a late one. In its forward, they are on the device as well. The
        core counts them from the next call on that is not late, and so this call is given those bytes, too.
        """
        if not self.late or self.late[-1] < len(self.late):
            return self
        calls, loss_bytes = [self.calls[number] for number in self.backward_order], self.loss_bytes
        for place, number in enumerate(self.late):
            before = number - place  # calls that are not late
            forward_bytes = self.calls[number].forward_bytes
            behind = len(self.late) + before
            if before and behind < len(calls):
                call = calls[behind]
                calls[behind] = replace(call, forward_bytes=max(call.forward_bytes, forward_bytes))
            elif before:
                loss_bytes = max(loss_bytes, forward_bytes)
        return replace(self, calls=tuple(calls), loss_bytes=loss_bytes, late=tuple(range(len(self.late))))

    @property
    def of_blocks(self) -> "Step":
        """The same step with nothing outside of forward and backward: to find plans by the bytes there alone."""
        return replace(self, other_bytes=0)

    def with_more(self, nbytes: int) -> "Step":
        """Return the same step beside so many bytes that are on the device all the time."""
        if nbytes == 0:
            return self
        name = "other tensors, as the optimizer's"
        return replace(
            self,
            calls=tuple(
                BlockCall(call.kind, call.forward_bytes + nbytes, call.backward_bytes + nbytes) for call in self.calls
            ),
            loss_bytes=self.loss_bytes + nbytes,
            between_bytes=self.between_bytes + nbytes,
            other_bytes=self.other_bytes + nbytes,
            fixed=self.fixed | {name: self.fixed.get(name, 0) + nbytes},
        )

    def with_times(self, *, pace: float = 1.0, again: float = 1.0, rate: float = 1.0) -> "Step":
        """Return the same step with other times.

        Parameters
        ----------
        pace : float
            How many times as long all computing takes.
        again : float
            How many times as long computing again takes besides.
        rate : float
            The part of the surveyed rate that the link has.
        """
        return replace(
            self,
            kinds=tuple(kind.with_times(pace, again) for kind in self.kinds),
            head_s=self.head_s * pace,
            loss_s=self.loss_s * pace,
            end_s=self.end_s * pace,
            out_bytes_per_s=self.out_bytes_per_s * rate,
            in_bytes_per_s=self.in_bytes_per_s * rate,
        )


@dataclass(frozen=True, slots=True)
class CallPlan:
    """The plan of one call of a block.

    Attributes
    ----------
    way : int
        The number of the way among those of its kind.
    moved : tuple of int
        The numbers of the outputs that move.
    moves : bool
        Whether anything moves. If so, a block that is computed again moves its arguments, too.
    offload_bytes, reload_bytes : int
        The offload window while its forward runs, and the reload window while its backward runs.
    """

    way: int
    moved: tuple[int, ...]
    moves: bool
    offload_bytes: int = 0
    reload_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The plan of each block of a step, and the time and memory that are predicted for the step.

    Attributes
    ----------
    calls : tuple of CallPlan
        In the order of forward.
    step_s : float
        Forward and backward, in seconds.
    recompute_s : float
        How much of it is spent on computing again.
    peak_bytes : int
        The most memory that is allocated on the device.
    loss_bytes : int
        The bytes that the blocks have on the device at the loss.
    kept_bytes, moved_bytes : int
        The bytes that the blocks keep on the device, and the bytes that move.
    window_bytes : int
        The most that the offload window and the reload window of any call have; 0 if nothing moves.
    loss_window_bytes : int
        The offload window at the loss.
    forward_spare_bytes, backward_spare_bytes : int
        The room that the windows could have and leave free while a block's forward and its backward run.
    """

    calls: tuple[CallPlan, ...]
    step_s: float
    recompute_s: float
    peak_bytes: int
    loss_bytes: int
    kept_bytes: int
    moved_bytes: int
    window_bytes: int
    loss_window_bytes: int
    forward_spare_bytes: int
    backward_spare_bytes: int

    def timed_as(self, step: Step) -> "StepPlan":
        """Return the same plan with the times that it has in a step of other times and the same bytes."""
        [[(step_s, recompute_s)]] = _times(step, [self], [_AS_IT_IS])
        return replace(self, step_s=step_s, recompute_s=recompute_s)


def times_of(step: Step, plans: Sequence[StepPlan], factors: Sequence[tuple[float, float, float]]) -> list[list[float]]:
    """Return for each (pace, again, rate) how long the step with these times takes under each plan, in seconds."""
    return [[step_s for step_s, _ in times] for times in _times(step, plans, factors)]


def _times(step: Step, plans: Sequence[StepPlan], factors: Sequence[tuple[float, float, float]]) -> Any:
    if any(len(plan.calls) != len(step.calls) for plan in plans):
        raise ValueError(f"the plan is for another number of calls than the {len(step.calls)} of the step")
    order = step.backward_order
    ordered = [replace(plan, calls=tuple(plan.calls[number] for number in order)) for plan in plans]
    return core.joint_plan_times(step.as_one_backward, ordered, factors)


def backward_order(late: Sequence[int], count: int) -> list[int]:
    """Return the numbers of ``count`` calls, in the reversed order of their backwards: the late ones come first."""
    return [*late, *(number for number in range(count) if number not in late)]


def _as_plan(step: Step, found: dict[str, Any]) -> StepPlan:
    ordered = [CallPlan(way, tuple(moved), *more) for way, moved, *more in found.pop("calls")]
    calls = [call for _, call in sorted(zip(step.backward_order, ordered, strict=True), key=itemgetter(0))]
    return StepPlan(calls=tuple(calls), **found)


def plan_step(step: Step, memory_bytes: int, *, timed_as: Step | None = None) -> StepPlan | None:
    """Return the plan of the least time whose peak is at most ``memory_bytes``; None if there is none.

    ``timed_as``: the step whose times the plan is given, if ``step`` assumes other times of the same blocks.
    """
    plans = plan_steps([step], memory_bytes)
    if not plans:
        return None
    return plans[0] if timed_as is None else plans[0].timed_as(timed_as)


def plan_steps(steps: Iterable[Step], memory_bytes: int) -> list[StepPlan]:
    """Return the plan of each step that has one, as ``plan_step`` does. The searches run at the same time."""
    possible = [step for step in steps if step.other_bytes <= memory_bytes]
    all_found = core.joint_plans([step.as_one_backward for step in possible], max(memory_bytes, 0))
    return [_as_plan(step, found) for step, found in zip(possible, all_found, strict=True) if found is not None]


def survey_plan(step: Step, window_bytes: int = 0) -> StepPlan:
    """Return the plan by which a survey runs its steps: the least bytes in each block, and all moves that can."""
    return _as_plan(step, core.least_joint_plan(step.as_one_backward, window_bytes))


def least_plan(step: Step) -> StepPlan:
    """Return the plan of the least memory, to within a thousandth."""
    plan = survey_plan(step)
    # In less memory than with everything moved, some outputs may still stay if there is room at that moment.
    low = max((max(call.forward_bytes, call.backward_bytes) for call in step.calls), default=0)
    high = plan.peak_bytes
    while high - low > high // 1000 + 1:
        middle = (low + high) // 2
        (found,) = core.joint_plans([step.as_one_backward], middle)
        if found is None or found["peak_bytes"] >= high:
            low = middle
        else:
            plan, high = _as_plan(step, found), found["peak_bytes"]
    return plan
