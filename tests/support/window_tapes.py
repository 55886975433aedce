"""window_tapes.py: random tapes with plans, and what an engine, the simulation of a step, and a model do with them.

What is compared are events, in order: ``("wait", r)`` where the window makes somebody wait for the copy out of record
``r``; ``("ask", r)`` where the backward asks for it the first time; ``("reload", r)`` where it was not on its way then;
``("reload ahead", r)`` where it is reloaded before it is asked for.
"""

import dataclasses
import enum
import gc
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hypothesis import strategies as st

import torchoffload
from torchoffload import _C_testing

testing = _C_testing.testing

Event = tuple[str, int]

LARGEST_BYTES = 400


@dataclasses.dataclass(frozen=True)
class Tape:
    """What each operator saves, and the plan that the tape follows. Records are numbered by their first saves.

    The sizes of records differ, so that a copy tells by its size whose it is.
    """

    operators: list[list[int]]
    nbytes: list[int]
    kept: list[bool]
    offload_windows: list[int]  # from each record to the next
    reload_window: int
    asked: tuple[int, ...] = ()  # the saves as the backward asks for them; empty: from the last one to the first

    @property
    def saves(self) -> list[int]:
        """The record of each save."""
        return [record for saved in self.operators for record in saved]

    @property
    def last_save(self) -> list[int]:
        """The number of each record's last save."""
        saves = self.saves
        return [max(number for number, saved in enumerate(saves) if saved == record) for record in self.records]

    @property
    def records(self) -> range:
        return range(len(self.nbytes))

    @property
    def joins(self) -> list[bool]:
        """Was the record made by the operator that made the one before?"""
        made_by = [
            next(number for number, saved in enumerate(self.operators) if record in saved) for record in self.records
        ]
        return [record > 0 and made_by[record] == made_by[record - 1] for record in self.records]

    def asks(self) -> Iterator[tuple[int, bool]]:
        """The save of each ask of the backward, and whether an operator's backward runs then."""
        ends = {0} | {sum(map(len, self.operators[:number])) for number in range(len(self.operators))}
        for save in self.asked or range(len(self.saves) - 1, -1, -1):
            yield save, save in ends

    def first_asks(self) -> list[int]:
        return list(dict.fromkeys(self.saves[save] for save, _ in self.asks()))


@st.composite
def tapes(draw: Any) -> Tape:
    """Operators that save new records and earlier ones; what is kept, and the windows, are any."""
    count = draw(st.integers(1, 10))
    operators: list[list[int]] = []
    made = 0
    while made < count:
        new = draw(st.integers(1, min(3, count - made)))
        again = draw(st.lists(st.integers(0, made - 1), max_size=2, unique=True)) if made else []
        operators.append(draw(st.permutations(again)) + list(range(made, made + new)))
        made += new
    nbytes = draw(st.lists(st.integers(1, LARGEST_BYTES), min_size=count, max_size=count, unique=True))
    windows = st.integers(0, 4 * LARGEST_BYTES)
    return Tape(
        operators,
        nbytes,
        kept=[draw(st.integers(0, 3)) == 0 for _ in range(count)],
        offload_windows=[draw(windows) for _ in range(count)],
        reload_window=draw(windows),
    )


@st.composite
def tapes_without_misses(draw: Any) -> Tape:
    """Each record is saved once, what is kept by an operator of its own, and the windows are wide enough that whatever
    is asked for was not yet driven out, or is on its way back.
    """
    tape = draw(tapes())
    operators: list[list[int]] = []
    for record in tape.records:
        is_alone = tape.kept[record] or record == 0 or tape.kept[record - 1] or not draw(st.booleans())
        operators += [[record]] if is_alone else []
        if not is_alone:
            operators[-1].append(record)
    kept_bytes = sum(nbytes for nbytes, is_kept in zip(tape.nbytes, tape.kept, strict=True) if is_kept)
    room = st.integers(0, 2 * LARGEST_BYTES)
    return dataclasses.replace(
        tape,
        operators=operators,
        offload_windows=[*tape.offload_windows[:-1], kept_bytes + tape.nbytes[-1] + draw(room)],
        reload_window=kept_bytes + 2 * max(tape.nbytes) + draw(room),
    )


