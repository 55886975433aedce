"""What a store of host memory and disks does when a disk fails, fills up, or is slow, with several threads at it."""

import errno
import random
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("torchoffload._C_testing", reason="the store is bound in the test build alone")

from places import SUPPORT
from tiers import BLOCK, ROOM, Tiers, in_thread, testing


@pytest.fixture(autouse=True)
def _faults_end():
    yield
    testing.clear_io_faults()
    testing.release_held_io("pread")
    testing.refuse_threads(0)
    testing.set_wait_limits()


def save_all(tiers: Tiers, values) -> None:
    for value in values:
        tiers.save(value)


@pytest.mark.parametrize(("call", "code"), [("pwrite", errno.EIO), ("pwrite", errno.ENOSPC), ("reserve", errno.ENOSPC)])
def test_a_write_that_fails_leaves_the_slot_in_memory_and_is_told_once(tmp_path, call, code):
    tiers = Tiers([tmp_path], slots=2)
    testing.inject_io_fault(call, errno=code)
    tiers.save(0)
    tiers.save(1)
    with pytest.raises(testing.StoreFull):
        tiers.save(2)
    assert "writing them to a disk failed" in tiers.store.take_trouble()
    assert tiers.store.take_trouble() == ""
    assert tiers.here() == [0, 1]
    tiers.check()


def test_a_disk_that_had_no_room_is_written_to_again_once_a_slot_on_it_is_released(tmp_path):
    tiers = Tiers([tmp_path], slots=1)
    tiers.save(0)
    tiers.save(1)
    tiers.run_all()
    testing.inject_io_fault("pwrite", errno=errno.ENOSPC)
    tiers.run_all()
    with pytest.raises(testing.StoreFull):
        save_all(tiers, range(2, 6))
    testing.clear_io_faults()
    with pytest.raises(testing.StoreFull):
        tiers.save(7)
    tiers.drop(0)
    tiers.save(8)
    tiers.check()


def full_for_a_moment(tiers: Tiers, code: int) -> None:
    """A wave in which the disk takes nothing."""
    testing.inject_io_fault("pwrite", errno=code)
    with pytest.raises(testing.StoreFull):
        save_all(tiers, range(8))
    testing.clear_io_faults()


def drop_all(tiers: Tiers) -> None:
    for value in list(tiers.slots):
        tiers.drop(value)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_failed_is_tried_again_in_the_next_wave(tmp_path, code):
    """Though no slot ever was on it."""
    tiers = Tiers([tmp_path], slots=2)
    full_for_a_moment(tiers, code)
    assert tiers.store.disk_bytes == 0
    with pytest.raises(testing.StoreFull):
        tiers.save(9)
    drop_all(tiers)
    save_all(tiers, range(8))
    assert tiers.store.disk_bytes > 0
    tiers.check()


def test_a_disk_that_failed_is_tried_again_after_a_minute(tmp_path):
    tiers = Tiers([tmp_path], slots=2)
    full_for_a_moment(tiers, errno.EIO)
    testing.advance_clock_of_stores(59)
    with pytest.raises(testing.StoreFull):
        tiers.save(8)
    testing.advance_clock_of_stores(1)
    save_all(tiers, range(8, 16))
    tiers.check()


def test_a_broken_disk_is_tried_with_one_slot_and_ever_less_often(tmp_path):
    tiers = Tiers([tmp_path], slots=2)
    full_for_a_moment(tiers, errno.EIO)
    testing.inject_io_fault("pwrite", errno=errno.EIO)
    tries = []
    for _ in range(40):
        drop_all(tiers)
        before = testing.io_call_count("pwrite")
        with pytest.raises(testing.StoreFull):
            save_all(tiers, range(8))
        tries.append(testing.io_call_count("pwrite") - before)
    assert [wave for wave, count in enumerate(tries) if count] == [0, 2, 6, 14, 30]
    assert max(tries) == 1, "one slot at a time"
    assert tiers.store.take_trouble(), "and told once"
    assert tiers.store.take_trouble() == ""


