"""The scenarios of slots that go on to a disk, R16: on the simulated device, whose disk threads run when it says so.

And of disks that fail or do not answer.
"""

import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from checks import RIGHT_GRADIENT, gradient_name
from scenario import AMPLE_BYTES, NBYTES, Stage, another_thread_inside, race, scenario, testing

import torchoffload

ROOM = 4096 + 3584  # what a slot takes of host memory


def _spilling(stage: Stage, slots: int, **options: Any) -> torchoffload.OffloadActivations:
    """A context with host memory for so many slots, and a disk."""
    return stage.context(on_full="disk", disk_dir=str(stage.directory), budget_bytes=slots * ROOM, **options)


@contextlib.contextmanager
def _transfers_that_wait() -> Iterator[None]:
    """The disk's threads do nothing until somebody waits for them, in every mode."""
    testing.set_transfers_wait(True)
    try:
        yield
    finally:
        testing.set_transfers_wait(False)


@scenario(
    "SpillWaitsForOffload",
    wrong=race("copy out writes slot @ offload_stream[0]", "a disk's thread reads slot @ the host"),
)
def a_slot_makes_room_for_the_next_one(stage: Stage) -> None:
    x = stage.leaf()
    with _spilling(stage, 0):
        y = x.sin().exp()
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().sin().exp() * x.detach().cos())


@scenario(
    "FetchWaitsForGuards",
    wrong=race("copy in reads slot @ reload_stream[0]", "a disk's thread writes slot @ the host"),
)
def a_slot_comes_back_to_memory_that_another_one_was_just_read_from(stage: Stage) -> None:
    x = stage.leaf()
    with _spilling(stage, 0):
        y = x.sin().exp()
    y.sum().backward(retain_graph=True)
    assert torch.equal(x.grad, x.detach().sin().exp() * x.detach().cos())


@scenario(
    "ReloadWaitsForFetch",
    wrong=race("copy in reads slot @ reload_stream[0]", "a disk's thread writes slot @ the host"),
)
def backward_asks_for_what_is_on_the_disk(stage: Stage) -> None:
    x = stage.leaf()
    with _spilling(stage, 0), _transfers_that_wait():
        y, z = x.sin(), (x * 2).sin()
        stage.next_operator()
        torch.autograd.grad(y.sum(), x, retain_graph=True)
        _further = stage.leaf().sin()  # which waits for the disk's thread
        stage.next_operator()
    del z


@scenario(
    "SpilledMemoryIsGuarded",
    wrong=race("copy in reads slot @ reload_stream[0]", "copy out writes slot @ offload_stream[0]"),
)
def a_slot_that_was_loaded_ahead_makes_room_for_one_of_a_stream_that_knows_nothing_of_it(stage: Stage) -> None:
    first, last = stage.leaf(), stage.leaf()
    with _spilling(stage, 2, reload_window_bytes=AMPLE_BYTES):
        from_first, from_last = first.sin(), last.sin()
    from_last.sum().backward(retain_graph=True)  # loads the first record ahead
    side = stage.simulation.new_stream()
    with stage.simulation.stream(side):
        x = stage.leaf()
        with _spilling(stage, 2):
            y = x.sin()
    del y, from_first


@scenario(
    "SlotStaysWhileHeld",
    wrong=race("copy out writes slot @ offload_stream[0]", "copy in reads slot @ reload_stream[0]"),
)
def another_thread_wants_room_while_a_slot_is_read(stage: Stage) -> None:
    x = stage.leaf()
    with _spilling(stage, 0):
        y, z = x.sin(), (x * 2).sin()
    graphs = [z]
    del z

    def save_more() -> None:
        with _spilling(stage, 0):
            graphs.append(stage.leaf().sin())

    with another_thread_inside("copy_in", save_more):
        torch.autograd.grad(y.sum(), x)


@scenario(
    "SlotHeldUntilIoDone",
    wrong=race("copy out writes slot @ offload_stream[0]", "a disk's thread reads slot @ the host"),
)
def a_graph_is_dropped_while_its_slot_is_written(stage: Stage) -> None:
    with _transfers_that_wait():
        with _spilling(stage, 1):
            y = stage.leaf().sin()
        del y
        with _spilling(stage, 1):
            y = stage.leaf().sin()
            z = stage.leaf().sin()
    del y, z


@scenario("IdleThreadsMakeRoom", right="copies of each thread: [3]", wrong="copies of each thread: [1, 2]")
def a_thread_idles_inside_of_its_context(stage: Stage) -> str:
    """There are its copy in the only slot, two that wait for room and fill the window, and one that is pending."""
    main, is_idle, may_go_on = stage.main, threading.Event(), threading.Event()
    outputs: list[torch.Tensor] = []

    def idle() -> None:
        with stage.simulation.stream(main), _spilling(stage, 1, offload_window_bytes=2 * NBYTES):
            outputs.append(stage.leaf().sin().sin().sin().sin())
            is_idle.set()
            may_go_on.wait(60)

    with _transfers_that_wait():
        thread = threading.Thread(target=idle)
        thread.start()
        is_idle.wait(60)
        with _spilling(stage, 1, offload_window_bytes=2 * NBYTES):
            y = stage.leaf().sin().sin().sin()
            moved = sorted(tape.records_offloaded for tape in torchoffload.stats().tapes if tape.records_offloaded > 0)
        may_go_on.set()
        thread.join()
    del y
    outputs.clear()
    return f"copies of each thread: {moved}"


@scenario("FailedSpillStaysInMemory", right=RIGHT_GRADIENT, wrong="a gradient at zeros")
def the_disk_refuses_a_slot(stage: Stage) -> str:
    x, further = stage.leaf(), stage.leaf()
    testing.inject_io_fault("pwrite", errno=errno.EIO)
    try:
        with _spilling(stage, 0):
            y = x.sin()
            z = further.sin()
        (gradient,) = torch.autograd.grad(y.sum(), x)
    finally:
        testing.clear_io_faults()
    del z
    return gradient_name(gradient, x.detach())


@scenario("RefusalPasses", right="the disk takes slots again", wrong="the disk takes no more slots")
def the_disk_is_full_for_a_moment(stage: Stage) -> str:
    def step() -> None:
        with _spilling(stage, 1):
            y = stage.leaf().sin().sin().sin().sin()
        y.sum().backward()

    testing.inject_io_fault("pwrite", errno=errno.ENOSPC)
    try:
        step()
    finally:
        testing.clear_io_faults()
    before = torchoffload.stats().bytes_spilled
    step()
    spilled = torchoffload.stats().bytes_spilled > before
    return "the disk takes slots again" if spilled else "the disk takes no more slots"


@scenario(
    "InterruptEndsWait", right="interrupted while the disk hung", wrong="interrupted once it had answered", on_disk=True
)
def the_user_interrupts_a_wait_for_a_disk_that_hangs(stage: Stage) -> str:
    x = stage.leaf()
    with stage.context():
        y = x.sin()
    is_over, has_answered = threading.Event(), threading.Event()

    def interrupt() -> None:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)
        is_over.wait(1)
        has_answered.set()
        testing.release_held_io("pread")

    user = threading.Thread(target=interrupt)
    testing.hold_next_io("pread")
    try:
        user.start()
        torch.autograd.grad(y.sum(), x, retain_graph=True)
        time.sleep(10)
        return "not interrupted"
    except KeyboardInterrupt:
        return "interrupted once it had answered" if has_answered.is_set() else "interrupted while the disk hung"
    finally:
        is_over.set()
        user.join()
