"""Slots in host memory that go on to disks: where each is, in which order they leave and come back, what they keep."""

import errno
import os
import stat

import pytest

pytest.importorskip("torchoffload._C_testing", reason="the store is bound in the test build alone")

from tiers import BLOCK, ROOM, Tiers, testing


@pytest.fixture(autouse=True)
def _faults_end():
    yield
    testing.clear_io_faults()


def test_what_fits_stays_in_memory_and_nothing_is_written(tmp_path):
    tiers = Tiers([tmp_path], slots=16)
    for value in range(8):
        tiers.save(value)
    assert tiers.run_all() == 0
    assert tiers.here() == list(range(8))
    assert tiers.store.disk_bytes == 0
    tiers.check()


def test_the_slots_that_were_saved_first_go_to_the_disk_first(tmp_path):
    tiers = Tiers([tmp_path], slots=4)
    for value in range(12):
        tiers.save(value)
        tiers.store.check_invariants()
    here = tiers.here()
    assert here == list(range(12 - len(here), 12))
    assert tiers.store.memory_bytes <= 4 * ROOM
    tiers.check()


def test_memory_is_given_up_only_when_it_is_wanted(tmp_path):
    tiers = Tiers([tmp_path], slots=4)
    for value in range(4):
        tiers.save(value)
    assert tiers.run_all() > 0, "the oldest are written ahead of need"
    assert tiers.here() == [0, 1, 2, 3], "and are still in memory"
    before = testing.io_call_count("pread")
    tiers.check()
    assert testing.io_call_count("pread") == before


def save_and_drop(tiers: Tiers, count: int) -> None:
    """A wave: slots are saved, and dropped from the latest to the first."""
    for value in range(count):
        tiers.save(value)
    for value in reversed(range(count)):
        tiers.load(value)
        tiers.drop(value)
    tiers.run_all()


def test_a_known_excess_is_written_from_the_first_slot_on_and_nothing_more(tmp_path):
    tiers = Tiers([tmp_path], slots=4)
    save_and_drop(tiers, 6)
    for value in range(3):
        tiers.save(value)
    before = testing.io_call_count("pwrite")
    assert tiers.run_all() == 2, "two of six slots will not fit, though there is room for another one now"
    for value in range(3, 6):
        tiers.save(value)
    assert tiers.run_all() == 0
    assert tiers.here() == [2, 3, 4, 5]
    assert testing.io_call_count("pwrite") == before + 2
    tiers.check()


def test_a_wave_like_the_last_one_that_fits_writes_nothing(tmp_path):
    tiers = Tiers([tmp_path], slots=4)
    save_and_drop(tiers, 4)  # nothing is known yet, and slots are written ahead of need
    before = testing.io_call_count("pwrite")
    save_and_drop(tiers, 4)
    assert testing.io_call_count("pwrite") == before


def test_a_wave_with_more_slots_than_expected_writes_ahead_of_need(tmp_path):
    tiers = Tiers([tmp_path], slots=4)
    save_and_drop(tiers, 2)
    for value in range(3):
        tiers.save(value)
        tiers.store.check_invariants()
    assert tiers.run_all() > 0
    for value in range(3, 8):
        tiers.save(value)
    assert tiers.here() == [4, 5, 6, 7]
    tiers.check()


