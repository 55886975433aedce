"""From the record of a block to groups of operators, and from what is chosen for the groups to a plan for the block."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torchoffload._core import core
from torchoffload._fit.record import BlockRecord, OperatorCall

__all__ = ["MOST_OPERATORS", "BlockPlan", "Corner", "OperatorGroup", "frontier", "group_operators"]

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
        Whether what they made can be kept from forward, and whether they can run again.
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
        """The size of what they made."""
        return sum(self.sizes)


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
    final : frozenset of int
        Those that cannot run again, because they read or write what the block writes outside of itself.
    draws : frozenset of int
        Those that draw random numbers.
    scalars : dict of int to tuple
        For operators that PyTorch does not know, the numbers and the like among their arguments.
    """

    operators: tuple[Any, ...]
    kept: frozenset[int] = frozenset()
    moved: frozenset[int] = frozenset()
    skipped: frozenset[int] = frozenset()
    final: frozenset[int] = frozenset()
    draws: frozenset[int] = frozenset()
    scalars: dict[int, tuple[Any, ...]] = field(default_factory=dict, hash=False)

    @cached_property
    def special(self) -> bytes:
        """For each operator 1 if forward has to do something about it, and else 0."""
        numbers = self.kept | self.skipped | self.scalars.keys()
        return bytes(number in numbers for number in range(len(self.operators)))


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
        self.outside = {storage for call in calls for storage in call.writes} - record.made
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

    def raises_versions(self) -> set[int]:
        """Return the storages outside of the block that are written to by operators that raise their versions."""
        return {
            storage for call in self.calls if _raises_versions(call.operator) for storage in call.writes & self.outside
        }

    def group_of(self, storage: int) -> int | None:
        maker = self.makers.get(storage)
        return None if maker is None else self.of_operator[maker]

    def group(self, group: int) -> OperatorGroup:
        calls = [self.calls[number] for number in self.members[group]]
        made = {storage for call in calls for storage in call.makes}
        read = {self.group_of(storage) for call in calls for storage in call.reads} - {None, group}
        return OperatorGroup(
            operators=tuple(self.members[group]),
            duration_ns=sum(call.duration_ns for call in calls),
            sizes=tuple(self.record.nbytes[storage] for storage in sorted(made)),
            inputs=tuple(sorted(each for each in read if each is not None)),
            may_keep=len(calls) == 1 and _returns_what_it_made(calls[0]) and not calls[0].leaves_uninitialised,
            # What an operator writes it reads, too.
            may_recompute=not any(call.reads & self.outside or call.takes_generator for call in calls),
            is_needed=not made.isdisjoint(self.record.saved),
        )


def _raises_versions(operator: Any) -> bool:
    return bool(getattr(getattr(operator, "_schema", None), "is_mutable", False))


def _returns_what_it_made(call: OperatorCall) -> bool:
    return call.returns == call.makes


def group_operators(record: BlockRecord) -> tuple[list[OperatorGroup], list[int]] | None:
    """Group the operators of a block by the storages that they write to.

    Returns
    -------
    tuple of (list of OperatorGroup, list of int), or None
        The groups, and the numbers of those that draw random numbers in the order of drawing. None where the block
        cannot be computed again at all: it writes to a tensor from outside that is no parameter or buffer, or to one
        that autograd saves; it writes to something in a way that PyTorch does not see; or it draws random numbers into
        what is not its own.
    """
    groups = _Groups(record)
    if record.has_hidden_writes or not groups.outside <= record.own or groups.raises_versions() & record.saved:
        return None
    draws = []
    for number, call in enumerate(record.operators):
        if call.draws and not call.takes_generator:
            if number not in groups.of_operator or call.writes & groups.outside:
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
    calls = list(enumerate(record.operators))
    # A number for the program, or a check that has passed: to keep it takes no memory.
    kept_numbers |= {number for number, call in calls if number not in in_groups and not call.returns_tensors}
    return BlockPlan(
        operators=tuple(call.operator for call in record.operators),
        kept=frozenset(kept_numbers),
        skipped=frozenset(in_groups - kept_numbers - run),
        final=frozenset(number for group in groups if not group.may_recompute for number in group.operators),
        draws=frozenset(number for number, call in calls if call.draws),
        scalars={number: call.scalars for number, call in calls if call.scalars is not None},
    )
