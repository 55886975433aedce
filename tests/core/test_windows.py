"""Windows: which records are reloaded ahead, which were passed by, what moves, and how much may be in flight."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

testing = pytest.importorskip("torchoffload._C_testing", reason="it is reached through the test build alone").testing

Key = tuple[int, int]

STATES = ("Released", "Resident", "Offloading", "Offloaded", "Reloading", "Reloaded")
WAYS: dict[str, tuple[str, ...]] = {
    "Resident": (),
    "Offloading": ("begin_offload",),
    "Offloaded": ("begin_offload", "finish_offload"),
    "Reloading": ("begin_offload", "finish_offload", "begin_reload"),
    "Reloaded": ("begin_offload", "finish_offload", "begin_reload", "finish_reload"),
}
WINDOWS = st.integers(0, 400)
AMPLE_BYTES = 10**6


@dataclasses.dataclass
class Plan:
    """A tape to be: the bytes and the state of each record, and the record of each save, in the order of the saves."""

    records: list[tuple[int, str]]
    saves: list[int]

    def nbytes(self, save: int) -> int:
        return self.records[self.saves[save]][0]

    def state(self, save: int) -> str:
        return self.records[self.saves[save]][1]

    def bytes_before(self, save: int) -> int:
        """Of the records that were made before the save."""
        return sum(self.records[record][0] for record in set(self.saves[:save]))


@st.composite
def plans(draw: Any) -> Plan:
    records = draw(st.lists(st.tuples(st.integers(1, 100), st.sampled_from(STATES)), min_size=1, max_size=8))
    numbers = list(range(len(records)))
    saved_again = draw(st.lists(st.sampled_from(numbers), max_size=12))
    return Plan(records, draw(st.permutations(numbers + saved_again)))


@dataclasses.dataclass(frozen=True)
class Played:
    """A closed tape whose records are in the states asked for."""

    tape: Key
    keys: dict[int, Key]  # of each record of the plan


def play(ledger: Any, plan: Plan) -> Played:
    tape = ledger.open_tape()
    keys: dict[int, Key] = {}
    for number, record in enumerate(plan.saves):
        if record not in keys:
            nbytes = plan.records[record][0]
            keys[record] = ledger.add_record(tape, 1 + record, 1000 + record, 0, nbytes, 0, nbytes)
        assert ledger.add_handle(keys[record]) == number
    ledger.add_handle(ledger.add_record(tape, 10**6, 10**6, 0, 1, 0, 1))  # keeps the tape, whatever the plan drops
    ledger.close_tape(tape)
    for record, key in keys.items():
        state = plan.records[record][1]
        if state == "Released":
            for _ in range(plan.saves.count(record)):
                ledger.drop_handle(key, 0)
        else:
            for step in WAYS[state]:
                getattr(ledger, step)(key)
    ledger.check_invariants()
    return Played(tape, keys)


def model_of_reloads(plan: Plan, cursor: int, ahead: int, window: int) -> tuple[list[int], int]:
    """The saves to reload for: from the last to the first, never past one that has no room, each record once."""
    taken: list[int] = []
    while cursor > 0:
        save = cursor - 1
        if plan.state(save) == "Offloaded" and plan.saves[save] not in [plan.saves[other] for other in taken]:
            if ahead + plan.nbytes(save) > window:
                break
            ahead += plan.nbytes(save)
            taken.append(save)
        cursor -= 1
    return taken, cursor


@settings(max_examples=150, deadline=None)
@given(plan=plans(), rounds=st.lists(st.tuples(WINDOWS, WINDOWS), max_size=6))
def test_reloads_go_from_the_last_save_to_the_first_and_stay_within_the_window(plan, rounds):
    ledger = testing.Ledger()
    played = play(ledger, plan)
    cursor = len(plan.saves)
    for ahead, window in rounds:
        expected, cursor = model_of_reloads(plan, cursor, ahead, window)
        taken = ledger.take_reloads(played.tape, ahead, window)
        assert taken == [(played.keys[plan.saves[save]], save) for save in expected]
        assert not taken or ahead + sum(plan.nbytes(save) for save in expected) <= window
        for save in expected:
            ledger.begin_reload_ahead(played.keys[plan.saves[save]], save)
            plan.records[plan.saves[save]] = (plan.nbytes(save), "Reloading")
        ledger.check_invariants()


@settings(max_examples=50, deadline=None)
@given(plan=plans())
def test_with_room_for_all_each_record_in_a_slot_is_reloaded_once(plan):
    ledger = testing.Ledger()
    played = play(ledger, plan)
    offloaded = [key for record, key in played.keys.items() if plan.records[record][1] == "Offloaded"]
    assert sorted(key for key, _ in ledger.take_reloads(played.tape, 0, AMPLE_BYTES)) == sorted(offloaded)
    assert ledger.take_reloads(played.tape, 0, AMPLE_BYTES) == []


@settings(max_examples=50, deadline=None)
@given(plan=plans())
def test_a_window_of_nothing_loads_nothing_ahead(plan):
    ledger = testing.Ledger()
    assert ledger.take_reloads(play(ledger, plan).tape, 0, 0) == []


@settings(max_examples=150, deadline=None)
@given(plan=plans(), place=st.integers(0, 10**6), window=WINDOWS, other_plan=plans())
def test_a_record_is_passed_by_when_the_consumer_is_more_than_a_window_before_its_save(plan, place, window, other_plan):
    ledger = testing.Ledger()
    other, played = play(ledger, other_plan), play(ledger, plan)
    consumer = place % len(plan.saves)
    ahead = ledger.take_reloads(other.tape, 0, AMPLE_BYTES)
    own = ledger.take_reloads(played.tape, 0, AMPLE_BYTES)
    for key, save in ahead + own:
        ledger.begin_reload_ahead(key, save)
    gone = [key for record, key in played.keys.items() if plan.records[record][1] == "Released"]
    way = plan.bytes_before(consumer)
    expected = [key for key, save in own if save > consumer and plan.bytes_before(save) - way > window]
    # Neither records of another tape nor such as are gone.
    assert ledger.passed_by(played.tape, consumer, gone + [key for key, _ in ahead + own], window) == expected
    ledger.check_invariants()


def test_a_record_that_many_operators_saved_is_expected_at_the_last_of_its_saves():
    """As a rotary table is, which each layer asks for: its first save says nothing about where the consumer is."""
    ledger = testing.Ledger()
    plan = Plan([(100, "Offloaded")] * 9, [record for layer in range(1, 9) for record in (layer, 0)])
    played = play(ledger, plan)
    taken = ledger.take_reloads(played.tape, 0, 300)
    assert taken == [(played.keys[0], 15), (played.keys[8], 14), (played.keys[7], 12)]
    for key, save in taken:
        ledger.begin_reload_ahead(key, save)
    keys = [key for key, _ in taken]
    assert ledger.passed_by(played.tape, 15, keys, 0) == []
    assert ledger.passed_by(played.tape, 12, keys, 200) == []
    assert ledger.passed_by(played.tape, 12, keys, 100) == [played.keys[0]]


def test_saves_keep_their_numbers_when_an_open_tape_forgets_what_is_gone():
    ledger = testing.Ledger()
    tape = ledger.open_tape()
    for number in range(200):  # a loop without backward
        key = ledger.add_record(tape, number, 1000 + number, 0, 100, 0, 100)
        assert ledger.add_handle(key) == number
        if number < 198:
            ledger.drop_handle(key, 0)
        else:
            ledger.begin_offload(key)
            ledger.finish_offload(key)
        ledger.check_invariants()
    ledger.close_tape(tape)
    assert ledger.take_reloads(tape, 0, 100) == [(key, 199)]
    ledger.begin_reload_ahead(key, 199)
    assert ledger.passed_by(tape, 198, [key], 99) == [key]
    assert ledger.passed_by(tape, 198, [key], 100) == []
    assert [save for _, save in ledger.take_reloads(tape, 0, 100)] == [198]


@given(begin=st.integers(0, 1000), nbytes=st.integers(0, 1000), rest=st.integers(0, 1000))
def test_a_save_of_half_a_storage_or_more_moves_all_of_it(begin, nbytes, rest):
    storage_bytes = begin + nbytes + rest
    moved = testing.span_to_move(begin, begin + nbytes, storage_bytes)
    assert moved == ((0, storage_bytes) if 2 * nbytes >= storage_bytes else (begin, begin + nbytes))
