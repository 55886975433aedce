"""From the record of a block to groups of operators, and from a choice for each group to a plan for the block."""

import enum
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torchoffload._core import core
from torchoffload._fit.block.record import PLACES, BlockRecord

__all__ = ["MOST_OPERATORS", "BlockPlan", "Corner", "OperatorGroup", "block_frontier", "group_operators"]

MOST_OPERATORS = 4096  # of a block that can be planned; kMostGroups of the core


@dataclass(frozen=True, kw_only=True)
class OperatorGroup:
    """The operators that write to one storage that the block made: mostly one operator.

    Attributes
    ----------
    operators : tuple of int
        Their numbers in the block.
    duration_ns : int
        How long it takes to compute them again.
    sizes : tuple of int
        The sizes of the storages that they made, in bytes.
    inputs : tuple of int
        The numbers of the groups that they read.
    may_keep, may_recompute : bool
        Whether their outputs can be kept from forward, and whether they can run again.
    is_needed : bool
        Whether autograd saved something that they made.
    """

    operators: tuple[int, ...]
    duration_ns: int
    sizes: tuple[int, ...]
    inputs: tuple[int, ...]
    may_keep: bool
    may_recompute: bool
    is_needed: bool

    @property
    def nbytes(self) -> int:
        """The size of their outputs."""
        return sum(self.sizes)


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """Which values of a block forward keeps. All others that backward needs are made again.

    A plan is advice: a call that calls another operator than planned keeps nothing more from then on.

    Attributes
    ----------
    operators : tuple
        The counted operators of a call, in order.
    kept : frozenset of int
        The numbers of the operators whose outputs are kept from forward.
    moved : frozenset of int
        Those of them whose outputs move to the tier, if a context of torchoffload is open around the block.
    skipped : frozenset of int
        Those whose outputs nobody needs.
    between : frozenset of int
        Those kept operators to all of whose outputs a later one writes: the value that is kept is there after that one.
    rewritten : frozenset of (int, int)
        The other outputs to which a later operator writes: the operator, and the place of the output among the storages
        that the operator makes.
    final : frozenset of int
        Those that are not called again, since their outputs come out differently.
    held : frozenset of (int, int)
        Small outputs that are held, since they come out differently each time: the operator, and the place of the
        output as in ``rewritten``.
    copies_inputs : bool
        Whether a call holds copies of the arguments that autograd does not save, since the program may write to them.
    """

    operators: tuple[Any, ...]
    kept: frozenset[int] = frozenset()
    moved: frozenset[int] = frozenset()
    skipped: frozenset[int] = frozenset()
    between: frozenset[int] = frozenset()
    rewritten: frozenset[tuple[int, int]] = frozenset()
    final: frozenset[int] = frozenset()
    held: frozenset[tuple[int, int]] = frozenset()
    copies_inputs: bool = False

    @cached_property
    def actions(self) -> Any:
        """The plan as the core reads it."""
        names = [tuple(each.name().partition(".")[::2]) for each in self.operators]
        actions = bytes(map(self._action, range(len(names))))
        rewritten, held = (_masks(places, len(names)) for places in (self.rewritten, self.held))
        return core.BlockActions(names, actions, rewritten, held, bool(self.final or self.held))

    def _action(self, number: int) -> int:
        runs_once = _Action.RUNS_ONCE if number in self.final else _Action.NOTHING
        if number not in self.kept or number in self.between:
            return runs_once
        return runs_once | (_Action.MOVE if number in self.moved else _Action.KEEP)


class _Action(enum.IntFlag):
    """The action for an operator; the core's ``BlockActions::Action``, and whether it is not called again."""

    NOTHING = 0
    KEEP = 1
    MOVE = 2
    RUNS_ONCE = 4


def _masks(places: Iterable[tuple[int, int]], count: int) -> list[int]:
    masks = [0] * count
    for number, place in places:
        if place < PLACES:  # an output behind them is kept although a later operator writes to it
            masks[number] |= 1 << place
    return masks


@dataclass(frozen=True, kw_only=True)
class Corner:
    """One of the best plans of a block.

    Attributes
    ----------
    kept_bytes : int
        The bytes of the outputs that are kept.
    recompute_ns : int
        How long the recomputation takes.
    plan : BlockPlan
        The plan.
    """

    kept_bytes: int
    recompute_ns: int
    plan: BlockPlan


