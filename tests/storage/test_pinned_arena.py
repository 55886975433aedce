"""PinnedArena: exact ranges, growth, registration, trim and forks; with a driver that counts and refuses.

Growing ahead of need is in test_pinned_arena_growth.py.
"""

import ctypes
import resource
import threading

import pytest

from arenas import MIB, exit_code_in_child, testing


@pytest.fixture(autouse=True)
def _driver_that_agrees():
    yield
    testing.driver_refuses(False)


def smaps_kib(address, name):
    """A field of the mapping that `address` lies in."""
    with open("/proc/self/smaps") as smaps:
        lines = iter(smaps)
        for line in lines:
            first, _, last = line.split()[0].partition("-")
            if last and int(first, 16) <= address < int(last, 16):
                return next(int(field.split()[1]) for field in lines if field.startswith(f"{name}:"))
    raise AssertionError(f"{address:#x} is not mapped")


def test_an_empty_arena_has_no_room_until_it_grows():
    arena = testing.PinnedArena()
    assert arena.try_acquire(1) is None
    arena.grow(1)
    slot, guards = arena.try_acquire(1)
    assert (slot.nbytes, guards) == (512, [])
    assert (arena.used_bytes, arena.capacity_bytes, arena.grow_count) == (512, 2 * MIB, 1)


def test_slots_are_exact_aligned_and_do_not_overlap():
    arena = testing.PinnedArena()
    arena.grow(1)
    slots = [arena.try_acquire(nbytes)[0] for nbytes in (1, 513, 4096, 100_000)]
    assert [slot.nbytes for slot in slots] == [512, 1024, 4096, 100_352]
    for slot in slots:
        assert slot.address % 512 == 0
        ctypes.memset(slot.address, slot.offset % 251, slot.nbytes)
    for slot in slots:
        assert ctypes.string_at(slot.address, slot.nbytes) == bytes([slot.offset % 251]) * slot.nbytes


