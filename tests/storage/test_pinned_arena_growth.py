"""PinnedArena: chunks taken ahead of need, in the background."""

import contextlib
import os
import subprocess
import sys
import threading

import pytest

from arenas import CHUNK, MIB, acquire, arena_of_chunks, exit_code_in_child, settle, testing, wait_until


@pytest.fixture(autouse=True)
def _driver_that_agrees():
    yield
    testing.hold_driver(False)
    testing.driver_refuses(False)


@contextlib.contextmanager
def chunk_in_the_making(arena, wanted_bytes):
    """The driver is held with the first chunk; what comes after the block has it let go."""
    testing.hold_driver(True)
    arena.reserve(wanted_bytes)
    wait_until(lambda: testing.driver_waiting_count() == 1, "the arena's thread asks the driver")
    yield
    testing.hold_driver(False)


@contextlib.contextmanager
def waits_for_it(call, *args):
    """`call` does not return while the driver is held, and does after the block."""
    thread = threading.Thread(target=call, args=args)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    with contextlib.ExitStack() as after:
        after.callback(thread.join)
        after.callback(testing.hold_driver, False)
        yield


# ---- ahead of need ----


def test_what_is_reserved_comes_in_the_background_and_nothing_beyond_it():
    arena = arena_of_chunks()
    arena.reserve(5 * CHUNK - 1)
    settle(arena)
    assert (arena.capacity_bytes, arena.grow_count) == (5 * CHUNK, 5)
    for _ in range(5):
        assert arena.try_acquire(CHUNK) is not None
        settle(arena)
    assert (arena.capacity_bytes, arena.grow_count) == (5 * CHUNK, 5)
    assert arena.try_acquire(1) is None
    arena.check_invariants()


def test_with_nothing_asked_for_nothing_is_taken_ahead():
    arena = arena_of_chunks()
    for _ in range(3):
        acquire(arena, CHUNK)
        assert not arena.is_growing
    assert arena.grow_count == 3