# ---- the simulation ----


def simulated_events(tape: Tape) -> list[Event]:
    """What ``simulate()`` goes through. Times say no more than the order."""
    asked = tape.first_asks()
    times = [(float(record), float(2 * len(asked) + asked.index(record))) for record in tape.records]
    step = testing.StepTimes(times, 4.0 * len(asked), 1e9, 1e9)
    return list(
        testing.step_events(
            tape.nbytes, tape.last_save, step, tape.joins, tape.kept, tape.offload_windows, tape.reload_window
        )
    )


# ---- the engine ----


class _Asks(torch.autograd.Function):
    """Its backward, in which a graph task runs, does some work."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, work: Callable[[], None]) -> torch.Tensor:
        ctx.work = work
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.work()
        return grad, None


def _forward(context: torchoffload.OffloadActivations, tape: Tape) -> list[Any]:
    """The handle of each save. The program holds a tensor until its last save, as an operator's input is held."""
    handles: list[Any] = []
    tensors: dict[int, torch.Tensor] = {}
    leaf = torch.zeros((), requires_grad=True)
    with context:
        for saved in tape.operators:
            for record in saved:
                if record not in tensors:
                    tensors[record] = torch.zeros(tape.nbytes[record], dtype=torch.uint8)
                handles.append(context.pack_hook(tensors[record]))
                if len(handles) - 1 == tape.last_save[record]:
                    del tensors[record]
            leaf = leaf + 1  # autograd comes to the next operator; this one saves nothing
    return handles


def _backward(tape: Tape, handles: list[Any], unpack: Callable[[Any], Any], asks: Callable[[int], None]) -> None:
    """Handles of one operator go together, after all of its saves were asked for."""

    def work() -> None:
        asked: list[int] = []
        for save, ends in tape.asks():
            asks(tape.saves[save])
            asked.append(save)
            unpack(handles[save])
            while ends and asked:
                handles[asked.pop()] = None

    x = torch.zeros((), requires_grad=True)
    _Asks.apply(x, work).backward()


def engine_events(tape: Tape) -> list[Event]:
    """What an engine does in the second step with such a tape, as its calls at the seam tell; the first teaches it the
    tape, which then follows the plan. On the simulated device.
    """
    testing.forget_learned()
    context = torchoffload.OffloadActivations(min_offload_size=0, learn=True)
    _backward(tape, _forward(context, tape), context.unpack_hook, lambda _: None)
    testing.plan_engines_as(tape.kept, tape.offload_windows, tape.reload_window)
    gc.collect()
    marks: list[tuple[int, int]] = []  # where in the log which record is asked for
    testing.start_seam_log()
    try:
        handles = _forward(context, tape)
        _backward(tape, handles, context.unpack_hook, lambda record: marks.append((len(testing.seam_log()), record)))
    finally:
        testing.stop_seam_log()
    return _events(tape, testing.seam_log(), marks)


def _events(tape: Tape, log: list[str], marks: list[tuple[int, int]]) -> list[Event]:
    events = _waits(tape, log[: marks[0][0]])
    record_of = {nbytes: record for record, nbytes in enumerate(tape.nbytes)}
    ends = [begin for begin, _ in marks[1:]] + [len(log)]
    asked: set[int] = set()
    for (begin, record), end in zip(marks, ends, strict=True):
        if record not in asked:
            events.append(("ask", record))
            asked.add(record)
        for line in log[begin:end]:
            if found := re.fullmatch(r"copy_in \S+ (\d+)", line):
                reloaded = record_of[int(found[1])]
                events.append(("reload" if reloaded == record else "reload ahead", reloaded))
    return events


