"""PinnedArena: what a step needs, and no more, once it is known."""

import random
import threading

import pytest

from arenas import CHUNK, KIB, acquire, arena_of_chunks, settle, testing, wait_until

MOST_PART_OF_NEED = 1.05


def test_the_peak_is_the_most_in_use_at_once_since_it_was_asked_for():
    arena = arena_of_chunks()
    first, second = acquire(arena, 1000), acquire(arena, 3000)
    arena.release(second)
    assert arena.take_peak_bytes() == 1024 + 3072
    assert arena.take_peak_bytes() == 1024
    arena.release(first)
    assert arena.take_peak_bytes() == 1024
    assert arena.take_peak_bytes() == 0


def test_shrinking_leaves_one_chunk_of_what_is_needed():
    arena, before = arena_of_chunks("counting"), testing.registered_bytes()
    slots = [acquire(arena, 3 * CHUNK // 4) for _ in range(20)]
    for slot in slots:
        arena.release(slot, [(3, 1 + slot.block)])
    needed_bytes = arena.take_peak_bytes()
    assert arena.shrink(needed_bytes) == 5 * CHUNK
    assert arena.waited == [(3, 1 + block) for block in range(20)]
    assert arena.capacity_bytes == testing.registered_bytes() - before == needed_bytes == 15 * CHUNK
    slots = [arena.try_acquire(3 * CHUNK // 4)[0] for _ in range(20)]
    arena.check_invariants()
    for slot in slots:
        arena.release(slot)
    arena.trim()


def test_shrinking_by_little_or_again_does_nothing():
    arena = arena_of_chunks()
    slots = [acquire(arena, CHUNK) for _ in range(20)]
    for slot in slots:
        arena.release(slot)
    assert arena.shrink(20 * CHUNK) == 0
    assert arena.shrink(20 * CHUNK * 20 // 21 + CHUNK) == 0, "5% are left alone"
    assert arena.shrink(10 * CHUNK) == 10 * CHUNK
    arena.grow(11 * CHUNK)
    assert arena.shrink(10 * CHUNK) == 0, "what did not fit then would not now"
    assert arena.shrink(5 * CHUNK) == 16 * CHUNK
    assert arena.shrink(1) == 4 * CHUNK
    assert arena.shrink(0) == CHUNK
    assert arena.capacity_bytes == 0


def test_shrinking_leaves_what_is_in_use_and_goes_on_later():
    arena = arena_of_chunks()
    slots = [acquire(arena, CHUNK) for _ in range(8)]
    assert arena.shrink(CHUNK) == 0
    for slot in slots[2:]:
        arena.release(slot)
    assert arena.shrink(CHUNK) == 6 * CHUNK
    assert arena.used_bytes == arena.capacity_bytes == 2 * CHUNK
    arena.release(slots[0])
    assert arena.shrink(CHUNK) == CHUNK


def test_shrinking_where_the_rest_is_refused_leaves_what_is_in_use_and_later_copies_grow_as_ever():
    arena = arena_of_chunks("counting")
    arena.refuse_plain_memory(True)
    kept, *dropped = [acquire(arena, CHUNK) for _ in range(8)]
    for slot in dropped:
        arena.release(slot)
    testing.hold_driver(True)
    shrinking = threading.Thread(target=arena.shrink, args=(4 * CHUNK,))
    shrinking.start()
    wait_until(lambda: testing.driver_waiting_count() == 1, "the rest is asked for")
    testing.driver_refuses(True)
    testing.hold_driver(False)
    shrinking.join()
    assert arena.capacity_bytes == CHUNK
    with pytest.raises(testing.StoreFull, match="out of pinnable memory"):
        arena.grow(CHUNK)
    testing.driver_refuses(False)
    arena.reserve(4 * CHUNK)
    acquire(arena, CHUNK // 2)
    settle(arena)
    assert (arena.capacity_bytes, arena.grow_count) == (4 * CHUNK, 11), "chunk by chunk, once one was given"
    arena.release(kept)


# ---- the records of steps, 1024 times smaller ----


def llama(hidden, intermediate, key_value, layers):
    """Bytes of the records that one forward saves."""
    layer = [hidden, hidden, key_value, key_value, hidden, hidden, intermediate, intermediate, intermediate]
    return [nbytes * KIB for nbytes in layer * layers]


def drawn(seed, count):
    rng = random.Random(seed)
    return [int(2 ** rng.uniform(9, 18)) for _ in range(count)]


A = llama(64, 256, 16, layers=16)
UNEVEN = llama(56, 150, 7, layers=20)  # no chunk is a multiple of anything in it
SEQUENCES = {
    "A": [A],
    "B": [llama(128, 448, 32, layers=6)],
    "C": [llama(256, 1024, 64, layers=4)],
    "uneven": [UNEVEN],
    "few layers": [UNEVEN[:18]],
    "random": [drawn(0, 150)],
    "two shapes": [UNEVEN, [nbytes * 3 // 5 for nbytes in UNEVEN]],
    "three random shapes": [drawn(seed, 60) for seed in range(3)],
}


def train_step(arena, tapes, alive):
    """Forwards in order, with at most `alive` tapes waiting for their backward: one is plain order, more are 1F1B."""
    waiting = []
    for tape in tapes:
        waiting.append([acquire(arena, nbytes) for nbytes in tape])
        if len(waiting) == alive:
            for slot in reversed(waiting.pop(0)):
                arena.release(slot)
    for slot in (slot for slots in waiting for slot in reversed(slots)):
        arena.release(slot)


@pytest.mark.parametrize("alive", [1, 2, 3])
@pytest.mark.parametrize("sequence", list(SEQUENCES))
def test_once_learned_at_most_5_percent_more_is_held_than_a_step_needs(sequence, alive):
    arena = testing.PinnedArena(min_chunk_bytes=64 * KIB, max_chunk_bytes=256 * KIB, page_bytes=4 * KIB)
    tapes = SEQUENCES[sequence] * 6
    arena.grow_ahead(1 << 30)
    train_step(arena, tapes, alive)
    needed_bytes = arena.take_peak_bytes()
    arena.reserve(needed_bytes)
    arena.shrink(needed_bytes)
    for step in range(3):
        count = arena.grow_count
        train_step(arena, tapes, alive)
        settle(arena)
        assert arena.take_peak_bytes() == needed_bytes
        assert arena.capacity_bytes <= MOST_PART_OF_NEED * needed_bytes
        assert arena.shrink(needed_bytes) == 0
        assert step == 0 or arena.grow_count == count, "the same step grows once more"
    assert arena.capacity_bytes >= needed_bytes
