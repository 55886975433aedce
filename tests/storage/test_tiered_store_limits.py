"""TieredStore: a limit of memory that changes, and when nothing is under way."""

import pytest

pytest.importorskip("torchoffload._C_testing", reason="stores are made by the test build alone")

from tiers import BLOCK, ROOM, Tiers


def test_a_limit_that_falls_sends_slots_to_the_disk_as_room_is_wanted(tmp_path):
    tiers = Tiers([tmp_path], slots=6)
    for value in range(6):
        tiers.save(value)
    tiers.store.limit_memory(2 * ROOM)
    assert tiers.store.limit_bytes == 2 * ROOM
    assert tiers.save(6, may_wait=False) is None
    tiers.save(6)
    tiers.run_all()
    assert tiers.store.memory_bytes <= 2 * ROOM
    assert tiers.is_here(6)
    tiers.check()


def test_a_limit_that_rises_lets_slots_stay(tmp_path):
    tiers = Tiers([tmp_path], slots=1)
    tiers.save(0)
    assert tiers.save(1, may_wait=False) is None
    tiers.store.limit_memory(6 * ROOM)
    for value in range(1, 6):
        assert tiers.save(value, may_wait=False) is not None
    assert tiers.here() == list(range(6))
    tiers.check()


def test_a_store_is_idle_without_slots_and_transfers(tmp_path):
    tiers = Tiers([tmp_path], slots=1)
    assert tiers.store.is_idle
    tiers.save(0)
    assert not tiers.store.is_idle
    assert tiers.store.grow_awaits_disk(BLOCK)  # begins to write it
    tiers.drop(0)
    assert not tiers.store.is_idle
    tiers.run_all()
    assert tiers.store.is_idle
