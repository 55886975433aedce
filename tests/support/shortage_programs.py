"""shortage_programs.py: no descriptor, no thread or no memory to be had, for a while.

Usage: shortage_programs.py SHORTAGE TIER DIRECTORY. TIER is "disk" (CPU tensors) or "spill" (a simulated device). Each
runs in a process of its own, and prints "right" at the end.
"""

import contextlib
import errno
import os
import resource
import sys
import warnings
from collections.abc import Iterator

os.environ.setdefault("TORCHOFFLOAD_TESTING", "1")

import pytest
import torch

import torchoffload
from hung_disk_programs import Trainer, check_nothing_is_alive
from simulated import simulated_device
from torchoffload import _C_testing

testing = _C_testing.testing


@contextlib.contextmanager
def limited(kind: int, most: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    with limited(resource.RLIMIT_NOFILE, 0):
        yield


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    testing.refuse_threads(errno.EAGAIN)
    try:
        yield
    finally:
        testing.refuse_threads(0)


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    testing.inject_io_fault("reserve", errno=errno.ENOSPC)
    try:
        yield
    finally:
        testing.clear_io_faults()


SHORTAGES = {
    "descriptors": (no_descriptors, "Too many open files"),
    "threads": (no_threads, "cannot start an I/O thread"),
    "room": (no_room, "No space left on device"),
}


def check(trainer: Trainer, shortage: str, *, is_first: bool) -> None:
    """Tensors are kept, one warning says why, and so does the report. Once the shortage is over all is moved."""
    short, text = SHORTAGES[shortage]
    torchoffload.reset_stats()
    with short(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert torch.equal(trainer.gradient(trainer.context()), trainer.expected)
    stats = torchoffload.stats()
    assert stats.records_kept.get("tier_full", 0) >= 4, (is_first, stats.records_kept)
    about = [str(each.message) for each in told if text in str(each.message)]
    assert 1 <= len(about) <= 2, [str(each.message) for each in told]
    assert sum("saved tensors stay on the device" in each for each in about) == 1, about
    assert "tier full" in torchoffload.report() or "tier_full" in torchoffload.report(), torchoffload.report()
    for _ in range(2):  # the disk of slots is tried again a step later
        torchoffload.reset_stats()
        assert torch.equal(trainer.gradient(trainer.context()), trainer.expected)
    stats = torchoffload.stats()
    assert stats.records_kept.get("tier_full", 0) == 0, stats.records_kept
    assert stats.records_offloaded >= 5


def check_error(trainer: Trainer, shortage: str) -> None:
    """on_full="error" makes it an error, which is the user's wish."""
    short, text = SHORTAGES[shortage]
    with short():
        strict = torchoffload.OffloadActivations(**trainer.options, on_full="error")
        with pytest.raises(RuntimeError, match=text):
            trainer.gradient(strict)
    trainer.check()


def check_reads(trainer: Trainer, shortage: str) -> None:
    """What was moved before is read back all the same."""
    short, _ = SHORTAGES[shortage]
    x = trainer.leaf()
    with trainer.context():
        y = trainer.forward(x)
    torchoffload.trim()  # ends the threads
    with short():
        assert torch.equal(torch.autograd.grad(y, x)[0], trainer.expected)
    trainer.check()


def main(shortage: str, tier: str, directory: str) -> None:
    trainer = Trainer(tier, directory)
    check(trainer, shortage, is_first=True)
    torchoffload.trim()  # closes the file and ends the threads
    check(trainer, shortage, is_first=False)
    if tier == "disk":
        torchoffload.trim()
        check_error(trainer, shortage)
    check_reads(trainer, shortage)
    check_nothing_is_alive()


if __name__ == "__main__":
    if sys.argv[2] == "spill":
        testing.set_disk_threads(True)
        with simulated_device("late"):
            main(*sys.argv[1:])
    else:
        main(*sys.argv[1:])
    print("right")
