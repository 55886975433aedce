"""The plan for a joint graph: for each value whether it is kept, moved or computed again, within an amount of memory.

The planner is that of ``fit``: a piece of the graph is a call of a block, pieces with the same operators are of one
kind, and a kind has as many ways to run as its frontier of bytes and time has corners. The last way of a kind is
PyTorch's own choice of saved values.
"""

import dataclasses
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from torchoffload._compile.copies import MovedValue, backward_wait_s, forward_wait_s, release_places
from torchoffload._compile.joint_graph import Group, JointGraph, Piece
from torchoffload._compile.lifetimes import Run
from torchoffload._compile.rewrite import numbers_behind
from torchoffload._core import core
from torchoffload._fit.block.graph import MOST_OPERATORS, BlockPlan, OperatorGroup
from torchoffload._fit.machine.link import LinkRates
from torchoffload._fit.plan.step import (
    BlockCall,
    BlockKind,
    CallPlan,
    Output,
    Step,
    StepPlan,
    Way,
    least_plan,
    plan_step,
)
from torchoffload._fit.survey.kinds import hull

__all__ = ["GraphPlan", "PiecePlan", "Room", "plan_graph"]

_ANY_BYTES = 1 << 61
# The amounts of memory that plans are made for, between the least and the most that a graph can use. The plan for a
# given amount is the fastest one of all these that fits: so more memory is never slower.
_LEVELS = 24
# A compiler fuses operators that are computed again with others, and not always as predicted. On a CPU the peaks of
# such plans, without the graph's inputs, were up to 14% higher; the one that was measured on an H200 was 6% higher,
# with its inputs.
_DOUBT = 0.15  # if values only move, the peaks on a CPU were up to 12% higher
_LEAST_AGAIN_S = 1e-7  # PyTorch's own choice is taken unless another one saves bytes
# Forward waits for a copy when this part of the time until its end is over. The largest one that fits is the fastest.
_PARTS = (1.0, 0.5, 0.0)
_DEFAULT_RELOAD_VALUES = 4  # as the core's default windows: so many times the largest value, and at most so many bytes
_DEFAULT_RELOAD_BYTES = 1 << 30
# Unlike in eager mode, each value that is saved moves by itself, also where nothing is computed again.
_BY_VALUE = BlockPlan(operators=())


@dataclass(frozen=True)
class Room:
    """The memory that a graph may use, and the link that its values may move over.

    Attributes
    ----------
    memory_bytes : int
        For all graphs of a step together: inputs, saved values, gradients, and values on the way.
    graphs : int
        How many calls of compiled graphs a step has.
    link : LinkRates or None
        The rates; None if nothing may move.
    least_moved_bytes, tier_bytes : int
        The size below which nothing moves, and the room of the tier.
    offload_window_bytes, reload_window_bytes : int or None
        The windows that the context was given; None if it was given none.
    sets_reload_window : bool
        Whether the context will be given the reload window that the plan says, if it was given none.
    """

    memory_bytes: int
    graphs: int = 1
    link: LinkRates | None = None
    least_moved_bytes: int = 1
    tier_bytes: int = _ANY_BYTES
    offload_window_bytes: int | None = None
    reload_window_bytes: int | None = None
    sets_reload_window: bool = False


@dataclass(frozen=True)
class PiecePlan:
    """The plan for one piece of a graph.

    Attributes
    ----------
    name : str
        The path of its block in the model; empty for the operators before and behind the blocks.
    kept_bytes, moved_bytes : int
        The bytes that stay on the device, and those that move.
    again : tuple of str
        The operators that are computed again, and are not in PyTorch's own plan.
    again_s : float
        How long that takes, as predicted.
    """

    name: str
    kept_bytes: int
    moved_bytes: int
    again: tuple[str, ...]
    again_s: float


