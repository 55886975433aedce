"""Programs that offload to many directories: ``python directory_programs.py NAME DIRECTORY``.

test_directories.py runs each in a process of its own. One that returns prints "right".
"""

import os
import resource
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable

import pytest
import torch

import torchoffload
from torchoffload import _C_testing

testing = _C_testing.testing
DIRECTORY = sys.argv[2]


def context(directory: str, **options: object) -> torchoffload.OffloadActivations:
    os.makedirs(directory, exist_ok=True)
    return torchoffload.OffloadActivations(
        tier="disk", disk_dir=directory, min_offload_size=0, learn=False, offload_window_bytes=1 << 20, **options
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
    torchoffload.trim()  # waits for their writes: the next one is the one that is held
    testing.hold_next_io("pwrite")
    x = torch.ones(1 << 16, requires_grad=True)
    with context(f"{DIRECTORY}/0"):
        y = x.sin()
    del y  # its slot is free, and guarded by the copy that is still being made
    trimmed: list[int] = []
    trimmer = threading.Thread(target=lambda: trimmed.append(torchoffload.trim()))
    trimmer.start()
    time.sleep(0.2)  # so that it waits in its list of stores while they are made; it may begin later, too
    for number in range(3, 10):
        use(f"{DIRECTORY}/{number}")
    assert trimmer.is_alive(), "it did not wait for the copy"
    testing.release_held_io("pwrite")
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


def held() -> tuple[int, int, int]:
    """Descriptors of spill files below DIRECTORY, I/O threads, and the bytes of disk that those files take."""
    files = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    spilled = [file for file in files if os.path.islink(file) and DIRECTORY in os.readlink(file)]
    sizes = {(info.st_dev, info.st_ino): info.st_blocks * 512 for info in map(os.stat, spilled)}
    threads = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]  # noqa: SIM115
    return len(spilled), sum(name.startswith(("offload-io", "reload-io")) for name in threads), sum(sizes.values())


def train(directory: str, **options: object) -> None:
    """A step, right, that moves 4 MiB out and back."""
    x = torch.linspace(-1, 1, 1 << 19, requires_grad=True)
    before = torchoffload.stats().bytes_offloaded
    with context(directory, **options):
        y = x.sin().exp().sum()
    assert torchoffload.stats().bytes_offloaded == before + (4 << 20)
    y.backward()
    assert torch.equal(x.grad, x.detach().cos() * x.detach().sin().exp())


def directories_that_are_left() -> None:
    for number in range(12):
        train(f"{DIRECTORY}/{number}")
        descriptors, threads, nbytes = held()
        kept = min(number + 1, 2)
        assert (descriptors, threads) == (2 * kept, 4 * kept), (number, held())
        assert 0 < nbytes <= kept * (64 << 20)
    assert torchoffload.trim() == 2 * (64 << 20)
    assert held() == (0, 0, 0)
    train(f"{DIRECTORY}/3")  # and again


def directories_that_are_deleted() -> None:
    for _ in range(6):
        with tempfile.TemporaryDirectory(dir=DIRECTORY) as directory:
            train(directory)
        assert held()[:2] == (2, 4)
    train(f"{DIRECTORY}/other")
    assert held()[:2] == (2, 4)


def one_directory_over_and_over() -> None:
    """It pays for its file and its threads once."""
    train(DIRECTORY)
    grow_count, threads = testing.io_call_count("reserve"), set(os.listdir("/proc/self/task"))
    for number in range(5):
        train(DIRECTORY)
        use(f"{DIRECTORY}/{number % 2}")
    assert testing.io_call_count("reserve") == grow_count
    assert set(os.listdir("/proc/self/task")) == threads


def a_directory_that_is_in_use_keeps_its_file() -> None:
    x = torch.linspace(-1, 1, 1 << 19, requires_grad=True)
    with context(f"{DIRECTORY}/graph"):
        y = x.sin().exp().sum()
    for number in range(5):
        train(f"{DIRECTORY}/{number}")
    torchoffload.trim()
    assert held()[0] == 2
    y.backward()
    assert torch.equal(x.grad, x.detach().cos() * x.detach().sin().exp())


def a_deleted_directory_is_full() -> None:
    """Its idle file was given up and cannot be made again: what is saved stays, with a warning; or an error."""
    with tempfile.TemporaryDirectory(dir=DIRECTORY) as directory:
        kept, strict = (context(directory, on_full=policy) for policy in ("keep", "error"))
        train(directory)
    torchoffload.trim()
    x = torch.linspace(-1, 1, 1 << 19, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with kept:
            y = x.sin().exp().sum()
    assert any("cannot make a spill file" in str(each.message) for each in caught), caught
    y.backward()
    assert torch.equal(x.grad, x.detach().cos() * x.detach().sin().exp())
    with pytest.raises(RuntimeError, match=r"cannot make a spill file in .*: No such file or directory"), strict:
        x.sin().exp().sum()
    os.mkdir(directory)
    train(directory)


def threads_with_directories_in_turn() -> None:
    """More directories than are kept, used by several threads at once, while another one trims."""
    is_done, failures = threading.Event(), []

    def work(first: int) -> None:
        try:
            for number in range(25):
                x = torch.linspace(-1, 1, 1 << 14, requires_grad=True)
                with context(f"{DIRECTORY}/{(first + number) % 5}"):
                    y = x.sin().exp().sum()
                y.backward()
                assert torch.equal(x.grad, x.detach().cos() * x.detach().sin().exp())
        except BaseException as error:
            failures.append(error)

    def trim() -> None:
        while not is_done.wait(0.005):
            torchoffload.trim()

    trimmer, workers = threading.Thread(target=trim), [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in (trimmer, *workers):
        thread.start()
    for worker in workers:
        worker.join()
    is_done.set()
    trimmer.join()
    assert not failures, failures
    torchoffload.trim()
    assert held() == (0, 0, 0)


PROGRAMS: dict[str, Callable[..., None]] = {
    program.__name__: program
    for program in (
        stores_made_while_trim_waits, stores_made_beside_trim, directories_that_are_left, directories_that_are_deleted,
        one_directory_over_and_over, a_directory_that_is_in_use_keeps_its_file, a_deleted_directory_is_full,
        threads_with_directories_in_turn,
    )
}  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    PROGRAMS[sys.argv[1]]()
    print("right", flush=True)
