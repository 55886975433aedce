"""From the record of a block to groups of operators, and from what is chosen for the groups to a plan for the block."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torchoffload._core import core
from torchoffload._fit.record import BlockRecord, OperatorCall

__all__ = ["BlockPlan", "Corner", "OperatorGroup", "frontier", "group_operators"]


@dataclass(frozen=True, kw_only=True)
class OperatorGroup:
    """The operators that write to one storage that the block made: mostly one operator.

    Attributes
    ----------
    operators : tuple of int
        Their numbers in the block.
    duration_ns : int
        How long it takes to compute them again.
    nbytes : int
        The size of what they made.
    inputs : tuple of int
        The numbers of the groups that they read.
    may_keep, may_recompute : bool
        Whether what they made can be kept from forward, and whether they can run again.
    is_needed : bool
        Whether autograd saved something that they made.
    """

    operators: tuple[int, ...]
    duration_ns: int
    nbytes: int
    inputs: tuple[int, ...]
    may_keep: bool
    may_recompute: bool
    is_needed: bool


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """What a block's recomputation does in the place of each operator. An operator that is in no set runs again.

    Attributes
    ----------
    operators : tuple
        The counted operators of a call, in order. What differs from them runs again, with all that comes after it.
    kept : frozenset of int
        The numbers of the operators whose outputs are kept from forward.
    moved : frozenset of int
        Those of them whose outputs move to the tier, where a context of torchoffload is open around the block.
    skipped : frozenset of int
        Those whose outputs nobody needs.
    passed : frozenset of int
        Those that write outside of the block and return their argument: they do not write again.
    draws : frozenset of int
        Those that draw random numbers.
    effects : frozenset of int
        Those that write outside of the block.
    """

    operators: tuple[Any, ...]
    kept: frozenset[int] = frozenset()
    moved: frozenset[int] = frozenset()
    skipped: frozenset[int] = frozenset()
    passed: frozenset[int] = frozenset()
    draws: frozenset[int] = frozenset()
    effects: frozenset[int] = frozenset()


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
        self.outside = {storage for call in calls for storage in call.writes if storage not in self.makers}
        self.effects = {number for number, call in enumerate(calls) if call.writes & self.outside}
        union = _Union(len(calls))
        for number, call in enumerate(calls):
            for storage in call.writes - self.outside:
                union.join(number, self.makers[storage])
        members: defaultdict[int, list[int]] = defaultdict(list)
        for number, call in enumerate(calls):
            if call.makes or call.writes - self.outside:
                members[union.find(number)].append(number)
        self.members = [members[first] for first in sorted(members)]
        self.of_operator = {number: group for group, numbers in enumerate(self.members) for number in numbers}

    def group_of(self, storage: int) -> int | None:
        maker = self.makers.get(storage)
        return None if maker is None else self.of_operator[maker]

    def group(self, group: int) -> OperatorGroup:
        calls = [self.calls[number] for number in self.members[group]]
        made = {storage for call in calls for storage in call.makes}
        read = {self.group_of(storage) for call in calls for storage in call.reads} - {None, group}
        nbytes = sum(self.record.nbytes[storage] for storage in made)
        reads_or_writes_outside = any(call.reads & self.outside for call in calls)  # what it writes it reads, too
        return OperatorGroup(
            operators=tuple(self.members[group]),
            duration_ns=sum(call.duration_ns for call in calls),
            nbytes=nbytes,
            inputs=tuple(sorted(each for each in read if each is not None)),
            may_keep=len(calls) == 1 and _returns_what_it_made(calls[0]),
            may_recompute=not reads_or_writes_outside,
            is_needed=not made.isdisjoint(self.record.saved),
        )


def _returns_what_it_made(call: OperatorCall) -> bool:
    return call.returns == call.makes


def group_operators(record: BlockRecord) -> tuple[list[OperatorGroup], list[int]] | None:
    """Group the operators of a block by the storages that they write to.

    Returns
    -------
    tuple of (list of OperatorGroup, list of int), or None
        The groups, and the numbers of those that draw random numbers in the order of drawing. None where the block
        cannot be computed again at all: it writes to its own inputs, it writes outside of itself by an operator that
        returns something which is neither new nor an argument, or it draws random numbers into what is not its own.
    """
    groups = _Groups(record)
    if groups.outside & record.inputs:
        return None
    for number in groups.effects:
        call = record.operators[number]
        if number not in groups.of_operator and not call.returns_arguments:
            return None
    draws = []
    for number, call in enumerate(record.operators):
        if call.draws:
            if number not in groups.of_operator or number in groups.effects:
                return None
            draws.append(groups.of_operator[number])
    return [groups.group(group) for group in range(len(groups.members))], draws


def frontier(record: BlockRecord) -> list[Corner]:
    """Return the best plans of a block, from the least bytes to the least time; none if it cannot be computed again."""
    grouped = group_operators(record)
    if grouped is None:
        return []
    groups, draws = grouped
    corners = []
    for kept_bytes, recompute_ns, kept, recomputed in core.block_frontier(groups, draws):
        plan = _plan(record, groups, kept, recomputed)
        corners.append(Corner(kept_bytes=kept_bytes, recompute_ns=recompute_ns, plan=plan))
    return corners


def _plan(
    record: BlockRecord, groups: list[OperatorGroup], kept: Iterable[int], recomputed: Iterable[int]
) -> BlockPlan:
    in_groups = {number for group in groups for number in group.operators}
    kept_numbers = {number for group in kept for number in groups[group].operators}
    run = {number for group in recomputed for number in groups[group].operators}
    made = {storage for call in record.operators for storage in call.makes}
    passed, effects = set(), set()
    for number, call in enumerate(record.operators):
        if not call.writes <= made:
            effects.add(number)
        if number in in_groups:
            continue
        if number in effects:
            passed.add(number)
        elif not call.returns:
            kept_numbers.add(number)  # a number for the program, or a check that has passed: it holds no memory
    return BlockPlan(
        operators=tuple(call.operator for call in record.operators),
        kept=frozenset(kept_numbers),
        skipped=frozenset(in_groups - kept_numbers - run),
        passed=frozenset(passed),
        draws=frozenset(number for number, call in enumerate(record.operators) if call.draws),
        effects=frozenset(effects),
    )
