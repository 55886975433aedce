"""Copies that have no room in host memory wait on the device, as far as the offload window goes, and not the host."""

import errno
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchoffload
from devices import Device
from functions import Save, SavesInput
from gradients import Run, assert_same_gradients
from spilling_contexts import DEPTH, NBYTES, ROOM, SIDE, Forward, chain, sound_disks, spilling
from torchoffload._core import core

testing = pytest.importorskip("torchoffload._C_testing", reason="the simulated device is in the test build").testing

SIMULATED = ("simulated-late", "simulated-early", "simulated-seeded")
pytestmark = pytest.mark.devices(*SIMULATED)  # whose disks stand still

AMPLE = 1 << 30
SLOTS = 3  # slots that fit in host memory
MOST_WAITING = 32  # of one thread


@pytest.fixture(autouse=True)
def _sound_disks() -> Iterator[None]:
    yield from sound_disks()


def test_forward_goes_on_while_the_disk_is_behind(device_under_test: Device, tmp_path: Path):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        forward = Forward(run)
        with spilling(run, tmp_path, SLOTS, offload_window_bytes=AMPLE):
            y = chain(x)
            forward.expect(moved=SLOTS, disk_waits=0)
        forward.expect(moved=DEPTH)
        y.sum().backward()
        return x.grad

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=DEPTH * NBYTES)
    assert stats.records_kept == {}


@pytest.mark.devices("simulated-early", "simulated-seeded")
def test_what_waits_is_copied_once_there_is_room(device_under_test: Device, tmp_path: Path):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        forward = Forward(run)
        with spilling(run, tmp_path, SLOTS, offload_window_bytes=AMPLE):
            y = chain(x, SLOTS + 4)
            forward.expect(moved=SLOTS, disk_waits=0)
            forward.room_comes()
            for _ in range(200):  # each of them is a hook event, and saves nothing that moves
                torch.relu(x[:1, :0])
            forward.expect(moved=SLOTS + 4, disk_waits=0)
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=(SLOTS + 4) * NBYTES)


@pytest.mark.parametrize("records", [1, 2, 5])
@pytest.mark.parametrize("slots", [0, 1, SLOTS])
def test_what_waits_and_what_is_in_flight_share_the_window(
    device_under_test: Device, tmp_path: Path, records: int, slots: int
):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        for is_slow in (True, False):
            testing.set_transfers_wait(is_slow)
            with spilling(run, tmp_path, slots, offload_window_bytes=records * NBYTES):
                y = chain(x)
            y.sum().backward()
            run.check(gradient=x.grad)
        return x.grad

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=2 * DEPTH * NBYTES)
    assert stats.peak_offload_window_bytes == records * NBYTES


def test_a_full_window_has_the_host_wait_for_the_oldest(device_under_test: Device, tmp_path: Path):
    waiting = 4

    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        forward = Forward(run)
        with spilling(run, tmp_path, SLOTS, offload_window_bytes=waiting * NBYTES):
            y = chain(x, SLOTS + waiting + 1)  # the last one is pending inside its operator
            forward.expect(moved=SLOTS, disk_waits=0)
            z = chain(y, 1)
            forward.expect(moved=SLOTS + 1, disk_waits=1)
        z.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=(SLOTS + waiting + 2) * NBYTES)


@pytest.mark.parametrize("window_bytes", [0, NBYTES - 1])
def test_without_room_in_the_window_the_host_waits(device_under_test: Device, tmp_path: Path, window_bytes: int):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        forward = Forward(run)
        with spilling(run, tmp_path, SLOTS, offload_window_bytes=window_bytes):
            y = chain(x)
            forward.expect(moved=DEPTH - 1, disk_waits=DEPTH - 1 - SLOTS)
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=DEPTH * NBYTES)


def test_only_so_many_copies_wait(device_under_test: Device, tmp_path: Path):
    beyond = 4

    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        forward = Forward(run)
        with spilling(run, tmp_path, 1, offload_window_bytes=AMPLE):
            y = chain(x, 1 + MOST_WAITING + beyond + 1)
            forward.expect(moved=1 + beyond, disk_waits=beyond)
        y.sum().backward()
        return x.grad

    moved = 1 + MOST_WAITING + beyond + 1
    assert_same_gradients(program, device=device_under_test, moved_bytes=moved * NBYTES)


