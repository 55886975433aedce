"""When slots are written: waves of slots, those that stay, and what the next ones are expected to want."""

import pytest

pytest.importorskip("torchoffload._C_testing", reason="the store is bound in the test build alone")

import torchoffload
from tiers import Tiers, testing


def forward_and_backward(tiers: Tiers, count: int) -> tuple[int, int]:
    """How many transfers the store began by itself while `count` slots were saved, and how often that had to wait."""
    before, begun = torchoffload.stats().disk_waits, 0
    for value in range(count):
        tiers.save(value)
        begun += tiers.run_all()
    waits = torchoffload.stats().disk_waits - before
    for value in reversed(range(count)):
        tiers.load(value)
        tiers.drop(value)
    tiers.run_all()
    tiers.store.check_invariants()
    return begun, waits


@pytest.mark.parametrize("kept", [0, 1, 3, 60])
def test_slots_that_stay_are_no_hindrance_to_writing_in_time(tmp_path, kept):
    """Of a graph that is kept, of another micro-batch, of an average of the weights."""
    tiers = Tiers([tmp_path], slots=4)
    for _ in range(2):
        forward_and_backward(tiers, 10)
    for value in range(100, 100 + kept):
        tiers.save(value)
        tiers.run_all()
    forward_and_backward(tiers, 8)
    counts = [forward_and_backward(tiers, 8) for _ in range(5)]
    assert [waits for _, waits in counts] == [0] * 5
    least = 4 if kept < 4 else 8 - 4
    assert all(least <= begun <= 8 for begun, _ in counts), counts
    tiers.check()


def test_a_longer_wave_is_forgotten_after_two_shorter_ones(tmp_path):
    tiers = Tiers([tmp_path], slots=4)
    for count in (12, 6, 6):
        forward_and_backward(tiers, count)
    assert forward_and_backward(tiers, 6) == (2, 0), "two of six do not fit, and nothing else is written"


def test_waves_that_take_turns_are_both_expected(tmp_path):
    tiers = Tiers([tmp_path], slots=4)
    for count in (4, 9, 4):
        forward_and_backward(tiers, count)
    begun = 0
    for value in range(6):
        tiers.save(value)
        begun += tiers.run_all()
    assert begun == 5, "five of nine do not fit"
    tiers.check()


def test_micro_batches_in_turn_write_what_the_next_ones_have_no_room_for(tmp_path):
    """One forward, one backward, with three graphs alive: the slots never come down to none."""
    tiers = Tiers([tmp_path], slots=6)
    for step in range(30):
        before = torchoffload.stats().disk_waits
        for value in range(4):
            tiers.save((4 * step + value) % 200)
            tiers.run_all()
        if step > 6:
            assert torchoffload.stats().disk_waits == before
        for value in reversed(range(4 * step - 8, 4 * step - 4)):
            if step >= 2:
                tiers.load(value % 200)
                tiers.drop(value % 200)
    tiers.check()


def test_what_is_dropped_at_the_beginning_of_a_wave_does_not_end_it(tmp_path):
    tiers = Tiers([tmp_path], slots=16)
    for _ in range(2):
        forward_and_backward(tiers, 32)
    for value in (100, 101, 102, 103):
        tiers.save(value)
        tiers.run_all()
        if value > 100:
            tiers.drop(value)
    begun = 0
    for value in range(8):
        tiers.save(value)
        begun += tiers.run_all()
    assert begun == 8, "sixteen of 32 do not fit"
    tiers.check()


def test_what_is_still_written_as_it_is_dropped_ends_no_wave(tmp_path):
    """A step often begins while the disk is at the last slots of the one before."""
    tiers = Tiers([tmp_path], slots=16)
    for _ in range(2):
        forward_and_backward(tiers, 32)
        for value in range(32):
            tiers.save(value)
        for value in range(32):
            tiers.drop(value)  # with transfers that have not run
    for value in range(4):
        tiers.save(value)
    assert tiers.run_all() >= 4
    begun = 0
    for value in range(4, 8):
        tiers.save(value)
        begun += tiers.run_all()
    assert begun == 4, "sixteen of 32 do not fit"
    tiers.check()


def test_what_is_used_up_is_no_reason_to_write(tmp_path):
    """While backwards give slots back, nothing is about to be wanted."""
    tiers = Tiers([tmp_path], slots=4)
    for _ in range(3):
        forward_and_backward(tiers, 8)
    for value in range(8):
        tiers.save(value)
        tiers.run_all()
    tiers.drop(7)  # room for one that comes back
    before = testing.io_call_count("pwrite")
    for value in range(7):  # the oldest first, which are on the disk
        tiers.load(value)
        tiers.drop(value)
        tiers.run_all()
    assert testing.io_call_count("pwrite") == before
