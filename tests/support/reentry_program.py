"""A finalizer that flushes while a copy begins to wait for room: ``python reentry_program.py MODE DIRECTORY``.

The program starts itself anew such that freed memory is overwritten at once and given out again late. Prints "right".
"""

import os
import sys
import weakref

if "MALLOC_PERTURB_" not in os.environ:
    environment = os.environ | {
        "MALLOC_PERTURB_": "165",
        "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
        "TORCHOFFLOAD_TESTING": "1",
    }
    os.execve(sys.executable, [sys.executable, "-X", "faulthandler", *sys.argv], environment)

import torch

import torchoffload
from functions import Save
from simulated import simulated_device
from spilling_contexts import NBYTES, ROOM, SIDE
from torchoffload import _C_testing

testing = _C_testing.testing
MODE, DIRECTORY = sys.argv[1:]
PLACES = 11  # of a copy in a node of the thread's list


def look(*_unpacked: torch.Tensor) -> None:
    return None


def context(**options: object) -> torchoffload.OffloadActivations:
    return torchoffload.OffloadActivations(
        on_full="disk", disk_dir=DIRECTORY, budget_bytes=2 * ROOM, min_offload_size=1, learn=False, **options
    )


def step(place: int) -> None:
    """Operators save `first` and `second`, which move, and then two at once.

    As the first of these begins to wait `first` is dropped, and its finalizer flushes.
    """
    testing.set_transfers_wait(True)
    leaf = torch.ones(4, 4, requires_grad=True)
    first, second, third, fourth = (torch.full((SIDE, SIDE), float(value)) for value in range(4))
    for _ in range(place % 2):  # moves the place inside of its node
        with context():
            shift = Save.apply(leaf, look, torch.full((SIDE, SIDE), 5.0))
        shift.sum().backward()
        del shift
    calls = []

    def flushes() -> None:
        calls.append(place)
        testing.set_transfers_wait(False)  # the disk gets room
        with context():
            pass

    values: list[float] = []

    def note(*unpacked: torch.Tensor) -> None:
        values.extend(float(each[0, 0]) for each in unpacked)

    with context(offload_window_bytes=2 * NBYTES):
        weakref.finalize(first.untyped_storage(), flushes)
        y = Save.apply(leaf, note, first)
        y = Save.apply(y, note, second)
        del first
        y = Save.apply(y, note, third, fourth)
        y = Save.apply(y, note, second)
    y.sum().backward()
    assert calls == [place], "the finalizer has run once"
    assert values == [1.0, 2.0, 3.0, 1.0, 0.0], values


with simulated_device(MODE):
    for number in range(PLACES):
        step(number)
print("right")
