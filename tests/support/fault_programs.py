"""Programs that end badly, are interrupted, or fork: ``python fault_programs.py NAME DIRECTORY [ARGUMENT]``.

test_faults_process.py runs each in a process of its own. One that returns prints "right".
"""

import contextlib
import ctypes
import os
import random
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator

import torch

import torchoffload
from private_device import private_devices
from torchoffload import _C_testing
from torchoffload._pytorch import hook_stack

testing = _C_testing.testing
DIRECTORY = sys.argv[2]
PRIVATE = "privateuseone"  # the last argument, if the tensors are on the simulated device as one of PyTorch's
DEVICE = PRIVATE if sys.argv[-1] == PRIVATE else "cpu"
SIMULATION = contextlib.ExitStack()  # which is left with the process: its copies are late
MIB = 1 << 20
SIDE = 64


def context(**options: object) -> torchoffload.OffloadActivations:
    chosen = {
        **({"tier": "disk", "disk_dir": DIRECTORY} if DEVICE == "cpu" else {}),
        "min_offload_size": 0,
        "offload_window_bytes": 0,
        "learn": False,
    }
    return torchoffload.OffloadActivations(**(chosen | options))


def forward(x: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        x = x.sigmoid()
    return x.sum()


def gradient(around: contextlib.AbstractContextManager[object], side: int = SIDE) -> torch.Tensor:
    x = torch.linspace(-1, 1, side * side).reshape(side, side).requires_grad_()
    with around:
        y = forward(x)
    return torch.autograd.grad(y, x)[0]


@contextlib.contextmanager
def refused(text: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if text not in str(error):
            raise
    else:
        raise AssertionError(f"nothing was raised that says {text!r}")


def slow_disk(delay_us: int = 2000) -> None:
    for call in ("pwrite", "pread"):
        testing.inject_io_fault(call, delay_us=delay_us)


def check_nothing_is_alive() -> None:
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


# ---- signals ----


def close_what_was_left_open() -> int:
    """What a signal between a context's entry and its body, or at its exit, kept from being left: as in stock torch."""
    left = 0
    while (entry := hook_stack.innermost()) is not None:
        entry.owner.__exit__(None, None, None)
        left += 1
    while torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        left += 1
    return left


def interrupted(rounds: str) -> None:
    """SIGINT, for real, at random moments of forward and backward."""
    expected, rng = gradient(contextlib.nullcontext()), random.Random(5)
    main, is_training = threading.main_thread().ident, False

    def handle(*_: object) -> None:  # Python's own, but for signals that come too late
        if is_training:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    interrupted_count, left_count, shared = 0, 0, context()
    for _ in range(int(rounds)):
        timer = threading.Timer(rng.uniform(0.001, 0.02), signal.pthread_kill, (main, signal.SIGINT))
        slow_disk(rng.choice((0, 200)))  # quick, most signals meet Python code; slow, they meet waits
        timer.start()
        try:
            is_training = True
            while timer.is_alive():
                gradient(shared if rng.random() < 0.5 else context(reload_window_bytes=0))
            is_training = False
        except KeyboardInterrupt:
            is_training = False
            interrupted_count += 1
        timer.join()
        left_count += close_what_was_left_open()
        assert torch.equal(gradient(shared), expected)
        assert torch.equal(gradient(contextlib.nullcontext()), expected)
    check_nothing_is_alive()
    print(f"{interrupted_count} of {rounds} rounds interrupted, {left_count} contexts had to be closed")
    assert interrupted_count > int(rounds) // 2


def alarms() -> None:
    """Signals every half millisecond while the I/O threads run: none of their system calls may see one."""
    expected, taken = gradient(contextlib.nullcontext()), []
    signal.signal(signal.SIGALRM, lambda *_: taken.append(1))
    slow_disk(300)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    for _ in range(60):
        assert torch.equal(gradient(context()), expected)
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert len(taken) > 20, taken
    assert not torchoffload.stats().records_kept.get("write_failed")
    check_nothing_is_alive()


# ---- forks ----


def forked(child: Callable[[], None]) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            child()
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the child failed"


def fork_trains() -> None:
    """With copies in flight, and inside an open context; parent and child train on."""
    expected = gradient(contextlib.nullcontext())
    slow_disk()
    shared = context(budget_bytes=6 * SIDE * SIDE * 4)
    x = torch.linspace(-1, 1, SIDE * SIDE).reshape(SIDE, SIDE).requires_grad_()

    def child() -> None:
        nonlocal y
        del y  # the parent's graph, and with it what it took of the budget
        stats = torchoffload.stats()
        assert (stats.budget_bytes_used, stats.live_records, stats.live_slots) == (0, 0, 0)
        for each in (shared, context(), context(reload_window_bytes=0)):
            moved = torchoffload.stats().bytes_offloaded
            assert torch.equal(gradient(each), expected)
            assert torchoffload.stats().bytes_offloaded == moved + 6 * SIDE * SIDE * 4

    for _ in range(5):
        with shared:
            y = forward(x)
            forked(child)
        forked(child)
        assert torch.equal(torch.autograd.grad(y, x)[0], expected)
    del y
    check_nothing_is_alive()


def fork_reads_the_parents_graph() -> None:
    """Its bytes stayed with the parent: an error that says so, and no wrong gradient."""
    expected = gradient(contextlib.nullcontext())
    x = torch.linspace(-1, 1, SIDE * SIDE).reshape(SIDE, SIDE).requires_grad_()
    with context():
        y = forward(x)

    def child() -> None:
        with refused("forked"):
            torch.autograd.grad(y, x)
        assert torch.equal(gradient(context()), expected)

    forked(child)
    assert torch.equal(torch.autograd.grad(y, x)[0], expected)


def fork_in_backward() -> None:
    """In the middle of a backward, with reloads on their way; the parent's goes on."""
    expected = gradient(contextlib.nullcontext())
    x = torch.linspace(-1, 1, SIDE * SIDE).reshape(SIDE, SIDE).requires_grad_()
    slow_disk()
    forks = []

    def child() -> None:
        assert torch.equal(gradient(context()), expected)

    def fork(_: torch.Tensor) -> None:
        forks.append(pid := os.fork())
        if pid == 0:
            # A graph task is running here, and saves nothing that moves: the child's work is on another thread.
            code = []
            worker = threading.Thread(target=lambda: code.append(child()))
            worker.start()
            worker.join()
            os._exit(0 if code else 1)

    for _ in range(3):
        with context(reload_window_bytes=1 << 20):
            middle = x.sigmoid().sigmoid().sigmoid()
            middle.register_hook(fork)
            y = middle.sigmoid().sigmoid().sigmoid().sum()
        assert torch.equal(torch.autograd.grad(y, x)[0], expected)
        assert os.waitstatus_to_exitcode(os.waitpid(forks.pop(), 0)[1]) == 0, "the child failed"
    del middle, y
    check_nothing_is_alive()


class Squares(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((SIDE, SIDE), index / 24).square()


def data_loader() -> None:
    """Workers are forked while copies are in flight, each epoch anew."""

    def train(around: Callable[[], contextlib.AbstractContextManager[object]]) -> list[torch.Tensor]:
        weight, kept = torch.eye(SIDE).requires_grad_(), None
        gradients = []
        for _ in range(2):
            loader = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context="fork")
            for batch in loader:
                with around():
                    y = forward(batch @ weight)
                if kept is not None:
                    gradients.append(torch.autograd.grad(kept, weight)[0])
                kept = y
        return gradients

    expected = train(contextlib.nullcontext)
    slow_disk()
    for got, wanted in zip(train(context), expected, strict=True):
        assert torch.equal(got, wanted)
    check_nothing_is_alive()


# ---- memory and threads refused ----


def address_space_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as sizes:
        return int(sizes.read().split()[0]) * resource.getpagesize()


def no_address_space() -> None:
    """RLIMIT_AS refuses reload buffers: PyTorch's own error, and right once the limit is lifted."""
    side = 2048  # 16 MiB
    expected = gradient(contextlib.nullcontext(), side)
    ctypes.CDLL(None).malloc_trim(0)
    x = torch.linspace(-1, 1, side * side).reshape(side, side).requires_grad_()
    with context(reload_window_bytes=0):
        y = forward(x)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (address_space_bytes() + MIB, hard))
    with refused("allocate memory"):
        torch.autograd.grad(y, x, retain_graph=True)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    assert torch.equal(torch.autograd.grad(y, x)[0], expected)
    del y
    check_nothing_is_alive()


def no_threads() -> None:
    """RLIMIT_NPROC, which binds no root, refuses the I/O threads: tensors are kept, and a warning says why."""
    expected = gradient(contextlib.nullcontext())
    os.chmod(DIRECTORY, 0o777)
    gradient(context(min_offload_size=1 << 40))  # imports all that there is to import
    os.setuid(65534)
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
    for _ in range(3):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert torch.equal(gradient(context()), expected)
        assert ["cannot start an I/O thread" in str(each.message) for each in told] == [True]
    assert torchoffload.stats().bytes_offloaded == 0
    resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
    assert torch.equal(gradient(context()), expected)
    check_nothing_is_alive()


# ---- endings ----


def ends(how: str, _device: str = "cpu") -> None:
    """With copies out, copies in, a window that blocks, or a thread in the middle of it."""
    slow_disk(20_000)
    simulation = SIMULATION.enter_context(private_devices()) if DEVICE == PRIVATE else None
    x = torch.ones(SIDE, SIDE, device=DEVICE, requires_grad=True)
    with context(offload_window_bytes=MIB):
        y = forward(x)
    assert simulation is None or simulation.queued_count() > 0

    def train() -> None:
        while True:
            gradient(context())

    if how in ("thread", "daemon thread"):
        stop = time.monotonic() + 1
        work = train if how == "daemon thread" else lambda: [gradient(context()) for _ in range(3)]
        threading.Thread(target=work, daemon=how == "daemon thread").start()
        time.sleep(0.3)
        assert time.monotonic() < stop
    if how == "backward":
        middle = x.sigmoid()
        middle.register_hook(lambda _: sys.exit(0))
        with context():
            z = forward(middle)
        z.backward()
    if how == "raise":
        raise ValueError("planted")
    if how == "sys.exit":
        sys.exit(0)
    if how == "os._exit":
        print("right", flush=True)
        os._exit(0)
    if how == "inside":
        with context():
            y = forward(x)
            sys.exit(0)
    assert y is not None


def writes() -> None:
    """Until it is killed."""
    slow_disk(1000)
    print("writing", flush=True)
    while True:
        gradient(context())


PROGRAMS: dict[str, Callable[..., None]] = {
    program.__name__: program
    for program in (
        interrupted, alarms, fork_trains, fork_reads_the_parents_graph, fork_in_backward, data_loader,
        no_address_space, no_threads, ends, writes,
    )
}  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    PROGRAMS[sys.argv[1]](*sys.argv[3:])
    print("right", flush=True)
