"""Behind which operators a copy begins that had to wait for room in host memory, and when none waits."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchoffload
from devices import Device
from functions import Save, SavesInput
from gradients import Run, assert_same_gradients
from simulated import seam_log
from spilling_contexts import DEPTH, NBYTES, SIDE, Forward, chain, sound_disks, spilling

testing = pytest.importorskip("torchoffload._C_testing", reason="the simulated device is in the test build").testing

pytestmark = pytest.mark.devices("simulated-late", "simulated-early", "simulated-seeded")  # whose disks stand still

AMPLE = 1 << 30
SLOTS = 3  # slots that fit in host memory


@pytest.fixture(autouse=True)
def _sound_disks() -> Iterator[None]:
    yield from sound_disks()


def points_waited_for(lines: list[str]) -> list[int]:
    """The points of the compute stream that copies out wait for, by their numbers."""
    start = "wait offload_stream[0] <- compute_stream[0]@"
    return [int(line.removeprefix(start)) for line in lines if line.startswith(start)]


def test_a_copy_that_waited_does_not_wait_for_operators_enqueued_since(device_under_test: Device, tmp_path: Path):
    """Else what waits until the context is left would begin behind the loss, and its slot would be written later."""

    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        Forward(run)
        with seam_log() as lines, spilling(run, tmp_path, SLOTS, offload_window_bytes=AMPLE):
            y = chain(x)
        if not run.stock:
            waited_for = points_waited_for(lines)
            assert len(waited_for) == DEPTH
            assert sorted(set(waited_for)) == waited_for, "each copy waits for a point of its own"
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=DEPTH * NBYTES)


def test_a_copy_that_waited_waits_for_an_operator_that_saved_it_once_more(device_under_test: Device, tmp_path: Path):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        Forward(run)
        with seam_log() as lines, spilling(run, tmp_path, SLOTS, offload_window_bytes=AMPLE):
            y = chain(x, SLOTS)
            again = x * 2
            z = SavesInput.apply(again)
            chain(x, 1)
            log = [] if run.stock else testing.seam_log()
            z = z + SavesInput.apply(again)
            z = chain(z, 1)
        if not run.stock:
            recorded = sum(line.startswith("record compute_stream[0]@") for line in log)
            assert recorded == SLOTS + 1, "the last of them as its wait began"
            assert points_waited_for(lines)[SLOTS] > recorded, "the operator may have filled it anew"
        (y.sum() + z.sum()).backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5)


@pytest.fixture
def a_device_that_tells_time() -> Iterator[None]:
    testing.set_link(0, 1e9)
    yield
    testing.set_link(0, 0.0)


@pytest.mark.usefixtures("a_device_that_tells_time")
def test_while_times_are_taken_the_host_waits_for_room(device_under_test: Device, tmp_path: Path):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        forward = Forward(run)
        with torchoffload.profile(), spilling(run, tmp_path, SLOTS, offload_window_bytes=AMPLE):
            y = chain(x)
            forward.expect(moved=DEPTH - 1, disk_waits=DEPTH - 1 - SLOTS)
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=DEPTH * NBYTES)


def test_a_copy_waits_for_no_room_whose_source_was_allocated_on_a_stream_that_may_be_destroyed(
    device_under_test: Device, tmp_path: Path
):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        main, external = run.simulation.current_stream(), run.simulation.external_stream()
        Forward(run)
        external.wait_stream(main)
        with spilling(run, tmp_path, SLOTS, offload_window_bytes=AMPLE):
            y = chain(x, SLOTS)
            with run.simulation.stream(external):
                doubled = x * 2
            main.wait_stream(external)
            z = chain(SavesInput.apply(doubled), 2)
            run.simulation.destroy(external)
            z = chain(z, 1)
        (y.sum() + z.sum()).backward()
        return x.grad

    stats = assert_same_gradients(
        program, device=device_under_test, moved_bytes=(SLOTS + 3) * NBYTES, kept_reason="external_stream"
    )
    assert stats.records_kept == {"external_stream": 1}


@contextlib.contextmanager
def in_the_middle_of_the_next_copy_out(begin: Callable[[], None], context: Any) -> Iterator[None]:
    """Another thread enters the context and calls `begin` meanwhile, and idles inside of the context until the end."""
    this_thread = threading.get_ident()
    has_begun, may_leave = threading.Event(), threading.Event()

    def work() -> None:
        with context:
            begin()
            has_begun.set()
            may_leave.wait(60)

    other = threading.Thread(target=work)

    def hook(name: str) -> None:
        if name == "copy_out" and threading.get_ident() == this_thread and not other.ident:
            other.start()
            assert has_begun.wait(60)

    testing.set_seam_hook(hook)
    try:
        yield
    finally:
        testing.set_seam_hook(None)
        may_leave.set()
        other.join()


def test_a_copy_waits_for_the_operators_that_filled_its_source_whichever_thread_enqueues_it(
    device_under_test: Device, tmp_path: Path
):
    """This thread enqueues two copies of one operator, and makes the copies' stream wait for operators once.

    In the middle of the first copy, which takes the last slot, another thread saves a tensor whose copy waits for room.
    This thread's window allows no wait, so it enqueues that copy before its own second one.
    """

    def program(run: Run) -> Any:
        x, other = run.leaf(SIDE, SIDE), run.leaf(SIDE, SIDE)
        outputs: list[Any] = []

        def save() -> None:
            outputs.append(SavesInput.apply(other * 3))
            torch.relu(other[:1, :0])  # a hook event

        if run.stock:
            save()
            y = Save.apply(chain(x, 1), lambda *_: None, x * 2, x * 4)
        else:
            main = run.simulation.current_stream()

            def save_on_the_same_stream() -> None:
                with run.simulation.stream(main):
                    save()

            forward = Forward(run)
            idle = spilling(run, tmp_path, 2, offload_window_bytes=AMPLE)
            with spilling(run, tmp_path, 2, offload_window_bytes=0):
                y = chain(x, 1)
                torch.relu(x[:1, :0])  # a hook event
                forward.expect(moved=1)
                y = Save.apply(y, lambda *_: None, x * 2, x * 4)
                with in_the_middle_of_the_next_copy_out(save_on_the_same_stream, idle):
                    torch.relu(x[:1, :0])
                    forward.expect(moved=4)
        (y.sum() + outputs[0].sum()).backward()
        return x.grad, other.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.9)
