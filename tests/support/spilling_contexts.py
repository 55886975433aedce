"""spilling_contexts.py: contexts whose slots go on to a disk, and a chain of operators that each save one tensor."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import torchoffload
from functions import SavesInput
from gradients import Run

SIDE = 64
NBYTES = 4 * SIDE * SIDE  # of a record
ROOM = NBYTES + 3584  # what it takes of host memory
DEPTH = 12


def sound_disks() -> Iterator[None]:
    """The body of a fixture: each test begins with idle stores and counts of zero, and leaves no fault planted."""
    from torchoffload import _C_testing

    gc.collect()
    torchoffload.trim()
    torchoffload.reset_stats()
    yield
    _C_testing.testing.clear_io_faults()
    _C_testing.testing.set_transfers_wait(False)


def spilling(run: Run, directory: Path, slots: float = 3, **options: Any) -> Any:
    """A context with room for so many records in host memory."""
    return run.offload(on_full="disk", disk_dir=str(directory), budget_bytes=int(slots * ROOM), **options)


def chain(x: torch.Tensor, depth: int = DEPTH) -> torch.Tensor:
    for _ in range(depth):
        x = SavesInput.apply(x) * 0.5
    return x


class Forward:
    """What was counted since it was made. The disks stand still until they are waited for, or until `room_comes`."""

    def __init__(self, run: Run) -> None:
        from torchoffload import _C_testing

        self.is_counted = not run.stock
        _C_testing.testing.set_transfers_wait(True)
        self.before = torchoffload.stats()

    def expect(self, *, moved: int, disk_waits: int | None = None) -> None:
        if not self.is_counted:
            return
        now = torchoffload.stats()
        assert now.records_offloaded - self.before.records_offloaded == moved
        if disk_waits is not None:
            assert now.disk_waits - self.before.disk_waits == disk_waits

    def room_comes(self) -> None:
        from torchoffload import _C_testing

        _C_testing.testing.set_transfers_wait(False)
