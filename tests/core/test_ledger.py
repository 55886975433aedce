"""Ledger under random operation sequences, against a model that keeps records as plain objects.

Every transition is tried on every record, from whatever state it is in: where the model says that it is not allowed, it
must throw and change nothing.
"""

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

testing = pytest.importorskip("torchoffload._C_testing", reason="it is reached through the test build alone").testing

Key = tuple[int, int]  # index, generation

STORAGE_BYTES = 64
GRANULE = 4
BULK = 70  # more dead saves than an open tape remembers
REASONS = ("tier_full", "resized", "write_failed")
SPANS = st.tuples(st.integers(0, 15), st.integers(1, 16)).map(
    lambda pair: (GRANULE * pair[0], GRANULE * min(16, pair[0] + pair[1]))
)
IDENTITIES = st.tuples(st.integers(1, 3), st.integers(101, 102), st.integers(0, 2))  # storage, counter, version
PICKS = st.integers(0, 10**6)


@dataclasses.dataclass(eq=False)
class Record:
    key: Key
    tape: "Tape"
    identity: tuple[int, int, int]
    span: tuple[int, int]
    state: str = "Resident"
    is_kept: bool = False
    has_slot: bool = False
    awaits_room: bool = False
    epoch: int = 0
    holds: int = 0
    handles: dict[int, int] = dataclasses.field(default_factory=dict)  # handle -> the epoch that it has seen

    def stands_for(self, identity: tuple[int, int, int]) -> bool:
        """Until its copy is enqueued or waits for room for whatever is in the storage, then for what did not change."""
        is_any = self.state == "Resident" and not self.awaits_room
        return self.identity[0] == identity[0] and (is_any or self.identity == identity)

    def all_seen(self) -> bool:
        return all(self.epoch != 0 and seen == self.epoch for seen in self.handles.values())


@dataclasses.dataclass(eq=False)
class Tape:
    key: Key
    is_open: bool = True
    records: list[Record] = dataclasses.field(default_factory=list)  # alive
    save_count: int = 0


# What a transition needs of a record, and what it makes of it.
TRANSITIONS: dict[str, tuple[Any, Any]] = {}


def transition(allowed: Any) -> Any:
    def add(change: Any) -> Any:
        TRANSITIONS[change.__name__] = (allowed, change)
        return change

    return add


def in_state(*states: str) -> Any:
    return lambda record: record.state in states and not record.awaits_room


@transition(lambda record: in_state("Resident")(record) and not record.is_kept)
def await_room(record: Record) -> None:
    record.awaits_room = True


@transition(lambda record: in_state("Resident")(record) and not record.is_kept)
def begin_offload(record: Record) -> None:
    record.state, record.has_slot = "Offloading", True


@transition(in_state("Offloading"))
def finish_offload(record: Record) -> None:
    record.state = "Offloaded"


@transition(in_state("Resident", "Offloading"))
def use_source(record: Record) -> None:
    record.state = "Reloaded"
    record.epoch += 1


@transition(in_state("Offloaded"))
def begin_reload(record: Record) -> None:
    record.state = "Reloading"
    record.epoch += 1


@transition(in_state("Offloaded"))
def begin_reload_ahead(record: Record) -> None:
    begin_reload(record)


@transition(in_state("Reloading"))
def finish_reload(record: Record) -> None:
    record.state = "Reloaded"


@transition(lambda record: record.state == "Reloaded" and record.has_slot)
def weaken(record: Record) -> None:
    record.state = "Offloaded"


@transition(in_state("Reloading"))
def pass_by(record: Record) -> None:
    record.state = "Offloaded"


@transition(in_state("Resident", "Offloading"))
def keep(record: Record) -> None:
    record.state, record.has_slot, record.is_kept = "Resident", False, True


ARGUMENTS = {
    "begin_reload_ahead": lambda pick: (pick,),  # the save that will ask for it
    "keep": lambda pick: (REASONS[pick % len(REASONS)],),
}