@dataclass(frozen=True)
class GraphPlan:
    """The plan for one graph.

    Attributes
    ----------
    pieces : tuple of PiecePlan
        In the order of forward.
    saved : list of fx.Node or None
        The values that forward saves; None if they are PyTorch's own choice.
    releases : dict of str to str or None
        For each value that moves, by its name: the name of the later saved value behind which the graph waits for the
        copy. None: it waits at its end.
    reload_bytes : int
        The reload window.
    predicted_s, predicted_peak_bytes : float, int
        Of forward and backward; the peak has the graph's inputs in it, and the values of other graphs of the step.
    doubt_bytes : int
        The bytes by which the peak may be larger than predicted.
    stock_s, stock_peak_bytes : float, int
        The same for PyTorch's own plan.
    held_bytes : int
        The bytes that the graph holds between its forward and its backward, beside its inputs.
    other_bytes : int
        The bytes that each other graph of the step adds to the peak, if it holds as much as this one.
    input_bytes : int
        The bytes of the graph's inputs, which are in its peak.
    memory_bytes : int
        The memory that the plan was made for.
    is_dynamic : bool
        Whether inputs of other sizes than those that it was planned for may be given to the graph.
    """

    pieces: tuple[PiecePlan, ...]
    saved: list[fx.Node] | None
    releases: dict[str, str | None]
    reload_bytes: int
    predicted_s: float
    predicted_peak_bytes: int
    doubt_bytes: int
    stock_s: float
    stock_peak_bytes: int
    held_bytes: int
    other_bytes: int
    input_bytes: int
    memory_bytes: int
    is_dynamic: bool

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is within the memory."""
        return self.predicted_peak_bytes <= self.memory_bytes

    @property
    def is_tight(self) -> bool:
        """Whether the peak may be larger than the memory. Then no plan takes less."""
        return self.predicted_peak_bytes + self.doubt_bytes > self.memory_bytes


@dataclass(frozen=True)
class _Choice:
    """The values of a piece that a way keeps, by the places of their groups.

    Attributes
    ----------
    way : Way
        The same for the planner.
    kept, again : tuple of int
        The groups that are kept, and those that are computed again.
    is_stock : bool
        Whether it is PyTorch's own choice.
    """

    way: Way
    kept: tuple[int, ...]
    again: tuple[int, ...]
    is_stock: bool


@dataclass(frozen=True)
class _PieceKind:
    """The ways to run pieces that do the same."""

    kind: BlockKind
    choices: tuple[_Choice, ...]
    output_groups: tuple[int, ...]


@dataclass(frozen=True)
class _Candidate:
    """A plan for a step, with the places at which forward waits for copies, and with a reload window."""

    plan: StepPlan
    step_s: float
    peak_bytes: int
    releases: Mapping[fx.Node, fx.Node | None] = field(default_factory=dict)
    reload_bytes: int = 0

    @property
    def order(self) -> tuple[float, int, int]:
        """The better plan is the smaller one."""
        return self.step_s, self.plan.moved_bytes, self.peak_bytes


class _PieceShape:
    """A piece as the frontier of a block takes it."""

    def __init__(self, joint: JointGraph, number: int, piece: Piece) -> None:
        self.piece = piece
        self._joint, self._number = joint, number
        self._places = {group.number: place for place, group in enumerate(piece.groups)}
        self._outside: dict[int, int] = {}
        self.groups = [self._operator_group(place, group) for place, group in enumerate(piece.groups)]
        self.saved = tuple(place for place, group in enumerate(piece.groups) if group.number in joint.saved)

    def _operator_group(self, place: int, group: Group) -> OperatorGroup:
        joint = self._joint
        read_elsewhere = [number for number in group.readers if joint.groups[number].piece != self._number]
        is_fixed = bool(read_elsewhere) and group.number in joint.saved
        is_again = group.number in joint.again
        is_late = group.maker.meta.get("partitioner_tag") == "is_backward"
        return OperatorGroup(
            operators=(place,),
            duration_ns=max(1, round(group.seconds * 1e9)),
            sizes=(group.nbytes,),
            inputs=tuple(sorted(self._places[number] for number in group.inputs if number in self._places)),
            may_keep=bool(joint.values(group)) and (not is_late or group.number in joint.saved),
            may_recompute=not is_fixed and group.may_recompute,
            is_needed=group.number in joint.needed
            or is_fixed
            or any(is_again or number in joint.again for number in read_elsewhere),
        )

    def taken(self, places: Iterable[int]) -> list[int]:
        """Return the groups of other pieces that have to be saved beside PyTorch's own, if these are computed again."""
        joint = self._joint
        read = {number for place in places for number in self.piece.groups[place].inputs}
        return sorted(
            number
            for number in read
            if number not in self._places and number not in joint.saved and number not in joint.again
        )

    def key(self, forward_s: float, backward_s: float) -> tuple[Any, ...]:
        """Return a value that is the same for pieces that do the same."""
        joint = self._joint
        rows = []
        for group, shaped in zip(self.piece.groups, self.groups, strict=True):
            outside = tuple(
                (self._outside.setdefault(number, len(self._outside)), joint.groups[number].nbytes)
                for number in self.taken([self._places[group.number]])
            )
            rows.append((
                str(group.maker.target), len(joint.saved.get(group.number, ())), joint.may_move(group),
                dataclasses.astuple(shaped), group.number in joint.again, outside,
            ))  # fmt: skip
        return tuple(rows), joint.rounded_s(forward_s), joint.rounded_s(backward_s), joint.is_planable(self.piece)