def test_a_thread_that_could_not_be_started_is_asked_for_again(tmp_path):
    tiers = Tiers([tmp_path], slots=2, by_hand=False)
    testing.refuse_threads(errno.EAGAIN)
    with pytest.raises(testing.StoreFull, match="cannot start an I/O thread"):
        save_all(tiers, range(8))
    testing.refuse_threads(0)
    drop_all(tiers)
    save_all(tiers, range(8))
    tiers.check()


def test_without_a_thread_who_wants_a_slot_reads_it(tmp_path):
    tiers = Tiers([tmp_path], slots=1, by_hand=False)
    save_all(tiers, range(3))
    tiers.store.trim()  # ends the threads
    testing.refuse_threads(errno.EAGAIN)
    assert tiers.load(0) == bytes(BLOCK)
    testing.inject_io_fault("pread", errno=errno.EIO)
    with pytest.raises(RuntimeError, match="Input/output error"):
        tiers.load(1)
    testing.clear_io_faults()
    assert not tiers.store.begin_fetch(tiers.slots[1]), "nothing is read ahead"
    tiers.check()
    testing.refuse_threads(0)
    tiers.check()


def test_a_wait_for_a_disk_that_does_not_answer_is_told_once_with_the_file(tmp_path, capfd):
    tiers = Tiers([tmp_path], slots=1, by_hand=False)
    save_all(tiers, range(3))
    testing.set_wait_limits(slice_ms=1, until_told_ms=200)
    testing.hold_next_io("pread")
    told, deadline = "", time.monotonic() + 30
    with in_thread(lambda: tiers.load(0)) as loaded:
        while not told and time.monotonic() < deadline:
            time.sleep(0.01)
            told += capfd.readouterr().err
        time.sleep(0.3)
        testing.release_held_io("pread")
    assert loaded == [bytes(BLOCK)]
    told += capfd.readouterr().err
    assert told.count("waited") == 1
    assert f"for a saved tensor to be read from the spill file in '{tmp_path}'" in told


def test_stop_does_not_wait_for_ever_for_a_device_that_hangs(tmp_path, capfd):
    """In a process of its own, since the time is counted for all that is waited for at the end."""
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "tier_programs.py"), "stops_beside_a_device_that_hangs", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "a copy between the device and host memory at the end of the process, and leaves it behind" in done.stderr


def test_when_one_of_two_disks_fails_the_other_one_takes_the_rest(tmp_path):
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    tiers = Tiers(directories, slots=1)
    testing.inject_io_fault("pwrite", errno=errno.EIO, times=1)
    for value in range(8):
        tiers.save(value)
    tiers.check()


def test_a_read_that_fails_is_an_error_for_each_that_asks_and_the_next_reads_again(tmp_path):
    tiers = Tiers([tmp_path], slots=1)
    tiers.save(0)
    tiers.save(1)
    tiers.save(2)
    testing.inject_io_fault("pread", errno=errno.EIO)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"read of 4096 bytes .* failed .*Input/output error"):
            tiers.load(0)
    testing.clear_io_faults()
    tiers.check()


def test_several_who_wait_for_one_read_are_all_told_that_it_failed(tmp_path):
    tiers = Tiers([tmp_path], slots=1, by_hand=False)
    for value in range(3):
        tiers.save(value)
    tiers.load(2)
    testing.inject_io_fault("pread", errno=errno.EIO)
    testing.hold_next_io("pread")
    with in_thread(lambda: tiers.load(0)) as first, in_thread(lambda: tiers.load(0)) as second:
        testing.release_held_io("pread")
    assert all(isinstance(outcome, RuntimeError) for outcome in first + second)
    testing.clear_io_faults()
    tiers.check()


