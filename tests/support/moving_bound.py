"""moving_bound.py: a time that no plan of a step beats in which things move, by a linear program.

To go through all plans is exact, and is for steps of a few blocks. A linear program takes a fraction of a second for
any step. It comes the nearer to what plans do, the more blocks there are and the more room for windows.
"""

import dataclasses

from plan_oracle import MIB, MS, MemoryRows, Program, Record, Terms, of_call, records, times, total
from torchoffload._fit.plan.step import BlockKind, Step


@dataclasses.dataclass
class _Call:
    """A call in the linear program: of each way the parts that stay and that move, and what moves of its outputs."""

    stays: list[int]
    moves: list[int]
    records: list[tuple[Record, int]]  # with the variable of the part that moves

    @property
    def moved(self) -> dict[int, float]:
        """The MiB that move."""
        return total(*({part: each.nbytes / MIB} for each, part in self.records))


class _Bound:
    """A linear program that no plan beats. See `bound_with_moving`."""

    def __init__(self, step: Step, memory_bytes: int) -> None:
        self.step, self.program = step, Program()
        self.windows = [(self.program.variable(), self.program.variable()) for _ in step.calls]
        self.loss_window = self.program.variable()
        self.memory = MemoryRows(self.program, step, memory_bytes, self.windows, self.loss_window)
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
            placed.records += [(each, moving) for each in records(step, kind, way, ())]
            for output in way.kept:
                part = moving
                if not way.is_plain:
                    part = program.variable(most=1.0)
                    program.at_most({part: 1, moving: -1}, 0)
                alone = dataclasses.replace(way, input_bytes=0)
                placed.records += [(each, part) for each in records(step, kind, alone, (output,))]
        assert all(each.ready_s <= kind.forward_s + 1e-12 for each, _ in placed.records)
        self.memory.before(number)
        mib = [kind.kept_bytes(way) / MIB for way in kind.ways]
        kept = total(dict(zip(stays, mib, strict=True)), dict(zip(moves, mib, strict=True)))
        self.memory.after(number, total(kept, times(-1, placed.moved)), placed.moved)
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
            program.at_least({end: 1, clock: -1}, forward_ms)
            for ready_s in sorted({each.ready_s for each, _ in call.records}):
                moment = ready_s / MS
                now = [(each, part) for each, part in call.records if each.ready_s == ready_s]
                made = total(*({part: each.nbytes / MIB} for each, part in now))
                copied = program.variable()
                self._no_earlier(copied, {link: 1}, times(self.out_ms, made))
                for part in made:
                    self._no_earlier(copied, {clock: 1, part: moment}, times(self.out_ms, made))
                    window = self.windows[number][0]
                    self._no_earlier(end, {copied: 1, part: forward_ms - moment, window: -self.out_ms})
                link = copied
            clock = end
        at_loss = program.variable()
        self._no_earlier(at_loss, {clock: 1})
        self._no_earlier(at_loss, {link: 1, self.loss_window: -self.out_ms})
        return at_loss

    def _backward(self, clock: int) -> int:
        """The end of the backward of the first call, where forward ends at `clock`.

        Reloads begin as backward asks for the first record. When it asks for what a call keeps, at most a window of
        what later asks want is on its way. What was still on its way out at the loss is not reloaded.
        """
        program, sources = self.program, []
        ask = program.variable()
        program.at_least({ask: 1, clock: -1}, self.step.loss_s / MS)
        since_ask = since_loss = ask
        for number in reversed(range(len(self.calls))):
            call, kind = self.calls[number], of_call(self.step, number)
            source = program.variable()
            sources.append(source)
            program.at_most(total({source: 1}, times(-1, call.moved)), 0)
            reloaded = total(times(self.in_ms, call.moved), {source: -self.in_ms})
            from_ask, from_loss = program.variable(), program.variable()
            self._no_earlier(from_ask, {ask: 1}, reloaded)
            self._no_earlier(from_ask, {since_ask: 1}, reloaded)
            self._no_earlier(from_loss, {since_loss: 1}, reloaded)
            end = program.variable()
            whole, last = self._rests(call, kind)
            self._no_earlier(end, {ask: 1}, whole)
            ahead = {reload: -self.in_ms for _, reload in self.windows[number : number + 2]}
            self._no_earlier(end, {from_ask: 1}, ahead, last)
            self._no_earlier(end, {from_loss: 1}, last)
            ask, since_ask, since_loss = end, from_ask, from_loss
        program.at_most(total(dict.fromkeys(sources, 1.0), {self.loss_window: -1}), 0)
        return ask

    def _rests(self, call: _Call, kind: BlockKind) -> tuple[dict[int, float], dict[int, float]]:
        """By part: what backward takes, and what of it is left as it asks for the last thing that moved."""
        whole, last = {}, {}
        for way, stays, moves in zip(kind.ways, call.stays, call.moves, strict=True):
            whole[stays] = whole[moves] = last[stays] = last[moves] = (way.recompute_s + kind.backward_s) / MS
            moments = [each.ready_s for each in records(self.step, kind, way, way.kept)]
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

    The rules are those of a plan, with parts of ways and of outputs in place of choices, and with windows of any size
    at each call. Copies take what their bytes take on the link, and no latency. They wait for each other, for the
    computation and for windows, as far as linear conditions can say so.
    """
    return _Bound(step, memory_bytes).least()