def _waits(tape: Tape, log: list[str]) -> list[Event]:
    """The waits of a forward: in it, nothing but a full window makes compute_stream wait for offload_stream."""
    record_of = {nbytes: record for record, nbytes in enumerate(tape.nbytes)}
    copied_by: dict[str, int] = {}  # the record whose copy's end each point is
    latest = -1
    waits = []
    for line in log:
        if found := re.fullmatch(r"copy_out \S+ (\d+)", line):
            latest = record_of[int(found[1])]
        elif found := re.fullmatch(r"record (offload_stream\S+)", line):
            copied_by[found[1]] = latest
        elif found := re.fullmatch(r"wait compute_stream\S+ <- (offload_stream\S+)", line):
            waits.append(("wait", copied_by[found[1]]))
    return waits


# ---- the model ----


class Driver(enum.Enum):
    """Who tells the windows of what happens, and all ways in which the two differ; docs/design.md says why."""

    ENGINE = enum.auto()
    SIMULATION = enum.auto()

    @property
    def counts_what_was_missed(self) -> bool:
        """A record that is asked for and not on its way counts as reloaded ahead until that ask is over."""
        return self is Driver.SIMULATION

    @property
    def looks_at_each_ask(self) -> bool:
        """What to reload next is looked for at each ask, not only at the first one for a record."""
        return self is Driver.ENGINE

    @property
    def releases_with_the_last_handle(self) -> bool:
        """What is kept counts until the operator of its first save has run, not until the next record is asked for."""
        return self is Driver.ENGINE


class Model:
    """A tape gone through by the rules of the windows, without the class that the core has for them. It knows backwards
    that ask from the last save to the first.
    """

    def __init__(self, tape: Tape, driver: Driver) -> None:
        self.tape, self.driver = tape, driver
        self.events: list[Event] = []
        self.in_flight: list[int] = []
        self.kept: set[int] = set()
        self.in_slot: set[int] = set()
        self.ahead: set[int] = set()

    def bytes_of(self, *records: int) -> int:
        return sum(self.tape.nbytes[record] for record in records)

    def run(self) -> list[Event]:
        made: set[int] = set()
        for saved in self.tape.operators:
            new = [record for record in saved if record not in made]
            made.update(new)
            self.kept.update(record for record in new if self.tape.kept[record])
            self.in_flight += [record for record in new if not self.tape.kept[record]]
            if new:
                self.drain(self.tape.offload_windows[new[-1]])
        self.backward()
        return self.events

    def drain(self, window: int) -> None:
        while self.in_flight and self.bytes_of(*self.in_flight, *self.kept) > window:
            self.events.append(("wait", self.in_flight[0]))
            self.in_slot.add(self.in_flight.pop(0))

    def backward(self) -> None:
        place = len(self.tape.first_asks())  # records are reloaded in the order in which they are asked for
        order = self.tape.first_asks()[::-1]
        asked: list[int] = []
        used: set[int] = set()  # since an operator ended
        saves_left = {record: self.tape.saves.count(record) for record in self.tape.records}
        for save, ends in self.tape.asks():
            record = self.tape.saves[save]
            is_first = record not in asked
            if is_first and not self.driver.releases_with_the_last_handle:
                self.kept -= set(asked)
            asked.append(record)
            used.add(record)
            saves_left[record] -= 1
            if is_first:
                self.ask(record)
            if is_first or self.driver.looks_at_each_ask:
                place = self.look(order, place)
            self.ahead.discard(record)
            if ends and self.driver.releases_with_the_last_handle:
                self.kept -= {each for each in used if not saves_left[each]}
                used.clear()

    def ask(self, record: int) -> None:
        self.events.append(("ask", record))
        if record in self.in_slot:
            self.in_slot.remove(record)
            self.events.append(("reload", record))
            if self.driver.counts_what_was_missed:
                self.ahead.add(record)

    def look(self, order: list[int], place: int) -> int:
        while place > 0:
            record = order[place - 1]
            if record in self.in_slot:
                if self.bytes_of(*self.ahead, *self.kept, record) > self.tape.reload_window:
                    break
                self.in_slot.remove(record)
                self.ahead.add(record)
                self.events.append(("reload ahead", record))
            place -= 1
        return place