class _Union:
    """Disjoint sets of operators; a set is named by its first operator."""

    def __init__(self, count: int) -> None:
        self._parents = list(range(count))

    def find(self, number: int) -> int:
        while self._parents[number] != number:
            self._parents[number] = self._parents[self._parents[number]]
            number = self._parents[number]
        return number

    def join(self, one: int, other: int) -> None:
        low, high = sorted((self.find(one), self.find(other)))
        self._parents[high] = low


class _Groups:
    def __init__(self, record: BlockRecord) -> None:
        self.calls = calls = record.operators
        self.record = record
        self.makers = {storage: number for number, call in enumerate(calls) for storage in call.makes}
        union = _Union(len(calls))
        for number, call in enumerate(calls):
            for storage in call.writes & self.makers.keys():
                union.join(number, self.makers[storage])
        members: defaultdict[int, list[int]] = defaultdict(list)
        for number, call in enumerate(calls):
            if call.makes or call.writes & self.makers.keys():
                members[union.find(number)].append(number)
        self.members = [members[first] for first in sorted(members)]
        self.of_operator = {number: group for group, numbers in enumerate(self.members) for number in numbers}
        # The storages that somebody reads before the last operator has written to them.
        self.read_early = {
            (storage, self.of_operator.get(number))
            for number, call in enumerate(calls)
            for storage, epoch in call.reads
            if epoch < record.epochs[storage]
        }

    def group_of(self, storage: int) -> int | None:
        maker = self.makers.get(storage)
        return None if maker is None else self.of_operator[maker]

    def group(self, group: int) -> OperatorGroup:
        calls = [self.calls[number] for number in self.members[group]]
        made = {storage for call in calls for storage in call.makes}
        read = {self.group_of(storage) for call in calls for storage, _ in call.reads} - {None, group}
        is_held = not made.isdisjoint(self.record.held) or any(call.runs_once for call in calls)
        is_read_early = any(storage in made and reader != group for storage, reader in self.read_early)
        return OperatorGroup(
            operators=tuple(self.members[group]),
            duration_ns=sum(call.duration_ns for call in calls),
            sizes=tuple(self.record.nbytes[storage] for storage in sorted(made)),
            inputs=tuple(sorted(each for each in read if each is not None)),
            may_keep=is_held or not is_read_early,
            may_recompute=not is_held and not any(call.differs for call in calls),
            is_needed=not made.isdisjoint(self.record.saved),
        )


def group_operators(record: BlockRecord) -> list[OperatorGroup] | None:
    """Group the operators of a block by the storages that they write to. None if it cannot be computed again at all."""
    if record.refusal is not None:
        return None
    groups = _Groups(record)
    return [groups.group(group) for group in range(len(groups.members))]


def block_frontier(record: BlockRecord) -> list[Corner]:
    """Return the best plans of a block, from the least bytes to the least time; none if it cannot be computed again."""
    grouped = group_operators(record)
    if grouped is None:
        return []
    corners = []
    for kept_bytes, recompute_ns, kept, recomputed in core.block_frontier(grouped, []):
        plan = _plan(record, grouped, kept, recomputed)
        corners.append(Corner(kept_bytes=kept_bytes, recompute_ns=recompute_ns, plan=plan))
    return corners


def _plan(
    record: BlockRecord, groups: list[OperatorGroup], kept: Iterable[int], recomputed: Iterable[int]
) -> BlockPlan:
    in_groups = {number for group in groups for number in group.operators}
    kept_numbers = {number for group in kept for number in groups[group].operators}
    run = {number for group in recomputed for number in groups[group].operators}
    last: dict[int, int] = {}  # for each storage the last operator that writes to it
    for number, call in enumerate(record.operators):
        last |= dict.fromkeys(call.makes | call.writes, number)
    between = kept_numbers - set(last.values())
    return BlockPlan(
        operators=tuple(call.operator for call in record.operators),
        kept=frozenset(kept_numbers),
        skipped=frozenset(in_groups - kept_numbers - run),
        between=frozenset(between),
        rewritten=frozenset(
            (number, place)
            for number in kept_numbers - between
            for place, storage in enumerate(sorted(record.operators[number].makes))
            if last[storage] != number
        ),
        final=frozenset(
            number
            for group in groups
            if any(record.operators[number].differs for number in group.operators)
            for number in group.operators
        ),
        held=frozenset(
            (number, place)
            for number, call in enumerate(record.operators)
            for place, storage in enumerate(sorted(call.makes))
            if storage in call.held
        ),
        copies_inputs=record.copies_inputs,
    )