class Model(RuleBasedStateMachine):
    """Tapes with the records that are alive in them, newest last, and the handles of each."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = testing.Ledger()
        self.tapes: list[Tape] = []
        self.gone_tapes: list[Key] = []
        self.gone_records: list[Key] = []
        self.handle_numbers = itertools.count()

    def records(self) -> list[Record]:
        return [record for tape in self.tapes for record in tape.records]

    def open_tapes(self) -> list[Tape]:
        return [tape for tape in self.tapes if tape.is_open]

    # Tapes

    @precondition(lambda self: len(self.tapes) < 4)
    @rule()
    def open_tape(self) -> None:
        key = self.ledger.open_tape()
        assert key not in [tape.key for tape in self.tapes] + self.gone_tapes
        self.tapes.append(Tape(key))

    @precondition(lambda self: self.open_tapes())
    @rule(pick=PICKS)
    def close_tape(self, pick: int) -> None:
        tape = self.open_tapes()[pick % len(self.open_tapes())]
        tape.is_open = False
        assert self.ledger.close_tape(tape.key) == (not tape.records)
        self.forget_if_gone(tape)

    def forget_if_gone(self, tape: Tape) -> bool:
        if tape.is_open or tape.records:
            return False
        self.tapes.remove(tape)
        self.gone_tapes.append(tape.key)
        return True

    # Saves

    def expected_record(self, tape: Tape, identity: tuple[int, int, int], span: tuple[int, int], itemsize: int) -> Any:
        """The newest that stands for the identity's bytes, contains the span, and lies on its grid."""
        for record in reversed(tape.records if tape.is_open else []):
            contains = record.span[0] <= span[0] and span[1] <= record.span[1]
            if record.stands_for(identity) and contains and (span[0] - record.span[0]) % itemsize == 0:
                return record
        return None

    def add_record(self, tape: Tape, identity: tuple[int, int, int], span: tuple[int, int]) -> Record:
        key = self.ledger.add_record(tape.key, *identity, STORAGE_BYTES, *span)
        assert key not in [record.key for record in self.records()] + self.gone_records
        record = Record(key, tape, identity, span)
        tape.records.append(record)
        return record

    def add_handle(self, record: Record) -> int:
        assert self.ledger.add_handle(record.key) == record.tape.save_count
        record.tape.save_count += 1
        handle = next(self.handle_numbers)
        record.handles[handle] = 0
        return handle

    @precondition(lambda self: self.tapes)
    @rule(pick=PICKS, identity=IDENTITIES, span=SPANS, itemsize=st.sampled_from([1, 4, 8, 16]))
    def save(self, pick: int, identity: tuple[int, int, int], span: tuple[int, int], itemsize: int) -> None:
        tape = self.tapes[pick % len(self.tapes)]
        record = self.expected_record(tape, identity, span, itemsize)
        found = self.ledger.find(tape.key, *identity, STORAGE_BYTES, *span, itemsize)
        assert found == (record.key if record else None)
        if record is None and not tape.is_open:
            with pytest.raises(RuntimeError, match="a record was added to a closed tape"):
                self.ledger.add_record(tape.key, *identity, STORAGE_BYTES, *span)
            return
        self.add_handle(record or self.add_record(tape, identity, span))

    @precondition(lambda self: self.records())
    @rule(pick=PICKS)
    def a_storage_of_another_size_is_another(self, pick: int) -> None:
        record = self.records()[pick % len(self.records())]
        assert self.ledger.find(record.tape.key, *record.identity, 2 * STORAGE_BYTES, *record.span, 1) is None

    @precondition(lambda self: self.open_tapes())
    @rule(pick=PICKS, identity=IDENTITIES, span=SPANS)
    def save_and_drop_many(self, pick: int, identity: tuple[int, int, int], span: tuple[int, int]) -> None:
        """A loop without backward inside one entry: the open tape outlives its records."""
        tape = self.open_tapes()[pick % len(self.open_tapes())]
        for _ in range(BULK):
            record = self.add_record(tape, identity, span)
            self.drop(record, self.add_handle(record))

    # Handles

    def drop(self, record: Record, handle: int) -> None:
        seen = record.handles.pop(handle)
        released, all_seen, tape_gone = self.ledger.drop_handle(record.key, seen)
        self.forget_record_if_gone(record, released, all_seen, tape_gone)

    def forget_record_if_gone(self, record: Record, released: bool, all_seen: bool, tape_gone: bool) -> None:
        assert released == (not record.handles and not record.holds)
        assert all_seen == record.all_seen()
        if released:
            record.tape.records.remove(record)
            self.gone_records.append(record.key)
        assert tape_gone == (released and self.forget_if_gone(record.tape))

    # Holds

    @precondition(lambda self: self.records())
    @rule(pick=PICKS)
    def hold(self, pick: int) -> None:
        record = self.records()[pick % len(self.records())]
        self.ledger.hold(record.key)
        record.holds += 1

    @precondition(lambda self: any(record.holds for record in self.records()))
    @rule(pick=PICKS)
    def release_hold(self, pick: int) -> None:
        held = [record for record in self.records() if record.holds]
        record = held[pick % len(held)]
        record.holds -= 1
        self.forget_record_if_gone(record, *self.ledger.release_hold(record.key))

    def pick_handle(self, pick: int) -> tuple[Record, int]:
        handles = [(record, handle) for record in self.records() for handle in record.handles]
        return handles[pick % len(handles)]

    @precondition(lambda self: any(record.handles for record in self.records()))
    @rule(pick=PICKS)
    def drop_handle(self, pick: int) -> None:
        self.drop(*self.pick_handle(pick))

    @precondition(lambda self: any(record.handles for record in self.records()))
    @rule(pick=PICKS)
    def mark_seen(self, pick: int) -> None:
        record, handle = self.pick_handle(pick)
        record.handles[handle] = self.ledger.mark_seen(record.key, record.handles[handle])
        assert record.handles[handle] == record.epoch

    # Transitions

    @precondition(lambda self: self.records())
    @rule(pick=PICKS, name=st.sampled_from(sorted(TRANSITIONS)))
    def make_transition(self, pick: int, name: str) -> None:
        record = self.records()[pick % len(self.records())]
        if pick % 3 == 0:
            assert self.ledger.stop_awaiting_room(record.key) == record.awaits_room
            record.awaits_room = False
        allowed, change = TRANSITIONS[name]
        arguments = ARGUMENTS.get(name, lambda _: ())(pick)
        if allowed(record):
            getattr(self.ledger, name)(record.key, *arguments)
            change(record)
        else:
            with pytest.raises(RuntimeError, match="torchoffload ledger: "):
                getattr(self.ledger, name)(record.key, *arguments)

    # What is gone

    @precondition(lambda self: self.gone_records)
    @rule(pick=PICKS, name=st.sampled_from([*sorted(TRANSITIONS), "add_handle", "state", "has_slot", "all_seen"]))
    def use_a_record_that_is_gone(self, pick: int, name: str) -> None:
        key = self.gone_records[pick % len(self.gone_records)]
        arguments = ARGUMENTS.get(name, lambda _: ())(pick)
        assert not self.ledger.is_live(key)
        with pytest.raises(RuntimeError, match="a record was used after its release"):
            getattr(self.ledger, name)(key, *arguments)

    @precondition(lambda self: self.gone_tapes)
    @rule(pick=PICKS, identity=IDENTITIES, span=SPANS)
    def use_a_tape_that_is_gone(self, pick: int, identity: tuple[int, int, int], span: tuple[int, int]) -> None:
        key = self.gone_tapes[pick % len(self.gone_tapes)]
        assert not self.ledger.is_open(key)
        with pytest.raises(RuntimeError, match="a tape was used after it was gone"):
            self.ledger.close_tape(key)
        with pytest.raises(RuntimeError, match="a tape was used after it was gone"):
            self.ledger.add_record(key, *identity, STORAGE_BYTES, *span)

    # After every step

    @invariant()
    def ledger_is_the_model(self) -> None:
        self.ledger.check_invariants()
        records = self.records()
        assert self.ledger.live_records() == len(records)
        assert self.ledger.live_handles() == sum(len(record.handles) for record in records)
        assert self.ledger.live_tapes() == len(self.tapes)
        for record in records:
            assert self.ledger.is_live(record.key)
            assert self.ledger.state(record.key) == record.state
            assert self.ledger.has_slot(record.key) == record.has_slot
            assert self.ledger.all_seen(record.key) == record.all_seen()
        for tape in self.tapes:
            assert self.ledger.is_open(tape.key) == tape.is_open


