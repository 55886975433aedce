"""tiers.py: stores of host memory and disks under test, and values that tell where bytes came from."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torchoffload import _C_testing

testing = _C_testing.testing

BLOCK = 4096  # a slot's granularity, and a disk's
ROOM = BLOCK + 3584  # what a slot of one block takes of host memory


class Tiers:
    """A TieredStore with room for `slots` slots of one block, which are numbered values."""

    def __init__(self, directories: list[Any], *, slots: float | None, **options: Any) -> None:
        memory_bytes = None if slots is None else int(slots * ROOM)
        self.store = testing.TieredStore([str(each) for each in directories], memory_bytes=memory_bytes, **options)
        self.slots: dict[int, Any] = {}
        self.serial = 0

    def save(self, value: int, nbytes: int = BLOCK, *, may_wait: bool = True) -> Any:
        """A slot filled with `value`, whose copy ended at point (1, n)."""
        slot = self.store.acquire(nbytes, value, may_wait=may_wait)
        if slot is not None:
            self.serial += 1
            self.store.note_filled(slot, (1, self.serial))
            self.slots[value] = slot
        return slot

    def load(self, value: int) -> bytes:
        """The bytes of the slot that was filled with `value`, by way of a hold."""
        slot = self.slots[value]
        held = self.store.hold(slot)
        contents = bytes(testing.bytes_at(held.address, held.nbytes))
        self.store.release_hold(slot)
        return contents

    def is_here(self, value: int) -> bool:
        return bool(self.store.is_here(self.slots[value]))

    def here(self) -> list[int]:
        return [value for value in self.slots if self.is_here(value)]

    def drop(self, value: int) -> None:
        self.store.release(self.slots.pop(value))

    def run_all(self) -> int:
        """Run the transfers by hand; how many there were."""
        count = 0
        while self.store.run_next():
            count += 1
        return count

    def check(self) -> None:
        """Every slot has its own bytes, wherever they were."""
        for value, slot in self.slots.items():
            assert self.load(value) == bytes([value]) * slot.nbytes, f"slot {value}"
        self.store.check_invariants()


@contextlib.contextmanager
def in_thread(work: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run `work` on a thread beside the block; what it returned, or its exception, is in the list after it."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield outcome
    finally:
        thread.join(60)
        assert not thread.is_alive(), "it waits for ever"