def test_while_slots_are_acquired_one_chunk_is_held_ahead_of_them_up_to_the_limit():
    arena = arena_of_chunks()
    arena.grow_ahead(6 * CHUNK + CHUNK // 2)
    settle(arena)
    assert arena.capacity_bytes == 0, "there are no copies yet"
    arena.grow(1)
    used_bytes = 0
    while (acquired := arena.try_acquire(CHUNK // 4)) is not None:
        used_bytes += acquired[0].nbytes
        settle(arena)
        in_use = -(-used_bytes // CHUNK)
        assert arena.capacity_bytes == min(in_use + 1, 6) * CHUNK
    assert used_bytes == 6 * CHUNK


def test_chunks_ahead_grow_with_the_arena_and_hold_the_largest_slot_but_for_rare_ones():
    arena = testing.PinnedArena(min_chunk_bytes=2 * MIB, max_chunk_bytes=4 * MIB)
    arena.grow_ahead(1 << 40)
    acquire(arena, 80 * MIB)
    settle(arena)
    assert arena.capacity_bytes == 84 * MIB, "a slot of 20 chunks is no reason to hold as much again"
    acquire(arena, 10 * MIB)
    settle(arena)
    assert arena.capacity_bytes == (84 + 10 + 10) * MIB
    acquire(arena, MIB)
    settle(arena)
    assert arena.capacity_bytes == (84 + 10 + 10) * MIB, "there is still a whole one"


def test_a_chunk_on_need_stays_below_the_limit_unless_the_request_is_above_it():
    arena = testing.PinnedArena(min_chunk_bytes=8 * MIB, max_chunk_bytes=8 * MIB)
    arena.grow_ahead(10 * MIB)
    acquire(arena, 8 * MIB)
    settle(arena)
    assert arena.capacity_bytes == 10 * MIB
    acquire(arena, 3 * MIB)
    assert arena.capacity_bytes == 14 * MIB


def test_a_copy_without_room_waits_for_the_chunk_in_the_making():
    arena = arena_of_chunks("counting")
    with chunk_in_the_making(arena, CHUNK), waits_for_it(arena.grow, MIB):
        pass
    assert (arena.capacity_bytes, arena.grow_count) == (CHUNK, 1)


def test_a_copy_that_the_chunk_in_the_making_is_too_small_for_takes_its_own():
    arena = arena_of_chunks("counting")
    with chunk_in_the_making(arena, CHUNK), waits_for_it(arena.grow, 2 * CHUNK):
        pass
    assert arena.try_acquire(2 * CHUNK) is not None
    assert (arena.capacity_bytes, arena.grow_count) == (3 * CHUNK, 2)


def test_who_waits_comes_before_the_next_chunk_ahead():
    arena = arena_of_chunks("counting")
    with chunk_in_the_making(arena, 200 * CHUNK), waits_for_it(arena.grow, 2 * CHUNK):
        pass
    slot, _ = arena.try_acquire(2 * CHUNK)
    assert slot.block == 1
    arena.grow_on_need()


def test_growing_on_need_again_forgets_what_was_wanted_and_waits_for_the_chunk_in_the_making():
    arena = arena_of_chunks("counting")
    with chunk_in_the_making(arena, 8 * CHUNK), waits_for_it(arena.grow_on_need):
        pass
    assert not arena.is_growing
    assert (arena.capacity_bytes, arena.grow_count) == (CHUNK, 1)


def test_trim_forgets_what_was_wanted():
    arena = arena_of_chunks("counting")
    before = testing.registered_bytes()
    with chunk_in_the_making(arena, 8 * CHUNK), waits_for_it(arena.trim):
        pass
    settle(arena)
    assert (arena.capacity_bytes, testing.registered_bytes()) == (0, before)


def test_a_refusal_ahead_is_made_once_and_told_to_the_copy_that_finds_no_room():
    arena = testing.PinnedArena(driver="counting", min_chunk_bytes=8 * MIB, max_chunk_bytes=8 * MIB)
    calls = testing.driver_call_count()
    arena.refuse_plain_memory(True)
    testing.driver_refuses(True)
    arena.reserve(64 * MIB)
    settle(arena)
    assert testing.driver_call_count() - calls == 1
    for _ in range(3):
        with pytest.raises(testing.StoreFull, match=r"refused to pin 2097152 bytes.*out of pinnable memory"):
            arena.grow(1)
    assert testing.driver_call_count() - calls == 4, "the least that would do, and nothing ahead"
    testing.driver_refuses(False)
    acquire(arena, MIB)
    arena.trim()
    arena.reserve(64 * MIB)
    settle(arena)
    assert arena.capacity_bytes == 64 * MIB


def test_little_that_is_given_after_a_refusal_is_no_reason_to_ask_for_much_again():
    arena = testing.PinnedArena(driver="counting", min_chunk_bytes=8 * MIB, max_chunk_bytes=8 * MIB)
    testing.driver_refuses(True)
    arena.reserve(16 * MIB)
    settle(arena)
    testing.driver_refuses(False)
    for _ in range(3):
        acquire(arena, 2 * MIB)
        settle(arena)
    assert arena.capacity_bytes == 6 * MIB
    acquire(arena, 8 * MIB)  # as much as was refused
    settle(arena)
    assert arena.capacity_bytes == 16 * MIB


# ---- signals, forks, the end ----


def test_its_thread_starts_with_the_first_chunk_ahead_and_takes_no_signals():
    arena = arena_of_chunks("counting")
    before = set(os.listdir("/proc/self/task"))
    arena.grow_ahead(8 * CHUNK)
    arena.grow(1)
    assert set(os.listdir("/proc/self/task")) == before
    with chunk_in_the_making(arena, 4 * CHUNK):
        (task,) = set(os.listdir("/proc/self/task")) - before
        with open(f"/proc/self/task/{task}/status") as status:
            fields = dict(line.split(":", 1) for line in status)
        assert fields["Name"].strip() == "arena-growth"
        blocked = int(fields["SigBlk"], 16)
        assert all(blocked & 1 << (number - 1) for number in (2, 10, 15))  # SIGINT, SIGUSR1, SIGTERM
    settle(arena)


def test_stop_lets_the_chunk_in_the_making_finish_and_nothing_is_taken_or_given_after_it():
    arena = arena_of_chunks("counting")
    with chunk_in_the_making(arena, 8 * CHUNK), waits_for_it(arena.stop):
        pass
    calls = testing.driver_call_count()
    assert (arena.capacity_bytes, arena.grow_count, arena.is_growing) == (CHUNK, 1, False)
    slot = acquire(arena, CHUNK)
    arena.reserve(64 * MIB)
    arena.grow_ahead(64 * MIB)
    with pytest.raises(testing.StoreFull, match="about to end"):
        arena.grow(1)
    arena.release(slot)
    assert (arena.shrink(0), arena.trim()) == (0, 0)
    arena.stop()
    assert (arena.capacity_bytes, testing.driver_call_count()) == (CHUNK, calls)


def test_a_child_forked_with_a_chunk_in_the_making_touches_nothing_and_its_own_arena_grows_ahead():
    arena = arena_of_chunks("counting")

    def check():
        assert arena.try_acquire(1) is None
        with pytest.raises(testing.StoreFull, match="forked process"):
            arena.grow(1)
        arena.reserve(64 * MIB)
        arena.grow_ahead(64 * MIB)
        arena.grow_on_need()
        arena.stop()
        assert (arena.trim(), arena.shrink(0), arena.take_peak_bytes(), arena.capacity_bytes) == (0, 0, 0, 0)
        assert not arena.is_growing
        mine = arena_of_chunks()
        mine.reserve(4 * CHUNK)
        settle(mine)
        assert mine.capacity_bytes == 4 * CHUNK

    with chunk_in_the_making(arena, 4 * CHUNK):
        assert exit_code_in_child(check) == 0
    settle(arena)
    assert arena.capacity_bytes == 4 * CHUNK


AT_EXIT = """
import atexit, time
from torchoffload._C_testing import testing
arena = testing.PinnedArena(min_chunk_bytes=4096, max_chunk_bytes=4096, page_bytes=4096)

@atexit.register
def end():
    arena.stop()
    count = arena.grow_count
    time.sleep(0.1)
    print("stopped" if arena.grow_count == count and not arena.is_growing else "still growing", flush=True)

arena.reserve(1 << 30)
while arena.grow_count == 0:
    time.sleep(0.001)
print("grown" if arena.is_growing else "done already", flush=True)
"""


def test_a_program_ends_while_its_arena_grows():
    environment = os.environ | {"TORCHOFFLOAD_TESTING": "1"}
    done = subprocess.run([sys.executable, "-c", AT_EXIT], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, ["grown", "stopped"]), done.stderr


# ---- the CUDA driver ----

UNDER_A_CAPTURE = """
import time, torch
from torchoffload._C_testing import testing
x = torch.ones(1 << 20, device="cuda")
arena = testing.PinnedArena(driver="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="global"):
    y = x * 2
    arena.reserve(64 << 20)
    while arena.is_growing:
        time.sleep(0.001)
    z = y + 1
assert arena.capacity_bytes == 64 << 20, arena.capacity_bytes
x.fill_(3)
graph.replay()
assert torch.equal(z, x * 2 + 1)
arena.stop()
print("right")
"""

ON_THE_SECOND_DEVICE = """
import time, torch
from torchoffload._C_testing import testing
torch.ones(1, device="cuda:1")
arena = testing.PinnedArena(driver="cuda")
arena.reserve(64 << 20)
while arena.is_growing:
    time.sleep(0.001)
assert arena.capacity_bytes == 64 << 20, arena.capacity_bytes
assert not torch._C._cuda_hasPrimaryContext(0)
arena.stop()
print("right")
"""


@pytest.mark.cuda
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(UNDER_A_CAPTURE, id="while a graph is captured"),
        pytest.param(ON_THE_SECOND_DEVICE, id="with no context on the first device", marks=pytest.mark.two_gpus),
    ],
)
def test_memory_is_registered_in_the_background(program):
    environment = os.environ | {"TORCHOFFLOAD_TESTING": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
