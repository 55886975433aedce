"""hung_disk_programs.py: Ctrl-C, a warning and an end beside a disk or a device that does not answer.

Usage: hung_disk_programs.py NAME TIER DIRECTORY. TIER is "disk" (CPU tensors) or "spill" (a simulated device). Each
runs in a process of its own, and prints "right" at the end.
"""

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

os.environ.setdefault("TORCHOFFLOAD_TESTING", "1")

import torch

import torchoffload
from simulated import simulated_device
from torchoffload import _C_testing

testing = _C_testing.testing
SIDE = 64
DEPTH = 6


class Trainer:
    """Steps on one tier, whose gradients are known."""

    def __init__(self, tier: str, directory: str) -> None:
        of_tier = {"tier": "disk"} if tier == "disk" else {"on_full": "disk", "budget_bytes": 0}
        self.options = of_tier | {
            "disk_dir": directory,
            "min_offload_size": 0,
            "offload_window_bytes": 0,
            "reload_window_bytes": 0,
            "learn": False,
        }
        self.expected = self.gradient(contextlib.nullcontext())

    def context(self) -> torchoffload.OffloadActivations:
        return torchoffload.OffloadActivations(**self.options)

    def leaf(self) -> torch.Tensor:
        return torch.linspace(-1, 1, SIDE * SIDE).reshape(SIDE, SIDE).requires_grad_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(DEPTH):
            x = x.sigmoid()
        return x.sum()

    def gradient(self, around: contextlib.AbstractContextManager[object]) -> torch.Tensor:
        x = self.leaf()
        with around:
            y = self.forward(x)
        return torch.autograd.grad(y, x)[0]

    def check(self) -> None:
        """A step is right, and moves something."""
        before = torchoffload.stats().records_offloaded
        assert torch.equal(self.gradient(self.context()), self.expected)
        assert torchoffload.stats().records_offloaded > before


@contextlib.contextmanager
def hung(call: str) -> Iterator[None]:
    """The disk's next `call` hangs until the block has ended."""
    testing.hold_next_io(call)
    try:
        yield
    finally:
        testing.release_held_io(call)


@contextlib.contextmanager
def interrupted_within(seconds: float) -> Iterator[None]:
    """Ctrl-C comes after a while, and ends the block at once."""
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    begin = time.monotonic()
    timer.start()
    try:
        yield
    except KeyboardInterrupt:
        assert time.monotonic() - begin < 0.2 + seconds, "the wait went on"
    else:
        raise AssertionError("nothing was interrupted")
    timer.join()


def check_nothing_is_alive() -> None:
    gc.collect()
    deadline = time.monotonic() + 10
    while True:
        stats = torchoffload.stats()
        alive = (stats.live_handles, stats.live_records, stats.live_slots, stats.live_tapes, stats.budget_bytes_used)
        if alive == (0,) * 5:
            testing.check_invariants()
            return
        assert time.monotonic() < deadline, f"handles, records, slots, tapes, budget alive: {alive}"
        torch.ones((), requires_grad=True).clone().backward()
        time.sleep(0.01)


def ctrl_c_in_backward(trainer: Trainer) -> None:
    """The wait for a read is given up. The same backward, tried again, is right."""
    for _ in range(2):
        x = trainer.leaf()
        with trainer.context():
            y = trainer.forward(x)
        with hung("pread"), interrupted_within(5):
            torch.autograd.grad(y, x, retain_graph=True)
        assert torch.equal(torch.autograd.grad(y, x)[0], trainer.expected)
        trainer.check()
    del y
    check_nothing_is_alive()


def ctrl_c_in_forward(trainer: Trainer) -> None:
    """The wait for a write is given up: what waited stays on the device, and later steps move everything."""
    trainer.check()
    for _ in range(2):
        with hung("pwrite"), interrupted_within(5), trainer.context():
            trainer.forward(trainer.leaf())
            while True:  # Python raises between two of its own instructions
                time.sleep(0.01)
        trainer.check()
    check_nothing_is_alive()


def a_handler_that_raises_nothing(trainer: Trainer) -> None:
    """As trainers have, to stop after the step: it runs while the disk hangs, and the step goes on."""
    handled = []

    def note(*_: object) -> None:
        handled.append(time.monotonic())
        testing.release_held_io("pread")

    x = trainer.leaf()
    with trainer.context():
        y = trainer.forward(x)
    signal.signal(signal.SIGINT, note)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    testing.hold_next_io("pread")
    assert torch.equal(torch.autograd.grad(y, x)[0], trainer.expected)
    assert len(handled) == 1
    del y
    check_nothing_is_alive()


def other_threads_go_on(trainer: Trainer) -> None:
    """Ctrl-C is for the main thread. Another one goes on waiting, and is right once the disk answers."""
    x = trainer.leaf()
    with trainer.context():
        y = trainer.forward(x)
    gradients = []
    worker = threading.Thread(target=lambda: gradients.append(torch.autograd.grad(y, x)[0]))
    with hung("pread"):
        worker.start()
        with interrupted_within(5):
            while True:
                time.sleep(0.01)
        assert gradients == []
    worker.join(30)
    assert torch.equal(gradients[0], trainer.expected)


def told_after_a_while(trainer: Trainer) -> None:
    """Once for each wait, on standard error; the test looks at it.

    The wait for the held read is told after one second. A busy machine makes other waits last some tenths of a second.
    """
    testing.set_wait_limits(slice_ms=5, until_told_ms=1000)
    x = trainer.leaf()
    with trainer.context():
        y = trainer.forward(x)
    testing.hold_next_io("pread")
    threading.Timer(2.5, testing.release_held_io, ("pread",)).start()
    assert torch.equal(torch.autograd.grad(y, x)[0], trainer.expected)


if __name__ == "__main__":
    program: Callable[[Trainer], None] = globals()[sys.argv[1]]
    if sys.argv[2] == "spill":
        testing.set_disk_threads(True)
        with simulated_device("late"):
            program(Trainer("spill", sys.argv[3]))
    else:
        program(Trainer("disk", sys.argv[3]))
    print("right")
