"""Schedule: which records are reloaded ahead, which were passed by, what moves, and how much may be in flight."""

import dataclasses

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
BYTES = st.integers(1, 100)
WINDOWS = st.integers(0, 400)
# A tape as (bytes, state) of each record, in pack order.
TAPES = st.lists(st.tuples(BYTES, st.sampled_from(STATES)), min_size=1, max_size=20)


@dataclasses.dataclass(frozen=True)
class Played:
    """A closed tape whose records are in the states asked for."""

    ledger: object
    tape: Key
    keys: list[Key]


def play(ledger: object, plan: list[tuple[int, str]]) -> Played:
    tape = ledger.open_tape()
    keys = []
    for storage, (nbytes, _) in enumerate(plan, start=1):
        keys.append(ledger.add_record(tape, storage, 1000 + storage, 0, nbytes, 0, nbytes))
        ledger.add_handle(keys[-1])
    holder = ledger.add_record(tape, 10**6, 10**6, 0, 1, 0, 1)  # keeps the tape, whatever the plan drops
    ledger.add_handle(holder)
    ledger.close_tape(tape)
    for key, (_, state) in zip(keys, plan, strict=True):
        if state == "Released":
            ledger.drop_handle(key, 0)
            continue
        for step in WAYS[state]:
            getattr(ledger, step)(key, *([True] if step == "begin_reload" else []))
    ledger.check_invariants()
    return Played(ledger, tape, keys)


def model_of_reloads(plan: list[tuple[int, str]], cursor: int, ahead: int, window: int) -> tuple[list[int], int]:
    """From the tape's end towards its start, never past one that has no room, only those that rest in their slot."""
    taken = []
    while cursor > 0:
        nbytes, state = plan[cursor - 1]
        if state == "Offloaded":
            if ahead + nbytes > window:
                break
            ahead += nbytes
            taken.append(cursor - 1)
        cursor -= 1
    return taken, cursor


@settings(max_examples=150, deadline=None)
@given(plan=TAPES, rounds=st.lists(st.tuples(WINDOWS, WINDOWS), max_size=6))
def test_reloads_go_from_the_end_to_the_start_and_stay_within_the_window(plan, rounds):
    played = play(testing.Ledger(), plan)
    plan = list(plan)
    cursor = len(plan)
    for ahead, window in rounds:
        expected, cursor = model_of_reloads(plan, cursor, ahead, window)
        taken = played.ledger.take_reloads(played.tape, ahead, window)
        assert taken == [played.keys[position] for position in expected]
        assert not taken or ahead + sum(plan[position][0] for position in expected) <= window
        for position in expected:
            played.ledger.begin_reload(played.keys[position], True)
            plan[position] = (plan[position][0], "Reloading")
        played.ledger.check_invariants()


@settings(max_examples=50, deadline=None)
@given(plan=TAPES)
def test_with_room_for_all_each_record_in_a_slot_is_reloaded_once(plan):
    played = play(testing.Ledger(), plan)
    offloaded = [key for key, (_, state) in zip(played.keys, plan, strict=True) if state == "Offloaded"]
    assert played.ledger.take_reloads(played.tape, 0, 10**6) == offloaded[::-1]
    assert played.ledger.take_reloads(played.tape, 0, 10**6) == []


@settings(max_examples=50, deadline=None)
@given(plan=TAPES)
def test_a_window_of_nothing_loads_nothing_ahead(plan):
    played = play(testing.Ledger(), plan)
    assert played.ledger.take_reloads(played.tape, 0, 0) == []


@settings(max_examples=150, deadline=None)
@given(plan=TAPES, position=st.integers(0, 19), window=WINDOWS, others=TAPES)
def test_a_record_is_passed_by_when_the_consumer_is_more_than_a_window_before_it(plan, position, window, others):
    ledger = testing.Ledger()
    other, played = play(ledger, others), play(ledger, plan)
    position %= len(plan)
    before = [sum(nbytes for nbytes, _ in plan[:index]) for index in range(len(plan))]
    expected = [
        key
        for index, key in enumerate(played.keys)
        if plan[index][1] != "Released" and index > position and before[index] - before[position] > window
    ]
    # Neither records of another tape nor such as are gone.
    assert ledger.passed_by(played.tape, position, other.keys + played.keys, window) == expected
    ledger.check_invariants()


def test_what_an_open_tape_has_let_go_does_not_count_as_passed():
    ledger = testing.Ledger()
    tape = ledger.open_tape()
    for storage in range(200):  # a loop without backward, with a record that stays at either end
        key = ledger.add_record(tape, storage, 1000 + storage, 0, 100, 0, 100)
        ledger.add_handle(key)
        if storage == 0:
            first = key
        elif storage < 199:
            ledger.drop_handle(key, 0)
    ledger.check_invariants()
    assert ledger.passed_by(tape, 0, [first, key], 100 * 198) == []
    assert ledger.passed_by(tape, 0, [first, key], 100 * 64) == []
    assert ledger.passed_by(tape, 0, [first, key], 99) == [key]


@given(begin=st.integers(0, 1000), nbytes=st.integers(0, 1000), rest=st.integers(0, 1000))
def test_a_save_of_half_a_storage_or_more_moves_all_of_it(begin, nbytes, rest):
    storage_bytes = begin + nbytes + rest
    moved = testing.Schedule.span_to_move(begin, begin + nbytes, storage_bytes)
    assert moved == ((0, storage_bytes) if 2 * nbytes >= storage_bytes else (begin, begin + nbytes))


@given(
    seen=st.lists(st.integers(1, 1 << 34), max_size=8), bytes_=st.none() | WINDOWS, count=st.none() | st.integers(1, 9)
)
def test_windows_are_what_was_set_or_a_few_of_the_largest_record(seen, bytes_, count):
    schedule = testing.Schedule()
    for nbytes in seen:
        schedule.saw_record(nbytes)
    largest = max(seen, default=0)
    default = max(largest, min(4 * largest, 1 << 30))
    expected = default if bytes_ is None else bytes_
    assert schedule.reload_window_bytes(bytes_) == expected
    assert schedule.offload_window_bytes(bytes_, None) == expected
    if bytes_ is None:
        assert schedule.offload_window_bytes(None, count) == (default if count is None else count * largest)