def test_a_backward_before_there_is_room_uses_the_source(device_under_test: Device, tmp_path: Path):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        forward = Forward(run)
        with spilling(run, tmp_path, SLOTS, offload_window_bytes=AMPLE):
            chain(x).sum().backward()
            forward.expect(moved=SLOTS)
            if not run.stock:
                assert torchoffload.stats().live_slots == 0
                assert torchoffload.stats().budget_bytes_used == 0
        return x.grad

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=SLOTS * NBYTES, kept_reason="pending")
    assert stats.records_kept == {"pending": DEPTH - SLOTS}
    assert stats.bytes_spilled <= SLOTS * NBYTES
    torchoffload.trim()
    assert testing.spill_memory_bytes() == 0


def test_what_was_used_or_released_makes_room_in_the_window(device_under_test: Device, tmp_path: Path):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        forward = Forward(run)
        with spilling(run, tmp_path, SLOTS, offload_window_bytes=4 * NBYTES):
            first = chain(x, SLOTS)
            for _ in range(3):
                dropped = chain(x, 4)
                del dropped
                chain(x, 4).sum().backward()
            forward.expect(moved=SLOTS, disk_waits=0)
        first.sum().backward()
        return x.grad

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=SLOTS * NBYTES, kept_reason="pending")
    assert stats.peak_offload_window_bytes == 4 * NBYTES


def test_a_storage_that_is_resized_while_its_copy_waits_is_not_copied(device_under_test: Device, tmp_path: Path):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        Forward(run)
        with spilling(run, tmp_path, SLOTS, offload_window_bytes=AMPLE):
            y = chain(x, SLOTS)
            gathered = x * 2
            values = gathered.detach().clone()
            z = SavesInput.apply(gathered)
            z = chain(z, 2)
            gathered.untyped_storage().resize_(0)
        gathered.untyped_storage().resize_(NBYTES)
        gathered.data.copy_(values)
        (y.sum() + z.sum()).backward()
        return x.grad

    stats = assert_same_gradients(
        program, device=device_under_test, moved_bytes=(SLOTS + 2) * NBYTES, kept_reason="resized"
    )
    assert stats.records_kept == {"resized": 1}


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_while_copies_wait(device_under_test: Device, tmp_path: Path, code: int):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        forward = Forward(run)
        with spilling(run, tmp_path, SLOTS, offload_window_bytes=AMPLE):
            y = chain(x)
            forward.expect(moved=SLOTS, disk_waits=0)
            testing.inject_io_fault("pwrite", errno=code)
        y.sum().backward()
        return x.grad

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stats = assert_same_gradients(
            program, device=device_under_test, moved_bytes=SLOTS * NBYTES, kept_reason="tier_full"
        )
    assert stats.records_kept == {"tier_full": DEPTH - SLOTS}
    assert stats.budget_bytes_used == 0


def test_a_save_of_changed_bytes_joins_no_record_whose_copy_waits(device_under_test: Device, tmp_path: Path):
    """The copy would wait for the stream of the first save, and not for the one that has changed the bytes."""

    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        forward = Forward(run)
        with spilling(run, tmp_path, SLOTS, offload_window_bytes=AMPLE):
            y = chain(x, SLOTS)
            changed = x * 2
            overtaken = SavesInput.apply(changed)
            _further = chain(x, 1)
            main = run.simulation.current_stream()
            side = run.simulation.new_stream()
            side.wait_stream(main)
            with run.simulation.stream(side):
                changed.mul_(3)
                z = SavesInput.apply(changed)
            if forward.is_counted:
                assert torchoffload.stats().live_records - forward.before.live_records == SLOTS + 2
        main.wait_stream(side)
        (y.sum() + z.sum()).backward()
        del overtaken
        return x.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.9)


@pytest.mark.parametrize("is_same_tensor", [True, False])
def test_a_copy_that_waits_is_not_enqueued_inside_an_operator_that_saves_it_again(
    device_under_test: Device, tmp_path: Path, is_same_tensor: bool
):
    """R1, also where the operator saves another tensor on the same storage, which has a record of its own.

    The window is full as the last operator begins. So the host waits until the large slot is written, which makes room
    for what the operator is about to save again.
    """

    def program(run: Run) -> Any:
        x, large = run.leaf(SIDE, SIDE), run.leaf(4 * SIDE, SIDE)
        forward = Forward(run)
        with spilling(run, tmp_path, 4, offload_window_bytes=2 * NBYTES):
            y = SavesInput.apply(large)
            small = [x * 1, x * 2, x * 3]
            z = sum(SavesInput.apply(each) for each in small)
            forward.expect(moved=1, disk_waits=0)
            again = small[1] if is_same_tensor else small[1].data
            z = Save.apply(z, lambda *_: None, again, x * 4)
            forward.expect(moved=3, disk_waits=1)  # the first and the third of the small ones
        (y.sum() + z.sum()).backward()
        return x.grad, large.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.9)