def test_a_write_that_failed_is_not_taken_for_one_that_makes_room(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    tiers = Tiers([tmp_path, other], slots=4)
    save_and_drop(tiers, 6)
    testing.inject_io_fault("pwrite", errno=errno.EIO, times=1)
    for value in range(3):
        tiers.save(value)
    assert tiers.run_all() == 3, "one that failed, and two for the slots that will not fit"
    for value in range(3, 6):
        tiers.save(value)
    assert tiers.run_all() == 0
    assert tiers.here() == [2, 3, 4, 5]
    tiers.store.check_invariants()
    tiers.check()


def test_what_was_fetched_gives_its_memory_up_without_being_written_again(tmp_path):
    tiers = Tiers([tmp_path], slots=2)
    for value in range(6):
        tiers.save(value)
    tiers.check()
    before = testing.io_call_count("pwrite")
    tiers.check()
    assert testing.io_call_count("pwrite") == before


def test_a_slot_that_is_held_stays(tmp_path):
    tiers = Tiers([tmp_path], slots=2)
    first = tiers.save(0)
    held = tiers.store.hold(first)
    for value in range(1, 6):
        tiers.save(value)
    assert tiers.is_here(0)
    assert bytes(testing.bytes_at(held.address, BLOCK)) == bytes(BLOCK)
    tiers.store.release_hold(first, (2, 1))
    tiers.save(6)
    tiers.save(7)
    assert not tiers.is_here(0)
    tiers.check()


def test_a_fetch_waits_for_the_copies_that_used_its_memory_before(tmp_path):
    tiers = Tiers([tmp_path], slots=1)
    for value in range(2):
        tiers.save(value)
    tiers.run_all()
    tiers.load(1)
    tiers.store.hold(tiers.slots[1])
    tiers.store.release_hold(tiers.slots[1], (9, 5))  # a copy in reads the memory
    before = len(tiers.store.waited)
    assert tiers.load(0) == bytes(BLOCK)
    assert (9, 5) in tiers.store.waited[before:]


def test_the_disks_thread_waits_for_the_copy_out_before_it_writes(tmp_path):
    tiers = Tiers([tmp_path], slots=1, writes_at_once=True)
    tiers.save(0)
    assert tiers.store.waited == []
    tiers.run_all()
    assert tiers.store.waited == [(1, 1)]


def test_a_slot_larger_than_the_limit_has_room_once_nothing_can_leave(tmp_path):
    tiers = Tiers([tmp_path], slots=1)
    tiers.save(1)
    large = tiers.save(2, 8 * BLOCK)
    assert large.nbytes == 8 * BLOCK
    assert not tiers.is_here(1)
    tiers.check()


@pytest.mark.parametrize("writes_at_once", [False, True])
def test_a_budget_of_zero_has_one_slot_pass_at_a_time(tmp_path, writes_at_once):
    tiers = Tiers([tmp_path], slots=0, writes_at_once=writes_at_once)
    for value in range(6):
        tiers.save(value)
        assert tiers.store.memory_bytes <= ROOM
    tiers.check()


def test_while_slots_are_filled_or_held_room_is_taken_beyond_the_limit(tmp_path):
    """Two threads that waited for each other's slots would wait for ever."""
    tiers = Tiers([tmp_path], slots=1)
    being_filled = [tiers.store.acquire(BLOCK, value) for value in range(4)]
    assert all(slot is not None for slot in being_filled)
    for serial, slot in enumerate(being_filled):
        tiers.store.note_filled(slot, (1, serial + 1))
        tiers.slots[serial] = slot
    tiers.check()
    tiers.save(9)
    assert tiers.store.memory_bytes <= 2 * ROOM, "and given back afterwards"


def test_a_full_store_says_that_room_is_on_its_way(tmp_path):
    tiers = Tiers([tmp_path], slots=2)
    assert not tiers.store.grow_awaits_disk(BLOCK)
    tiers.save(0)
    tiers.save(1)
    assert tiers.store.grow_awaits_disk(BLOCK)
    assert tiers.run_all() > 0, "it has begun to write"
    assert not tiers.store.grow_awaits_disk(BLOCK)
    assert tiers.here() == [0, 1], "who asks takes nothing away from what fits"
    tiers.store.check_invariants()
    assert tiers.save(2, may_wait=False) is not None
    tiers.check()


def test_a_slot_larger_than_the_limit_waits_until_nothing_else_can_be_written(tmp_path):
    tiers = Tiers([tmp_path], slots=2)
    tiers.save(0)
    tiers.save(1)
    asked = 0
    while tiers.store.grow_awaits_disk(8 * BLOCK):
        tiers.store.check_invariants()
        assert tiers.run_all() > 0
        asked += 1
    assert asked > 0
    tiers.save(2, 8 * BLOCK)
    tiers.check()


def test_where_the_arena_is_cut_up_room_is_on_its_way_as_well(tmp_path):
    tiers = Tiers([tmp_path], slots=16)
    for value in range(16):
        tiers.save(value)
    while tiers.store.grow_awaits_disk(4 * BLOCK):
        assert tiers.run_all() > 0
    assert tiers.save(99, 4 * BLOCK, may_wait=False) is not None or tiers.store.arena_bytes < tiers.store.limit_bytes
    tiers.check()


def test_nothing_is_waited_for_where_no_slot_can_leave(tmp_path):
    tiers = Tiers([tmp_path], slots=1)
    being_filled = tiers.store.acquire(BLOCK, 0)
    assert not tiers.store.grow_awaits_disk(BLOCK), "one passes beyond the limit"
    tiers.store.note_filled(being_filled, (1, 1))
    tiers.slots[0] = being_filled
    held = tiers.store.hold(being_filled)
    assert tiers.store.grow_awaits_disk(BLOCK)
    tiers.run_all()
    assert not tiers.store.grow_awaits_disk(BLOCK), "it is on the disk as well, but held"
    assert held.address
    tiers.store.release_hold(being_filled)
    tiers.check()


def test_a_store_whose_disk_failed_or_that_was_stopped_has_no_room_on_its_way(tmp_path):
    tiers = Tiers([tmp_path], slots=1)
    tiers.save(0)
    testing.inject_io_fault("pwrite", errno=errno.EIO)
    assert tiers.store.grow_awaits_disk(BLOCK)
    tiers.run_all()
    assert not tiers.store.grow_awaits_disk(BLOCK)
    with pytest.raises(RuntimeError, match="Input/output error"):
        tiers.store.grow(BLOCK)
    tiers.store.stop()
    assert not tiers.store.grow_awaits_disk(BLOCK)


def test_a_released_slot_gives_up_memory_and_disk(tmp_path):
    tiers = Tiers([tmp_path], slots=2)
    for value in range(6):
        tiers.save(value)
    tiers.run_all()
    for value in range(6):
        tiers.drop(value)
    assert (tiers.store.memory_bytes, tiers.store.disk_bytes) == (0, 0)
    tiers.store.trim()
    assert tiers.store.arena_bytes == 0
    tiers.store.check_invariants()


@pytest.mark.parametrize("writes_at_once", [False, True])
def test_a_slot_released_while_it_is_written_is_given_back_after_the_write(tmp_path, writes_at_once):
    tiers = Tiers([tmp_path], slots=1, writes_at_once=writes_at_once)
    tiers.save(0)
    if not writes_at_once:
        tiers.save(1, may_wait=False)
    tiers.drop(0)
    tiers.run_all()
    assert 0 not in tiers.here()
    tiers.save(2)
    tiers.check()


def test_trim_waits_for_slots_that_were_released_while_they_were_written(tmp_path):
    tiers = Tiers([tmp_path], slots=4, writes_at_once=True)
    tiers.save(0)
    tiers.drop(0)
    assert tiers.store.memory_bytes == ROOM
    assert tiers.store.trim() > 0
    assert (tiers.store.memory_bytes, tiers.store.arena_bytes) == (0, 0)


def test_a_slot_released_while_it_is_read_is_given_back_after_the_read(tmp_path):
    tiers = Tiers([tmp_path], slots=2)
    for value in range(5):
        tiers.save(value)
    tiers.run_all()
    tiers.drop(4)
    tiers.drop(3)
    assert tiers.store.begin_fetch(tiers.slots[0])
    used = tiers.store.memory_bytes
    tiers.drop(0)
    assert tiers.store.memory_bytes == used, "its memory is not another's yet"
    tiers.run_all()
    assert tiers.store.memory_bytes < used
    tiers.check()


def test_a_fetch_ahead_takes_no_memory_from_what_is_wanted_sooner(tmp_path):
    tiers = Tiers([tmp_path], slots=3)
    for value in range(8):
        tiers.save(value)
    tiers.run_all()
    here = tiers.here()
    assert not tiers.store.begin_fetch(tiers.slots[0]), "all in memory was saved later"
    assert tiers.here() == here
    tiers.drop(7)
    tiers.drop(6)
    assert tiers.store.begin_fetch(tiers.slots[0])
    assert not tiers.is_here(0), "it is on its way"
    assert tiers.store.try_hold(tiers.slots[0]) is None
    tiers.run_all()
    assert tiers.is_here(0)
    tiers.check()


def test_several_directories_share_the_slots(tmp_path):
    directories = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    for directory in directories:
        directory.mkdir()
    tiers = Tiers(directories, slots=0)
    for value in range(9):
        tiers.save(value)
    tiers.save(100)
    tiers.check()
    open_files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)]
    assert all(any(str(directory) in name for name in open_files) for directory in directories)


