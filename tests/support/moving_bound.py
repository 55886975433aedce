"""moving_bound.py: a time that no plan of a step beats in which things move, by a linear program.

To go through all plans is exact, and is for steps of a few blocks. A linear program takes a fraction of a second for
any step. It comes the nearer to what plans do, the more blocks there are and the more room for windows.
"""

import dataclasses
from collections.abc import Sequence

from plan_oracle import MIB, MS, UNLIMITED, MemoryRows, Program, Terms, of_call, records, times, total
from torchoffload._fit.step import Kind, Step


@dataclasses.dataclass(frozen=True)
class Window:
    """Of which sizes windows are, and what follows from that."""

    least_mib: float = 0.0
    most_mib: float = UNLIMITED
    holds_any: bool = True  # it has room for a record
    holds_each: bool = True  # it has room for one of each kind's records


@dataclasses.dataclass
class _Call:
    """A call in the linear program: of each way the parts that stay and that move, and what moves of its outputs."""

    stays: list[int]
    moves: list[int]
    records: list[tuple[float, float, int]]  # when it is there, its MiB, and the variable of the part that moves

    @property
    def moved(self) -> dict[int, float]:
        """The MiB that move."""
        return total(*({part: mib} for _, mib, part in self.records))


class _Bound:
    """A linear program that no plan beats whose windows are of such a size. See `bound_with_moving`."""

    def __init__(self, step: Step, memory_bytes: int, sizes: Window) -> None:
        self.step, self.program, self.sizes = step, Program(), sizes
        self.window = self.program.variable(most=sizes.most_mib)
        self.program.at_least({self.window: 1}, sizes.least_mib)
        self.memory = MemoryRows(self.program, step, memory_bytes, {self.window: 1.0})
        self.out_ms, self.in_ms = (MIB / rate / MS for rate in (step.out_bytes_per_s, step.in_bytes_per_s))  # of a MiB
        self.calls = [self._place(number) for number in range(len(step.calls))]
        self.memory.at_loss()
        self.program.at_most(total(*(call.moved for call in self.calls)), step.tier_bytes / MIB)

    def _place(self, number: int) -> _Call:
        program, step, kind = self.program, self.step, of_call(self.step, number)
        stays, moves = ([program.variable(most=1.0) for _ in kind.ways] for _ in range(2))
        program.one_of([*stays, *moves])
        placed = _Call(stays, moves, [])
        for way, moving in zip(kind.ways, moves, strict=True):
            for nbytes, ready_s in records(step, kind, way, ()):
                placed.records.append((ready_s / MS, nbytes / MIB, moving))
            for output in way.kept:
                part = moving
                if not way.is_plain:
                    part = program.variable(most=1.0)
                    program.at_most({part: 1, moving: -1}, 0)
                for nbytes, ready_s in records(step, kind, dataclasses.replace(way, input_bytes=0), (output,)):
                    placed.records.append((ready_s / MS, nbytes / MIB, part))
        assert all(ready_ms <= kind.forward_s / MS + 1e-9 for ready_ms, _, _ in placed.records)
        self.memory.before(number)
        mib = [kind.kept_bytes(way) / MIB for way in kind.ways]
        kept = total(dict(zip(stays, mib, strict=True)), dict(zip(moves, mib, strict=True)))
        self.memory.after(number, total(kept, times(-1, placed.moved)))
        return placed

    def _no_earlier(self, later: int, *parts: Terms) -> None:
        """`later` is at least the sum of the parts."""
        self.program.at_most(total({later: -1}, *parts), 0)

    def _forward(self) -> int:
        """The end of forward. Copies follow each other, and at the end of a call at most a window of them is left."""
        program = self.program
        clock, link = program.variable(), program.variable()
        program.at_least({clock: 1}, self.step.head_s / MS)
        for number, call in enumerate(self.calls):
            forward_ms = of_call(self.step, number).forward_s / MS
            end = program.variable()
            waited = {} if self.sizes.holds_any else times(-self.out_ms, call.moved)  # without room each copy is
            program.at_least(total({end: 1, clock: -1}, waited), forward_ms)
            for moment in sorted({ready for ready, _, _ in call.records}):
                made = total(*({part: mib} for ready, mib, part in call.records if ready == moment))
                copied = program.variable()
                self._no_earlier(copied, {link: 1}, times(self.out_ms, made))
                for part in made:
                    self._no_earlier(copied, {clock: 1, part: moment}, times(self.out_ms, made))
                    self._no_earlier(end, {copied: 1, part: forward_ms - moment, self.window: -self.out_ms})
                link = copied
            clock = end
        return clock

    def _backward(self, clock: int) -> int:
        """The end of the backward of the first call, where forward ends at `clock`.

        Reloads begin as backward asks for the first record. When it asks for what a call keeps, at most a window of
        what later asks want is on its way. What was still on its way out at the loss is not reloaded.
        """
        program, sources = self.program, []
        ask = program.variable()
        program.at_least({ask: 1, clock: -1}, self.step.loss_s / MS)
        since_ask = since_loss = ask
        behind: list[tuple[_Call, int]] = []  # the calls behind this one in forward, and what they used at the source
        for number in reversed(range(len(self.calls))):
            call, kind = self.calls[number], of_call(self.step, number)
            source = program.variable()
            sources.append(source)
            program.at_most(total({source: 1}, times(-1, call.moved)), 0)
            reloaded = times(self.in_ms, total(call.moved, {source: -1}))
            from_ask, from_loss = program.variable(), program.variable()
            self._no_earlier(from_ask, {ask: 1}, reloaded, times(self.in_ms, self._held_by_last_ask(behind)))
            self._no_earlier(from_ask, {since_ask: 1}, reloaded)
            self._no_earlier(from_loss, {since_loss: 1}, reloaded)
            end = program.variable()
            whole, last = self._rests(call, kind)
            self._no_earlier(end, {ask: 1}, whole)
            self._no_earlier(end, {from_ask: 1, self.window: -self.in_ms}, last)
            self._no_earlier(end, {from_loss: 1}, last)
            ask, since_ask, since_loss = end, from_ask, from_loss
            behind.append((call, source))
        program.at_most(total(dict.fromkeys(sources, 1.0), {self.window: -1}), 0)
        return ask

    def _held_by_last_ask(self, behind: Sequence[tuple[_Call, int]]) -> dict[int, float]:
        """At least so many MiB of the reload window were taken by what was asked for last, if it was reloaded.

        Of a plain call the arguments are asked for as the next call begins, and may come behind what that one asks for.
        """
        last_two = behind[-2:]
        if not self.sizes.holds_each or not last_two or not last_two[-1][0].records:
            return {}
        least = min(mib for call, _ in last_two for _, mib, _ in call.records)
        return total(dict.fromkeys(last_two[-1][0].moves, least), *({source: -1.0} for _, source in last_two))

    def _rests(self, call: _Call, kind: Kind) -> tuple[dict[int, float], dict[int, float]]:
        """By part: what backward takes, and what of it is left as it asks for the last thing that moved."""
        whole, last = {}, {}
        for way, stays, moves in zip(kind.ways, call.stays, call.moves, strict=True):
            whole[stays] = whole[moves] = last[stays] = last[moves] = (way.recompute_s + kind.backward_s) / MS
            moments = [ready_s for _, ready_s in records(self.step, kind, way, way.kept)]
            if way.is_plain and moments:
                last[moves] = min(moments) / kind.forward_s * kind.backward_s / MS if kind.forward_s > 0 else 0.0
        return whole, last

    def least(self) -> float | None:
        end = self.program.variable(cost=1.0)
        self.program.at_least({end: 1, self._backward(self._forward()): -1}, self.step.end_s / MS)
        found = self.program.least()
        return None if found is None else found * MS


def bound_with_moving(step: Step, memory_bytes: int) -> float | None:
    """A time in seconds that no plan of the step beats, whatever moves; None if nothing fits.

    The rules are those of a plan, with parts of ways and of outputs in place of choices, and with a window of any size.
    Copies take their bytes and no latency. They wait for each other, for the computation and for windows, as far as
    linear conditions can say so. Some conditions hold for windows of some sizes, so there are up to three programs.
    """
    of_kinds = [
        [nbytes for way in kind.ways for nbytes, _ in records(step, kind, way, way.kept)] for kind in step.kinds
    ]
    least = [min(sizes) / MIB for sizes in of_kinds if sizes]
    windows = [Window()]
    if least:
        windows = [Window(most_mib=0.0, holds_any=False, holds_each=False), Window(max(least))]
        if min(least) < max(least):
            windows.append(Window(min(least), max(least), holds_each=False))
    found = [_Bound(step, memory_bytes, sizes).least() for sizes in windows]
    return min((each for each in found if each is not None), default=None)
