"""A surveyed step's times and bytes, in numbers: of one process, or of several ranks together."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchoffload._fit.block.record import BlockRecord

__all__ = ["HostTimes", "Measured", "MeasuredKind", "structure_of", "together"]


class HostTimes(NamedTuple):
    """The time that the host takes to enqueue a block that is computed again.

    Attributes
    ----------
    forward_s, backward_s : float
        In forward, and in backward with the recomputation.
    """

    forward_s: float
    backward_s: float


@dataclass(frozen=True, kw_only=True)
class MeasuredKind:
    """The measured times and sizes of the blocks of one kind.

    Attributes
    ----------
    structure : str
        A digest of their operators.
    obstacle : str or None
        Why none of them can be computed again; None if they can.
    durations_ns : tuple of int
        How long each operator takes.
    sizes : tuple of int
        The bytes of each storage, by its number.
    forward_s, backward_s : float
        How long they take.
    host : HostTimes
        The time that the host takes for a call that is computed again.
    input_bytes : int
        The bytes of the arguments that are its own.
    """

    structure: str
    obstacle: str | None
    durations_ns: tuple[int, ...]
    sizes: tuple[int, ...]
    forward_s: float
    backward_s: float
    host: HostTimes
    input_bytes: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measured times and bytes of a step.

    Attributes
    ----------
    kinds : tuple of MeasuredKind
        The kinds of blocks.
    calls : tuple of (int, int, int or None)
        For each call the number of its kind, and the most bytes in its forward and in its backward; None if the
        backward was not seen.
    times_s : tuple of float
        Before the first block, between the last block's forward and its backward, and at the end.
    loss_bytes, other_bytes : int
        The most on the device between forward and backward, and outside of both.
    fixed : dict of str to int
        The bytes that every plan takes, by their names for messages.
    late : tuple of int
        The numbers of the calls whose backward begins behind the step's first backward.
    between : tuple of tuple of int
        The calls behind the first backward and those behind each later one, if any call is late: for each, the number
        of the call that it repeats.
    between_bytes : int
        The most on the device while they run.
    between_waits : bool
        Whether some of them wait for their backward while a late call runs its own.
    """

    kinds: tuple[MeasuredKind, ...]
    calls: tuple[tuple[int, int, int | None], ...]
    times_s: tuple[float, float, float]
    loss_bytes: int
    other_bytes: int
    fixed: dict[str, int]
    late: tuple[int, ...] = ()
    between: tuple[tuple[int, ...], ...] = ()
    between_bytes: int = 0
    between_waits: bool = False


def structure_of(record: BlockRecord) -> str:
    """Return a digest of the operators of a block, without sizes and times."""
    told = [
        (str(call.operator), *(sorted(numbers) for numbers in (call.reads, call.makes, call.writes)), call.draws)
        for call in record.operators
    ]
    return hashlib.sha256(repr((told, sorted(record.saved & record.made))).encode()).hexdigest()


def together(all_measured: Sequence[Measured]) -> Measured:
    """Return the largest numbers of several ranks. RuntimeError if their steps are made of different blocks."""
    first = all_measured[0]
    for other in all_measured[1:]:
        is_alike = [kind.structure for kind in other.kinds] == [kind.structure for kind in first.kinds]
        if not is_alike or [call[0] for call in other.calls] != [call[0] for call in first.calls]:
            raise RuntimeError(
                "torchoffload.fit: ranks whose blocks communicate with each other call different blocks, or blocks "
                "that call different operators. They cannot follow one plan: give fit group=None on all of them, so "
                "that no block that communicates is computed again."
            )
    kinds = tuple(_largest_kind([each.kinds[number] for each in all_measured]) for number in range(len(first.kinds)))
    calls = tuple(_largest_call([each.calls[number] for each in all_measured]) for number in range(len(first.calls)))
    head_s, loss_s, end_s = (max(each.times_s[place] for each in all_measured) for place in range(3))
    return Measured(
        kinds=kinds,
        calls=calls,
        times_s=(head_s, loss_s, end_s),
        loss_bytes=max(each.loss_bytes for each in all_measured),
        other_bytes=max(each.other_bytes for each in all_measured),
        fixed={name: max(each.fixed[name] for each in all_measured) for name in first.fixed},
        late=tuple(sorted({number for each in all_measured for number in each.late})),
        between=max((each.between for each in all_measured), key=lambda calls: sum(map(len, calls))),
        between_bytes=max(each.between_bytes for each in all_measured),
        between_waits=any(each.between_waits for each in all_measured),
    )


def _largest_kind(kinds: list[MeasuredKind]) -> MeasuredKind:
    return MeasuredKind(
        structure=kinds[0].structure,
        obstacle=next((kind.obstacle for kind in kinds if kind.obstacle is not None), None),
        durations_ns=tuple(map(max, zip(*(kind.durations_ns for kind in kinds), strict=True))),
        sizes=tuple(map(max, zip(*(kind.sizes for kind in kinds), strict=True))),
        forward_s=max(kind.forward_s for kind in kinds),
        backward_s=max(kind.backward_s for kind in kinds),
        host=HostTimes(max(kind.host.forward_s for kind in kinds), max(kind.host.backward_s for kind in kinds)),
        input_bytes=max(kind.input_bytes for kind in kinds),
    )


def _largest_call(calls: list[tuple[int, int, int | None]]) -> tuple[int, int, int | None]:
    backward = [each[2] for each in calls if each[2] is not None]
    return calls[0][0], max(each[1] for each in calls), max(backward) if backward else None