TestLedger = Model.TestCase
TestLedger.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)


# The same by hand: each transition from each state.

WAYS: dict[str, tuple[str, ...]] = {
    "Resident": (),
    "Offloading": ("begin_offload",),
    "Offloaded": ("begin_offload", "finish_offload"),
    "Reloading": ("begin_offload", "finish_offload", "begin_reload"),
    "Reloaded": ("begin_offload", "finish_offload", "begin_reload", "finish_reload"),
}
EXPECTED: dict[str, dict[str, str]] = {
    "begin_offload": {"Resident": "Offloading"},
    "finish_offload": {"Offloading": "Offloaded"},
    "use_source": {"Resident": "Reloaded", "Offloading": "Reloaded"},
    "begin_reload": {"Offloaded": "Reloading"},
    "begin_reload_ahead": {"Offloaded": "Reloading"},
    "finish_reload": {"Reloading": "Reloaded"},
    "weaken": {"Reloaded": "Offloaded"},
    "pass_by": {"Reloading": "Offloaded"},
    "keep": {"Resident": "Resident", "Offloading": "Resident"},
}


@pytest.mark.parametrize("state", WAYS)
@pytest.mark.parametrize("name", EXPECTED)
def test_each_transition_checks_the_state_it_comes_from(name: str, state: str) -> None:
    ledger = testing.Ledger()
    key = ledger.add_record(ledger.open_tape(), 1, 101, 0, STORAGE_BYTES, 0, STORAGE_BYTES)
    ledger.add_handle(key)
    for step in WAYS[state]:
        getattr(ledger, step)(key, *ARGUMENTS.get(step, lambda _: ())(0))
    arguments = ARGUMENTS.get(name, lambda _: ())(0)
    if state in EXPECTED[name]:
        getattr(ledger, name)(key, *arguments)
        assert ledger.state(key) == EXPECTED[name][state]
    else:
        with pytest.raises(RuntimeError, match="torchoffload ledger: "):
            getattr(ledger, name)(key, *arguments)
        assert ledger.state(key) == state
    ledger.check_invariants()


def test_a_record_without_a_slot_never_gives_its_memory_up() -> None:
    ledger = testing.Ledger()
    key = ledger.add_record(ledger.open_tape(), 1, 101, 0, STORAGE_BYTES, 0, STORAGE_BYTES)
    ledger.add_handle(key)
    ledger.use_source(key)
    with pytest.raises(RuntimeError, match="a record without a slot gave its device memory up"):
        ledger.weaken(key)
    assert ledger.state(key) == "Reloaded"


def test_a_kept_record_is_not_offloaded() -> None:
    ledger = testing.Ledger()
    key = ledger.add_record(ledger.open_tape(), 1, 101, 0, STORAGE_BYTES, 0, STORAGE_BYTES)
    ledger.add_handle(key)
    ledger.keep(key, "tier_full")
    with pytest.raises(RuntimeError, match="a kept record was offloaded"):
        ledger.begin_offload(key)
    assert ledger.state(key) == "Resident"
    assert not ledger.has_slot(key)