def test_a_read_ahead_that_fails_is_tried_again_by_who_asks(tmp_path):
    tiers = Tiers([tmp_path], slots=2)
    for value in range(5):
        tiers.save(value)
    tiers.run_all()
    tiers.drop(4)
    tiers.drop(3)
    testing.inject_io_fault("pread", errno=errno.EIO, times=1)
    assert tiers.store.begin_fetch(tiers.slots[0])
    tiers.run_all()
    assert not tiers.is_here(0)
    assert tiers.load(0) == bytes(BLOCK)
    tiers.check()


def test_a_deleted_directory_is_full(tmp_path):
    directory = tmp_path / "gone"
    directory.mkdir()
    tiers = Tiers([directory], slots=1)
    directory.rmdir()
    tiers.save(0)
    with pytest.raises(testing.StoreFull, match="cannot make a spill file"):
        tiers.save(1)
    tiers.check()


def test_a_slot_that_is_released_while_its_write_hangs_waits_for_it(tmp_path):
    tiers = Tiers([tmp_path], slots=2, by_hand=False, writes_at_once=True)
    testing.hold_next_io("pwrite")
    tiers.save(0)
    tiers.drop(0)
    assert tiers.store.memory_bytes in (0, ROOM)  # the write had not begun, or hangs
    tiers.save(1)
    testing.release_held_io("pwrite")
    tiers.check()
    assert tiers.store.memory_bytes <= 2 * ROOM


def test_who_waits_for_room_goes_on_when_a_slot_is_released(tmp_path):
    tiers = Tiers([tmp_path], slots=1, by_hand=False)
    tiers.save(0)
    testing.hold_next_io("pwrite")
    with in_thread(lambda: tiers.save(1)):
        testing.release_held_io("pwrite")
    tiers.check()


def test_stop_ends_waits_and_nothing_is_written_after_it(tmp_path):
    tiers = Tiers([tmp_path], slots=1)
    tiers.save(0)
    tiers.store.stop()
    before = testing.io_call_count("pwrite")
    with pytest.raises(testing.StoreFull, match="about to end"):
        tiers.store.grow(BLOCK)
    tiers.run_all()  # what was on its way is given up
    assert testing.io_call_count("pwrite") == before
    assert tiers.load(0) == bytes(BLOCK)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("faulty", [False, True], ids=["sound", "faulty"])
def test_threads_at_one_store_never_get_wrong_bytes(tmp_path, seed, faulty):
    """Each saves, reads and drops slots of its own, in one memory that is far too small."""
    tiers = Tiers([tmp_path], slots=3, by_hand=False)
    store = tiers.store
    errors: list[BaseException] = []

    def check(slot, value):
        held = store.hold(slot)
        try:
            assert bytes(testing.bytes_at(held.address, slot.nbytes)) == bytes([value]) * slot.nbytes
        finally:
            store.release_hold(slot, (2, 1))

    def work(number):
        random_ = random.Random(1000 * seed + number)
        mine = []
        try:
            for step in range(60):
                choice = random_.random()
                if choice < 0.45:
                    nbytes = BLOCK * random_.choice((1, 1, 2, 5))
                    value = (31 * number + step) % 256
                    try:
                        slot = store.acquire(nbytes, value)
                    except testing.StoreFull:
                        continue
                    if random_.random() < 0.1:
                        store.release(slot, [(1, 1)])
                        continue
                    store.note_filled(slot, (1, step + 1))
                    mine.append((slot, value))
                elif mine and choice < 0.75:
                    try:
                        check(*random_.choice(mine))
                    except RuntimeError:
                        assert faulty
                elif mine and choice < 0.85:
                    store.begin_fetch(random_.choice(mine)[0])
                elif mine:
                    slot, _ = mine.pop(random_.randrange(len(mine)))
                    store.release(slot)
            testing.clear_io_faults()
            for slot, value in mine:
                check(slot, value)
                store.release(slot)
        except BaseException as error:
            errors.append(error)

    if faulty:
        testing.inject_io_fault("pread", errno=errno.EIO, after=20, times=5)
        testing.inject_io_fault("pwrite", errno=errno.ENOSPC, after=30, times=3)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "it waits for ever"
    assert errors == []