def _kind_of(joint: JointGraph, shape: _PieceShape, forward_s: float, backward_s: float) -> _PieceKind:
    """Return the ways to run a piece, from the least bytes to PyTorch's own choice."""
    groups = shape.piece.groups
    corners: list[tuple[int, int, list[int], list[int]]] = []
    if joint.is_planable(shape.piece) and 0 < len(groups) <= MOST_OPERATORS:
        corners = core.block_frontier(shape.groups, [])
    output_groups = tuple(sorted({*shape.saved, *(place for corner in corners for place in corner[2])}))
    number_of = {place: number for number, place in enumerate(output_groups)}
    ready_s, so_far = [], 0.0
    for group in groups:
        so_far += group.seconds
        ready_s.append(min(so_far, forward_s))
    outputs = tuple(
        Output((groups[place].nbytes,), ready_s[place], may_move=joint.may_move(groups[place]))
        for place in output_groups
    )
    stock_bytes = sum(groups[place].nbytes for place in shape.saved)
    stock_ns = sum(shape.groups[place].duration_ns for place, each in enumerate(groups) if each.number in joint.again)
    stock_way = Way(0.0, tuple(number_of[place] for place in shape.saved), 0, _BY_VALUE)
    choices = [_Choice(stock_way, shape.saved, (), is_stock=True)]
    for kept_bytes, recompute_ns, kept, again in corners:
        taken_bytes = sum(joint.groups[number].nbytes for number in shape.taken(again))
        if kept_bytes + taken_bytes < stock_bytes:
            again_s = max(_LEAST_AGAIN_S, (recompute_ns - stock_ns) * 1e-9)
            way = Way(again_s, tuple(number_of[place] for place in kept), taken_bytes, _BY_VALUE)
            choices.append(_Choice(way, tuple(kept), tuple(again), is_stock=False))
    by_way = {id(choice.way): choice for choice in choices}
    ways = hull([choice.way for choice in choices], outputs)
    kind = BlockKind(forward_s, backward_s, outputs, tuple(ways))
    return _PieceKind(kind, tuple(by_way[id(way)] for way in ways), output_groups)


