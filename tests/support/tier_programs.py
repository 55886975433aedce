"""tier_programs.py: what befalls a process whose slots go on to a disk, each in a process of its own.

Usage: tier_programs.py NAME DIRECTORY [ARGUMENT]. Prints "right" at the end.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

os.environ.setdefault("TORCHOFFLOAD_TESTING", "1")

import pytest
import torch

import torchoffload
from simulated import simulated_device
from tiers import BLOCK, Tiers, testing


def busy(directory: Path) -> Tiers:
    """A store with threads, whose disk holds its first write up by now."""
    tiers = Tiers([directory], slots=2, by_hand=False, writes_at_once=True)
    before = testing.io_call_count("pwrite")
    testing.hold_next_io("pwrite")
    for value in range(2):
        tiers.save(value)
    while testing.io_call_count("pwrite") < before + 2:
        time.sleep(0.001)
    return tiers


def child_status(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fork_with_transfers_under_way(directory: Path) -> None:
    """The child has no threads and no memory of the parent's: it is told so, and nothing of the parent's changes."""
    tiers = busy(directory)
    child = os.fork()
    if child == 0:
        try:
            assert tiers.store.acquire(BLOCK, 7, may_wait=False) is None
            for call in (lambda: tiers.store.grow(BLOCK), lambda: tiers.store.hold(tiers.slots[0])):
                with pytest.raises(RuntimeError, match="forked"):
                    call()
            tiers.drop(0)
            tiers.store.trim()
            tiers.store.stop()
            own = Tiers([directory], slots=1, by_hand=False)
            for value in range(6):
                own.save(value)
            own.check()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    assert child_status(child) == 0
    testing.release_held_io("pwrite")
    for value in range(2, 8):
        tiers.save(value)
    tiers.check()


def fork_in_a_step(directory: Path) -> None:
    """A graph whose slots are on the disk is inherited: an error in the child, and right in the parent."""
    with simulated_device(mode="early"):
        x = torch.linspace(-1, 1, 4096).requires_grad_()
        with torchoffload.OffloadActivations(
            on_full="disk", disk_dir=directory, budget_bytes=0, min_offload_size=0, offload_window_bytes=0
        ):
            y = x.sin().exp().sin().sum()
        child = os.fork()
        if child == 0:
            try:
                torch.autograd.grad(y, x)
                os._exit(1)
            except RuntimeError:
                os._exit(0)
        assert child_status(child) == 0
        (gradient,) = torch.autograd.grad(y, x)
        z = x.detach().requires_grad_()
        (expected,) = torch.autograd.grad(z.sin().exp().sin().sum(), z)
        assert torch.equal(gradient, expected)
    assert torchoffload.stats().bytes_spilled > 0


def ends(directory: Path, how: str) -> None:
    """With a write under way and, where the interpreter does not go down, a thread that wants room."""
    tiers = busy(directory)
    if how != "end":
        threading.Thread(target=lambda: tiers.save(2), daemon=True).start()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(tiers.store))  # stores are never destroyed
    if how == "exit":
        os._exit(0)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def writes(directory: Path) -> None:
    """Until it is killed."""
    tiers = Tiers([directory], slots=4, by_hand=False)
    print("ready", flush=True)
    for value in range(1 << 30):
        tiers.save(value % 250)
        if len(tiers.slots) > 200:
            tiers.drop(next(iter(tiers.slots)))


def two_processes_at_one_directory(directory: Path) -> None:
    children = []
    for number in range(2):
        child = os.fork()
        if child == 0:
            try:
                tiers = Tiers([directory], slots=2, by_hand=False)
                for value in range(60):
                    tiers.save((value + 100 * number) % 250)
                    time.sleep(0)
                tiers.check()
            except BaseException as error:
                print(repr(error), file=sys.stderr)
                os._exit(1)
            os._exit(0)
        children.append(child)
    assert [child_status(child) for child in children] == [0, 0]


def stops_beside_a_device_that_hangs(directory: Path) -> None:
    """A write waits for a copy out that does not end: the end of the process does not wait for it for ever."""
    testing.set_wait_limits(at_exit_ms=100)
    tiers = Tiers([directory], slots=2, by_hand=False, writes_at_once=True)
    tiers.store.hold_device()
    tiers.save(0)
    while not tiers.store.waited:
        time.sleep(0.001)
    begin = time.monotonic()
    tiers.store.stop()
    assert time.monotonic() - begin < 10
    with pytest.raises(RuntimeError, match="about to end"):
        tiers.store.grow(BLOCK)
    sys.stderr.flush()
    os._exit(0)  # the device hangs for ever


if __name__ == "__main__":
    program = globals()[sys.argv[1]]
    program(Path(sys.argv[2]), *sys.argv[3:])
    print("right")