def _is_link(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


def test_nobody_else_can_read_what_is_written(tmp_path):
    """The file has no name, and no rights for others."""
    tiers = Tiers([tmp_path], slots=0)
    tiers.save(1)
    tiers.save(2)
    assert list(tmp_path.iterdir()) == []
    files = [fd for fd in os.listdir("/proc/self/fd") if _is_link(fd)]
    modes = [os.fstat(int(fd)).st_mode for fd in files if str(tmp_path) in os.readlink(f"/proc/self/fd/{fd}")]
    assert modes
    assert {stat.S_IMODE(mode) for mode in modes} == {0o600}


def test_an_unused_directory_has_no_open_file(tmp_path):
    tiers = Tiers([tmp_path], slots=8)
    tiers.save(1)
    open_files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)]
    assert not any(str(tmp_path) in name for name in open_files)


def test_a_directory_that_does_not_exist_is_an_error_at_once(tmp_path):
    with pytest.raises(RuntimeError, match="cannot make a spill file"):
        Tiers([tmp_path / "absent"], slots=1)


def test_trim_drops_what_is_on_the_disk_as_well_from_memory(tmp_path):
    tiers = Tiers([tmp_path], slots=8, writes_at_once=True)
    for value in range(4):
        tiers.save(value)
    tiers.run_all()
    assert tiers.here() == [0, 1, 2, 3]
    assert tiers.store.trim() > 0
    assert tiers.here() == []
    tiers.check()


def test_all_stores_of_the_process_count_their_memory(tmp_path):
    before = testing.spill_memory_bytes()
    tiers = Tiers([tmp_path], slots=4)
    tiers.save(0)
    tiers.save(1)
    assert testing.spill_memory_bytes() == before + 2 * ROOM
    tiers.drop(0)
    tiers.drop(1)
    assert testing.spill_memory_bytes() == before


def test_without_a_budget_of_its_own_the_limit_is_the_default_budget(tmp_path):
    tiers = Tiers([tmp_path], slots=None)
    assert tiers.store.limit_bytes == pytest.approx(testing.default_budget_bytes(testing.read_host_memory()), rel=0.2)
    tiers.save(0)
    assert tiers.run_all() == 0
    tiers.check()
