"""Programs that offload to many directories: ``python directory_programs.py NAME DIRECTORY``.

test_directories.py runs each in a process of its own. One that returns prints "right".
"""

import os
import resource
import sys
import threading
import time
from collections.abc import Callable

import torch

import torchoffload
from torchoffload import _C_testing

testing = _C_testing.testing
DIRECTORY = sys.argv[2]


def context(directory: str) -> torchoffload.OffloadActivations:
    os.makedirs(directory, exist_ok=True)
    return torchoffload.OffloadActivations(
        tier="disk", disk_dir=directory, min_offload_size=0, learn=False, offload_window_bytes=1 << 20
    )


def use(directory: str) -> None:
    """Makes a store for it, by one saved tensor that dies at once."""
    x = torch.ones(4, requires_grad=True)
    with context(directory):
        x.sin()


def stores_made_while_trim_waits() -> None:
    """``trim()`` waits in the first of a few stores while many more are made, so that their list is moved."""
    for number in range(3):
        use(f"{DIRECTORY}/{number}")
    testing.inject_io_fault("pwrite", delay_us=2_000_000)
    x = torch.ones(1 << 16, requires_grad=True)
    with context(f"{DIRECTORY}/0"):
        y = x.sin()
    del y  # its slot is free, and guarded by the copy that is still being made
    trimmed: list[int] = []
    trimmer = threading.Thread(target=lambda: trimmed.append(torchoffload.trim()))
    trimmer.start()
    time.sleep(0.2)
    testing.inject_io_fault("pwrite")
    for number in range(3, 10):
        use(f"{DIRECTORY}/{number}")
    assert trimmer.is_alive(), "it did not wait for the copy"
    trimmer.join()
    assert trimmed[0] > 0


def stores_made_beside_trim() -> None:
    """The same without any order: four threads trim, while the stores are made and used."""
    is_done = False

    def trim() -> None:
        while not is_done:
            torchoffload.trim()

    trimmers = [threading.Thread(target=trim) for _ in range(4)]
    for trimmer in trimmers:
        trimmer.start()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    end = time.monotonic() + 3
    number = 0
    while time.monotonic() < end:
        use(f"{DIRECTORY}/{number}")
        number += 1
    is_done = True
    for trimmer in trimmers:
        trimmer.join()
    assert number > 20


PROGRAMS: dict[str, Callable[..., None]] = {
    program.__name__: program for program in (stores_made_while_trim_waits, stores_made_beside_trim)
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    PROGRAMS[sys.argv[1]]()
    print("right", flush=True)