def test_what_was_saved_on_a_stream_that_may_be_destroyed_does_not_wait(device_under_test: Device, tmp_path: Path):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        main, external = run.simulation.current_stream(), run.simulation.external_stream()
        forward = Forward(run)
        external.wait_stream(main)
        with (
            spilling(run, tmp_path, SLOTS, offload_window_bytes=AMPLE),
            run.simulation.stream(external),
        ):
            y = chain(x)
            forward.expect(moved=DEPTH - 1, disk_waits=DEPTH - 1 - SLOTS)
        main.wait_stream(external)
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.9)


@pytest.mark.parametrize("inner_slots", [SLOTS, SLOTS + 1])
def test_a_context_is_left_inside_one_whose_copies_wait(device_under_test: Device, tmp_path: Path, inner_slots: int):
    """With as many slots both have one engine, with one more each has its own."""

    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        forward = Forward(run)
        with spilling(run, tmp_path, SLOTS, offload_window_bytes=AMPLE):
            y = chain(x, SLOTS + 2)
            with spilling(run, tmp_path, inner_slots, offload_window_bytes=AMPLE):
                z = chain(y, inner_slots + 2)
            inner = inner_slots + 2  # of the outer one's, at most the first have found the room that the inner one made
            if forward.is_counted:
                moved = torchoffload.stats().records_offloaded - forward.before.records_offloaded
                assert SLOTS + inner <= moved <= SLOTS + 2 + inner
            z = chain(z, 2)
        z.sum().backward()
        return x.grad

    moved = SLOTS + 2 + inner_slots + 2 + 2
    assert_same_gradients(program, device=device_under_test, moved_bytes=moved * NBYTES)


def test_copies_that_wait_are_enqueued_as_a_module_with_a_smaller_window_begins(device_under_test: Device, tmp_path):
    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return chain(x, SLOTS + 3)

    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        model = nn.Sequential(Chain(), Chain())
        forward = Forward(run)
        found: list[int] = []
        if run.stock:
            model(x).sum().backward()
            return x.grad
        options: dict[str, Any] = {"on_full": "disk", "disk_dir": str(tmp_path), "budget_bytes": SLOTS * ROOM}
        handle = torchoffload.offload_modules(model, list(model), min_offload_size=0, learn=False, **options)
        core.set_module_windows(handle._offloading.context, [(0, 0, 0), (AMPLE, 0, AMPLE), (0, 0, AMPLE)])
        model[0].register_forward_pre_hook(lambda *_: found.append(torchoffload.stats().records_offloaded))
        model[0].register_forward_hook(lambda *_: found.append(torchoffload.stats().records_offloaded))
        y = model(x)
        forward.expect(moved=2 * (SLOTS + 3))
        y.sum().backward()
        handle.remove()
        assert found[-1] - found[0] >= SLOTS
        return x.grad

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=2 * (SLOTS + 3) * NBYTES)
    assert stats.peak_offload_window_bytes <= (SLOTS + 3) * NBYTES


# ---- tier="disk" on an accelerator: a little memory passes everything on ----


@pytest.fixture
def everything_spills(spill_directory: Path) -> Iterator[None]:
    testing.spill_everything(str(spill_directory), memory_bytes=SLOTS * ROOM)
    yield
    testing.spill_everything(None)


@pytest.mark.usefixtures("everything_spills")
def test_where_everything_is_written_copies_wait_as_well(device_under_test: Device):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        forward = Forward(run)
        with run.offload(offload_window_bytes=AMPLE):
            y = chain(x)
            forward.expect(moved=SLOTS, disk_waits=0)
        forward.expect(moved=DEPTH)
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=DEPTH * NBYTES)


@pytest.mark.usefixtures("everything_spills")
def test_a_record_larger_than_all_of_the_memory_waits_until_the_others_are_written(device_under_test: Device):
    def program(run: Run) -> Any:
        x, large = run.leaf(SIDE, SIDE), run.leaf(8 * SIDE, SIDE)
        forward = Forward(run)
        with run.offload(offload_window_bytes=AMPLE):
            y = chain(x, 2)
            z = chain(large, 2)
            forward.expect(moved=2, disk_waits=0)
            forward.room_comes()
            z = chain(z, 2)
        (y.sum() + z.sum()).backward()
        return x.grad, large.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=(2 + 4 * 8) * NBYTES)
