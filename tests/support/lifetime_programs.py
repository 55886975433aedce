"""Programs that make and leave engines, stores and threads: ``python lifetime_programs.py NAME DIRECTORY [MUTANT]``.

test_engine_lifetimes.py and a mutant's scenario run each in a process of its own. One that returns prints "right".
"""

import contextlib
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

import torchoffload
from functions import SavesInput
from simulated import mutant, simulated_device
from torchoffload import _C_testing

testing = _C_testing.testing
DIRECTORY = sys.argv[2]
BUDGET_BYTES = 40_000
AMPLE_BYTES = 1 << 30  # nothing goes on to the disk


def on_disk(directory: str, **options: Any) -> torchoffload.OffloadActivations:
    os.makedirs(directory, exist_ok=True)
    chosen: dict[str, Any] = {"tier": "disk", "min_offload_size": 0, "learn": False, "offload_window_bytes": 0}
    return torchoffload.OffloadActivations(**(chosen | {"disk_dir": directory} | options))


def spilling(directory: str, budget_bytes: int = BUDGET_BYTES, **options: Any) -> torchoffload.OffloadActivations:
    os.makedirs(directory, exist_ok=True)
    chosen: dict[str, Any] = {"on_full": "disk", "min_offload_size": 0, "learn": False, "offload_window_bytes": 0}
    return torchoffload.OffloadActivations(**(chosen | {"disk_dir": directory, "budget_bytes": budget_bytes} | options))


def forward(context: Any, depth: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(-1, 1, 4096).requires_grad_()
    with context:
        y = x
        for _ in range(depth):
            y = SavesInput.apply(y) * 0.5
    return x, y.sum()


def expected() -> torch.Tensor:
    x, y = forward(contextlib.nullcontext())
    y.backward()
    assert x.grad is not None
    return x.grad


def train(context: Any, right: torch.Tensor) -> None:
    x, y = forward(context)
    y.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, right)


def held() -> tuple[int, int, int]:
    return testing.engine_count(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def trim() -> None:
    """Twice: a place that was dropped is destroyed at the second look, if nobody used it meanwhile."""
    torchoffload.trim()
    torchoffload.trim()


def held_for_a_while() -> tuple[int, int, int]:
    """What is held, once it is the same for a tenth of a second: the system lists a thread that has been joined."""
    found, since = held(), time.monotonic()
    while time.monotonic() - since < 0.1:
        time.sleep(0.005)
        now = held()
        if now != found:
            found, since = now, time.monotonic()
    return found


def assert_held_again(before: tuple[int, int, int], look: Callable[[], None] = trim) -> None:
    """Fail unless it is held within some seconds.

    A place that a thread of the disk still uses is destroyed at a later look, and the system lists a thread that has
    been joined for a moment longer.
    """
    deadline = time.monotonic() + 20
    while held() != before and time.monotonic() < deadline:
        time.sleep(0.01)
        look()
    assert held() == before, (held(), before)


def deleted_directories_leave_nothing(make: Callable[..., Any] = on_disk) -> None:
    right = expected()
    train(make(f"{DIRECTORY}/first"), right)
    trim()
    before = held_for_a_while()
    for number in range(60):
        train(make(f"{DIRECTORY}/{number}"), right)
        shutil.rmtree(f"{DIRECTORY}/{number}")
        assert testing.engine_count() <= before[0] + 3
    train(make(f"{DIRECTORY}/first"), right)
    trim()
    assert_held_again(before)


def deleted_directories_of_spilled_slots_leave_nothing() -> None:
    testing.set_disk_threads(True)
    with simulated_device():
        deleted_directories_leave_nothing(spilling)


def sixteen_directories_are_remembered(make: Callable[..., Any] = on_disk) -> None:
    right = expected()
    for number in range(60):
        train(make(f"{DIRECTORY}/{number}"), right)
        assert testing.engine_count() <= 20
    trim()
    assert testing.engine_count() == 16


def sixteen_directories_of_spilled_slots_are_remembered() -> None:
    with simulated_device():
        sixteen_directories_are_remembered(spilling)


def a_context_keeps_what_was_learned_in_its_directory() -> None:
    right = expected()
    context = on_disk(f"{DIRECTORY}/kept", learn=True)
    for _ in range(4):
        train(context, right)
    learned = testing.shapes_learned()
    assert learned > 0
    for number in range(60):
        train(on_disk(f"{DIRECTORY}/{number}"), right)
        shutil.rmtree(f"{DIRECTORY}/{number}")
    shutil.rmtree(f"{DIRECTORY}/kept")
    train(on_disk(f"{DIRECTORY}/other"), right)
    trim()
    assert testing.shapes_learned() == learned
    del context
    train(on_disk(f"{DIRECTORY}/another"), right)
    trim()
    assert testing.shapes_learned() == 0


def a_graph_keeps_the_engine_of_its_directory(make: Callable[..., Any] = on_disk) -> None:
    right = expected()
    x, y = forward(make(f"{DIRECTORY}/graph"))
    for number in range(40):
        train(make(f"{DIRECTORY}/{number}"), right)
    trim()
    y.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, right)