class _Planner:
    """The search for the plan of one graph."""

    def __init__(self, joint: JointGraph, room: Room) -> None:
        self._joint, self._room = joint, room
        self._shapes = [_PieceShape(joint, number, piece) for number, piece in enumerate(joint.pieces)]
        numbers: dict[Any, int] = {}
        self._kinds: list[_PieceKind] = []
        self._kind_numbers = []
        for shape, *times in zip(self._shapes, joint.forward_s, joint.backward_s, strict=True):
            key = shape.key(*times)
            if key not in numbers:
                numbers[key] = len(self._kinds)
                self._kinds.append(_kind_of(joint, shape, *map(joint.rounded_s, times)))
            self._kind_numbers.append(numbers[key])
        self._step = Step(
            kinds=tuple(each.kind for each in self._kinds),
            calls=self._calls(),
            loss_bytes=joint.input_bytes + joint.gradient_bytes + joint.output_bytes,
            may_move=False,
        )

    def _calls(self) -> tuple[BlockCall, ...]:
        """Return the pieces with the memory that each takes: the most by PyTorch's plan and by the one of least bytes.

        The planner goes by these; the peak of a plan that it finds is reckoned by ``_candidates``.
        """
        joint = self._joint
        least = [kind.choices[0] for kind in (self._kinds[number] for number in self._kind_numbers)]
        ways = joint.bytes_of_pieces(joint.stock), joint.bytes_of_pieces(self._saved(least, [()] * len(least)))
        forward_bytes, backward_bytes = (
            [max(each) for each in zip(*both, strict=True)] for both in zip(*ways, strict=True)
        )
        return tuple(
            BlockCall(number, joint.input_bytes + forward, joint.input_bytes + backward)
            for number, forward, backward in zip(self._kind_numbers, forward_bytes, backward_bytes, strict=True)
        )

    def _saved(self, choices: Iterable[_Choice], moved: Iterable[Collection[int]]) -> list[fx.Node]:
        """Return the values that are saved beside the graph's inputs, if each piece goes one way.

        ``moved``: the places of the groups of each piece that move.
        """
        joint = self._joint
        saved: list[fx.Node] = []
        taken: set[int] = set()
        for shape, choice, places in zip(self._shapes, choices, moved, strict=True):
            saved += [node for place in choice.kept for node in self._values(shape, place, choice, place in places)]
            taken.update(shape.taken(choice.again))
        more = [node for number in sorted(taken) for node in joint.values(joint.groups[number])]
        return list(dict.fromkeys([*saved, *more]))

    @property
    def _moving_step(self) -> Step | None:
        """The step in which values move; None if none may. Its reload window is the context's, whatever the plan."""
        room = self._room
        if room.link is None:
            return None
        largest = max((out.nbytes for kind in self._step.kinds for out in kind.outputs if out.may_move), default=0)
        if largest < room.least_moved_bytes:
            return None
        window = self._reload_windows(largest)[0]
        return dataclasses.replace(
            self._step,
            calls=tuple(
                BlockCall(each.kind, each.forward_bytes, each.backward_bytes + window) for each in self._step.calls
            ),
            least_moved_bytes=max(1, room.least_moved_bytes),
            tier_bytes=room.tier_bytes,
            may_move=True,
            out_bytes_per_s=room.link.out_bytes_per_s,
            in_bytes_per_s=room.link.in_bytes_per_s,
            latency_s=room.link.latency_s,
        )

    def _reload_windows(self, largest: int, moved_bytes: int = 0) -> list[int]:
        """Return the reload windows to choose from: the context's, and wider ones if it will be given the plan's."""
        if self._room.reload_window_bytes is not None:
            return [self._room.reload_window_bytes]
        own = max(largest, min(_DEFAULT_RELOAD_VALUES * largest, _DEFAULT_RELOAD_BYTES))
        wider = [_DEFAULT_RELOAD_VALUES * largest, moved_bytes] if self._room.sets_reload_window else []
        return [own, *(nbytes for nbytes in wider if nbytes > own)]

    def _candidates(self, plan: StepPlan) -> Iterator[_Candidate]:
        """Yield the ways to carry out a plan, with their peaks while all graphs of the step hold as much as this one.

        The planner times copies by pieces. Here they are timed by values.
        """
        joint, room = self._joint, self._room
        saved, moved = self._saved_by(plan)
        compute_s = self._compute_s(plan)
        others_bytes = (room.graphs - 1) * self._other_bytes(plan)
        forward, backward = joint.forward(saved, moved), joint.backward(saved, moved)
        if not moved or room.link is None:
            own_bytes = max(forward.peak_bytes, self._backward_bytes(backward, saved, moved, 0))
            yield _Candidate(plan, compute_s, joint.input_bytes + own_bytes + others_bytes)
            return
        forward_s, backward_s = joint.seconds(forward), joint.seconds(backward)
        made = {node: place for place, node in enumerate(forward.nodes)}
        stops = sorted(made[node] for node in saved if node in made)
        read = [[backward.begins[each] for each in joint.buffers([node]) if each in backward.begins] for node in moved]
        values = [
            MovedValue(joint.group_of[node].nbytes, made[node], min(places, default=0))
            for node, places in zip(moved, read, strict=True)
        ]
        moved_bytes = sum(each.nbytes for each in values)
        windows = [
            (window, backward_wait_s(values, backward_s, room.link, window),
             self._backward_bytes(backward, saved, moved, window))
            for window in self._reload_windows(max(each.nbytes for each in values), moved_bytes)
        ]  # fmt: skip
        for part in _PARTS if room.offload_window_bytes is None else _PARTS[:1]:
            if room.offload_window_bytes is None:
                places = release_places(values, stops, forward_s, room.link, part)
            else:
                later = numbers_behind([each.nbytes for each in values], room.offload_window_bytes)
                places = [None if number is None else values[number].made for number in later]
            wait_s = forward_wait_s(values, places, forward_s, room.link)
            held = {
                number: len(forward.nodes) if place is None else place
                for node, place in zip(moved, places, strict=True)
                for number in joint.buffers([node])
            }
            forward_bytes = forward.peak_bytes_if_held(held, joint.nbytes_of)
            behind = (None if place is None else forward.nodes[place] for place in places)
            releases = dict(zip(moved, behind, strict=True))
            for window, reload_s, backward_bytes in windows:
                peak_bytes = joint.input_bytes + max(forward_bytes, backward_bytes) + others_bytes
                yield _Candidate(plan, compute_s + wait_s + reload_s, peak_bytes, releases, window)

    def _backward_bytes(self, backward: Run, saved: list[fx.Node], moved: list[fx.Node], window_bytes: int) -> int:
        """Return the peak of backward: before it reads a value that moved, that may be ahead in the reload window."""
        joint = self._joint
        ahead = [0] * (len(backward.nodes) + 1)
        for number in joint.buffers(moved) & backward.begins.keys():
            ahead[backward.begins[number]] += joint.nbytes_of(number)
        coming_bytes = most = 0
        for alive_bytes, begins in zip(reversed(backward.alive_bytes), reversed(ahead[:-1]), strict=True):
            most = max(most, alive_bytes + min(coming_bytes, window_bytes))
            coming_bytes += begins
        at_loss = joint.buffer_bytes(saved) - joint.buffer_bytes(moved) + min(coming_bytes, window_bytes)
        return max(most, at_loss) + joint.gradient_bytes

    def _other_bytes(self, plan: StepPlan) -> int:
        return self._held_bytes(plan) + self._joint.input_bytes

    @staticmethod
    def _held_bytes(plan: StepPlan) -> int:
        return plan.kept_bytes + plan.loss_window_bytes

    def _others(self, stock: StepPlan) -> Iterator[StepPlan]:
        """Yield the plans of less memory; they do not depend on the memory that is given."""
        for step in (self._step, self._moving_step):
            if step is None:
                continue
            least = least_plan(step)
            yield least
            low, high = step.peak_bytes(least), stock.peak_bytes
            for level in range(1, _LEVELS):
                plan = plan_step(step, low + (high - low) * level // _LEVELS) if high > low else None
                if plan is not None:
                    yield plan

    def plan(self) -> GraphPlan:
        """Return the fastest plan within the memory, or if none is, the one of the least memory."""
        stock = plan_step(self._step, _ANY_BYTES)
        if stock is None:
            raise AssertionError("a step without a limit of memory has a plan")
        memory_bytes = self._room.memory_bytes
        (own,) = self._candidates(stock)
        if own.peak_bytes <= memory_bytes:
            return self._carried_out(own, own)
        found, best = [own], None
        others = {each.calls: each for each in self._others(stock)}.values()  # levels may have the same plan
        for least_s, plan in sorted(((self._least_s(each), each) for each in others), key=operator.itemgetter(0)):
            if best is not None and best.step_s < least_s:
                break
            candidates = list(self._candidates(plan))
            found += candidates
            fitting = [each for each in candidates if each.peak_bytes + self._doubt_bytes(each) <= memory_bytes]
            best = min(fitting if best is None else [best, *fitting], key=lambda each: each.order, default=None)
        return self._carried_out(best or min(found, key=lambda each: (each.peak_bytes, *each.order)), own)

    def _least_s(self, plan: StepPlan) -> float:
        """Return a time that no way to carry out a plan is below: of computing, or of all copies."""
        forward_s = sum(self._step.kinds[call.kind].forward_s for call in self._step.calls)
        backward_s = self._compute_s(plan) - forward_s
        if self._room.link is not None:
            forward_s = max(forward_s, plan.moved_bytes / self._room.link.out_bytes_per_s)
            backward_s = max(backward_s, plan.moved_bytes / self._room.link.in_bytes_per_s)
        return (1 - 1e-9) * (forward_s + backward_s)  # sums are rounded

    def _compute_s(self, plan: StepPlan) -> float:
        """Return how long computing takes by a plan."""
        kinds = [self._step.kinds[call.kind] for call in self._step.calls]
        again_s = sum(choice.way.recompute_s for _, _, choice, _ in self._chosen(plan))
        return sum(kind.forward_s + kind.backward_s for kind in kinds) + again_s

    def _doubt_bytes(self, candidate: _Candidate) -> int:
        """Return the bytes by which the peak may be larger than predicted: none by PyTorch's own plan."""
        if not candidate.releases and not any(choice.again for _, _, choice, _ in self._chosen(candidate.plan)):
            return 0
        return int(_DOUBT * max(0, candidate.peak_bytes - self._joint.input_bytes))

    # ---- from the plan of a step to values ----

    def _chosen(self, plan: StepPlan) -> Iterator[tuple[_PieceShape, _PieceKind, _Choice, CallPlan]]:
        for shape, call, planned in zip(self._shapes, self._step.calls, plan.calls, strict=True):
            kind = self._kinds[call.kind]
            yield shape, kind, kind.choices[planned.way], planned

    def _values(self, shape: _PieceShape, place: int, choice: _Choice, moves: bool) -> Sequence[fx.Node]:
        """Return the values that are saved of a group: PyTorch's own, but of several views that move their base."""
        group = shape.piece.groups[place]
        if not choice.is_stock:
            return self._joint.values(group)
        return self._joint.moved_values(group) if moves else self._joint.saved[group.number]

    def _carried_out(self, candidate: _Candidate, stock: _Candidate) -> GraphPlan:
        plan = candidate.plan
        pieces = []
        for shape, kind, choice, planned in self._chosen(plan):
            groups = shape.piece.groups
            moved_bytes = sum(groups[kind.output_groups[number]].nbytes for number in planned.moved)
            again = [groups[place] for place in choice.again if groups[place].number not in self._joint.again]
            again = [group for group in again if group.maker.target is not operator.getitem]
            pieces.append(PiecePlan(
                # The model is "self" of a method to Dynamo, or "fn" if it compiles the module's call.
                shape.piece.name.removeprefix("L.self.").removeprefix("L.fn."),
                sum(groups[place].nbytes for place in choice.kept) + choice.way.input_bytes - moved_bytes,
                moved_bytes,
                tuple(str(group.maker.target).removeprefix("aten.") for group in again),
                choice.way.recompute_s,
            ))  # fmt: skip
        saved, _ = self._saved_by(plan)
        return GraphPlan(
            pieces=tuple(pieces),
            saved=None if self._joint.is_stock(saved) else saved,
            releases={node.name: None if later is None else later.name for node, later in candidate.releases.items()},
            reload_bytes=candidate.reload_bytes,
            predicted_s=candidate.step_s,
            predicted_peak_bytes=candidate.peak_bytes,
            doubt_bytes=self._doubt_bytes(candidate),
            stock_s=stock.step_s,
            stock_peak_bytes=stock.peak_bytes,
            held_bytes=self._held_bytes(plan),
            other_bytes=self._other_bytes(plan),
            input_bytes=self._joint.input_bytes,
            memory_bytes=self._room.memory_bytes,
            is_dynamic=self._joint.is_dynamic,
        )

    def _saved_by(self, plan: StepPlan) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return the values that a plan saves beside the graph's inputs, and those of them that move, in order."""
        chosen = list(self._chosen(plan))
        places = [[kind.output_groups[number] for number in planned.moved] for _, kind, _, planned in chosen]
        moved = [
            node
            for (shape, _, choice, _), of_piece in zip(chosen, places, strict=True)
            for place in of_piece
            for node in self._values(shape, place, choice, moves=True)
        ]
        return self._saved([choice for _, _, choice, _ in chosen], places), self._joint.in_order(moved)


def plan_graph(joint: JointGraph, room: Room) -> GraphPlan:
    """Return the plan for a graph, given the memory that there is."""
    return _Planner(joint, room).plan()