def test_it_grows_by_chunks_that_grow_with_it_and_by_the_request_when_that_is_more():
    arena = testing.PinnedArena(min_chunk_bytes=2 * MIB, max_chunk_bytes=4 * MIB)
    capacities = []
    for nbytes in (1, 10 * MIB - 1, MIB, 20 * MIB, MIB):
        while arena.try_acquire(nbytes) is None:
            arena.grow(nbytes)
            capacities.append(arena.capacity_bytes // MIB)
    assert capacities == [2, 12, 32, 36], "last: a quarter of what it had, but no more than the largest chunk"


def test_growing_where_there_is_room_takes_nothing():
    arena = testing.PinnedArena()
    arena.grow(1)
    arena.grow(2 * MIB)
    assert arena.grow_count == 1


def test_threads_that_grow_at_once_take_what_is_needed():
    arena = testing.PinnedArena()
    threads = [threading.Thread(target=arena.grow, args=(MIB,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert arena.grow_count == 1
    arena.check_invariants()


def test_a_big_chunk_is_touched_by_several_threads_to_its_end():
    arena = testing.PinnedArena()
    arena.grow(66 * MIB)
    slot, _ = arena.try_acquire(66 * MIB)
    assert smaps_kib(slot.address, "Rss") >= 66 * 1024
    assert slot.address % (2 * MIB) == 0


def test_a_released_slot_is_reused_at_once_with_its_guards():
    arena = testing.PinnedArena()
    arena.grow(1)
    slot, _ = arena.try_acquire(2 * MIB)
    arena.release(slot, [(4, 2), (5, 3)])
    again, guards = arena.try_acquire(2 * MIB)
    assert again.address == slot.address
    assert guards == [(4, 2), (5, 3)]


def test_trim_waits_for_the_guards_and_gives_idle_chunks_back():
    arena = testing.PinnedArena(driver="counting")
    arena.grow(1)
    kept, _ = arena.try_acquire(2 * MIB)
    arena.grow(1)
    dropped, _ = arena.try_acquire(MIB)
    arena.release(dropped, [(7, 9)])
    assert testing.registered_bytes() == 4 * MIB
    assert arena.trim() == 2 * MIB
    assert arena.waited == [(7, 9)]
    assert testing.registered_bytes() == arena.capacity_bytes == 2 * MIB
    ctypes.memset(kept.address, 1, kept.nbytes)
    arena.release(kept, [])
    assert arena.trim() == 2 * MIB
    assert (arena.capacity_bytes, testing.registered_bytes()) == (0, 0)
    arena.grow(1)
    arena.check_invariants()
    arena.trim()


def test_a_driver_that_refuses_leaves_the_arena_full_with_its_reason():
    arena = testing.PinnedArena(driver="counting")
    arena.refuse_plain_memory(True)
    testing.driver_refuses(True)
    with pytest.raises(testing.StoreFull, match=r"refused to pin 2097152 bytes.*out of pinnable memory"):
        arena.grow(1)
    assert (arena.capacity_bytes, arena.grow_count) == (0, 0)
    testing.driver_refuses(False)
    arena.grow(1)
    assert arena.try_acquire(1) is not None


def test_an_arena_that_may_have_plain_memory_takes_it_where_the_driver_refuses_and_tells_that_once():
    arena = testing.PinnedArena(driver="counting")
    registered = testing.registered_bytes()
    testing.driver_refuses(True)
    arena.grow(1)
    slot, _ = arena.try_acquire(arena.capacity_bytes)
    ctypes.memset(slot.address, 1, slot.nbytes)
    assert testing.registered_bytes() == registered
    assert "out of pinnable memory" in arena.take_trouble()
    arena.grow(1)
    assert arena.take_trouble() == ""
    arena.release(slot)
    assert arena.trim() > 0, "the driver is not asked to give back what it does not know"
    assert arena.capacity_bytes == 0
    arena.refuse_plain_memory(True)
    with pytest.raises(testing.StoreFull, match="refused to pin"):
        arena.grow(1)


def test_memory_that_the_driver_will_not_let_go_is_not_unmapped():
    arena = testing.PinnedArena(driver="counting")
    arena.grow(1)
    slot, _ = arena.try_acquire(512)
    arena.release(slot)
    testing.driver_refuses(True)
    assert arena.trim() == 0
    ctypes.memset(slot.address, 1, 512)


def test_without_huge_pages_the_pages_are_small_ones():
    pr_set_thp_disable = 41

    def check():
        assert ctypes.CDLL(None).prctl(pr_set_thp_disable, 1, 0, 0, 0) == 0
        arena = testing.PinnedArena(driver="counting")
        arena.grow(4 * MIB)
        slot, _ = arena.try_acquire(4 * MIB)
        ctypes.memset(slot.address, 1, slot.nbytes)
        assert smaps_kib(slot.address, "AnonHugePages") == 0
        assert smaps_kib(slot.address, "Rss") >= 4 * 1024

    assert exit_code_in_child(check) == 0


def test_a_request_that_no_machine_can_hold_is_a_full_store():
    for nbytes in (2**46, 2**62 + 1, 2**64 - 1):
        with pytest.raises(testing.StoreFull, match="bytes"):
            testing.PinnedArena().grow(nbytes)


def test_under_an_address_space_limit_it_takes_the_least_and_then_says_which_limit():
    def check():
        arena = testing.PinnedArena(min_chunk_bytes=512 * MIB, max_chunk_bytes=512 * MIB)
        with open("/proc/self/statm") as statm:
            mapped_bytes = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + 64 * MIB, resource.RLIM_INFINITY))
        arena.grow(1)
        assert arena.capacity_bytes == 2 * MIB
        with pytest.raises(testing.StoreFull, match="Cannot allocate memory; RLIMIT_AS is"):
            arena.grow(256 * MIB)

    assert exit_code_in_child(check) == 0


def test_in_a_forked_child_it_is_full_and_a_new_one_works():
    arena = testing.PinnedArena()
    arena.grow(1)
    slot, _ = arena.try_acquire(512)

    def check():
        assert arena.try_acquire(1) is None
        with pytest.raises(testing.StoreFull, match="forked process"):
            arena.grow(1)
        arena.release(slot)
        assert arena.trim() == 0
        assert arena.used_bytes == 0
        mine = testing.PinnedArena()
        mine.grow(1)
        assert mine.try_acquire(1) is not None

    assert exit_code_in_child(check) == 0
    assert arena.used_bytes == 512