def a_graph_keeps_the_engine_of_its_spilled_slots() -> None:
    with simulated_device():
        a_graph_keeps_the_engine_of_its_directory(spilling)


def a_pending_copy_keeps_its_engine() -> None:
    """Its record was released, and its thread has had no hook event since."""
    right = expected()
    packed, go_on = threading.Event(), threading.Event()

    def work() -> None:
        x = torch.linspace(-1, 1, 4096).requires_grad_()
        context = on_disk(f"{DIRECTORY}/pending")
        with context:
            x.sin()  # dropped at once
            packed.set()
            assert go_on.wait(60)
            del context
            x.cos()

    thread = threading.Thread(target=work)
    thread.start()
    assert packed.wait(60)
    for number in range(40):
        train(on_disk(f"{DIRECTORY}/{number}"), right)
    trim()
    go_on.set()
    thread.join()
    train(on_disk(f"{DIRECTORY}/last"), right)
    trim()
    assert testing.engine_count() == 16


def budgets_share_an_engine() -> None:
    testing.set_disk_threads(True)
    with simulated_device() as simulation:
        right = expected()
        train(spilling(DIRECTORY), right)
        held_before = held_for_a_while()
        allocated_bytes = simulation.allocated_bytes()
        for number in range(60):
            train(spilling(DIRECTORY, BUDGET_BYTES + 512 * number), right)
        assert_held_again(held_before, look=lambda: None)  # without a trim, which would give memory back
        assert simulation.allocated_bytes() == allocated_bytes


def an_engine_is_there_for_the_call_that_uses_it(mutant_name: str | None = None, saves_inside: bool = False) -> None:
    """The last handle of a graph dies. While its source's stream is told to wait, another thread turns elsewhere.

    By then no tape, record, slot or context refers to the engine, but that call.
    """
    is_seen = False
    counts: list[int] = []

    def turn_elsewhere() -> None:
        for number in range(6):
            forward(spilling(f"{DIRECTORY}/{number}", AMPLE_BYTES), depth=2)
            shutil.rmtree(f"{DIRECTORY}/{number}")
        counts.append(testing.engine_count())

    def at_the_seam(call: str) -> None:
        nonlocal is_seen
        if call != "wait" or is_seen:
            return
        is_seen = True
        if saves_inside:
            forward(spilling(f"{DIRECTORY}/other", AMPLE_BYTES), depth=1)
        thread = threading.Thread(target=turn_elsewhere)
        thread.start()
        thread.join()
        if mutant_name is not None:
            print("it is there" if counts[0] > count_before + 2 else "it is gone", flush=True)
            os._exit(0)  # what goes on from here uses freed memory

    with simulated_device(), mutant(mutant_name) if mutant_name else contextlib.nullcontext():
        forward(spilling(f"{DIRECTORY}/other", AMPLE_BYTES))
        trim()
        context = spilling(f"{DIRECTORY}/left", AMPLE_BYTES, offload_window_bytes=1 << 20)
        count_before = testing.engine_count()
        _, y = forward(context, depth=1)
        shutil.rmtree(f"{DIRECTORY}/left")
        del context
        testing.set_seam_hook(at_the_seam)
        try:
            del y
        finally:
            testing.set_seam_hook(None)
        assert is_seen
        during = counts[0]
        assert during > count_before + 2
        forward(spilling(f"{DIRECTORY}/other", AMPLE_BYTES))
        trim()
        assert testing.engine_count() < during


def an_engine_is_there_for_the_call_around_another_one() -> None:
    """The same if the thread saves in another context while the call waits, as an observer of an allocator may."""
    an_engine_is_there_for_the_call_that_uses_it(saves_inside=True)


PROGRAMS: dict[str, Callable[..., None]] = {
    program.__name__: program
    for program in (
        deleted_directories_leave_nothing, deleted_directories_of_spilled_slots_leave_nothing,
        sixteen_directories_are_remembered, sixteen_directories_of_spilled_slots_are_remembered,
        a_context_keeps_what_was_learned_in_its_directory, a_graph_keeps_the_engine_of_its_directory,
        a_graph_keeps_the_engine_of_its_spilled_slots, a_pending_copy_keeps_its_engine, budgets_share_an_engine,
        an_engine_is_there_for_the_call_that_uses_it, an_engine_is_there_for_the_call_around_another_one,
    )
}  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    PROGRAMS[sys.argv[1]](*sys.argv[3:])
    print("right", flush=True)
