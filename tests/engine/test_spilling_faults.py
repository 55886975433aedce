"""Host memory, then a disk that fails, is full or is gone: warnings, errors, and gradients that stay the same."""

import errno
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchoffload
from devices import Device
from functions import SavesInput
from gradients import Run, assert_same_gradients
from spilling_contexts import DEPTH, NBYTES, SIDE, chain, sound_disks, spilling

testing = pytest.importorskip("torchoffload._C_testing", reason="the simulated device is in the test build").testing

SIMULATED = ("simulated-late", "simulated-early", "simulated-seeded")
pytestmark = pytest.mark.devices(*SIMULATED, "privateuseone")


@pytest.fixture(autouse=True)
def _sound_disks() -> Iterator[None]:
    yield from sound_disks()


@pytest.mark.parametrize(("call", "code"), [("pwrite", errno.EIO), ("pwrite", errno.ENOSPC), ("reserve", errno.ENOSPC)])
def test_a_disk_that_takes_nothing_leaves_tensors_in_memory_and_then_on_the_device(
    device_under_test: Device, tmp_path: Path, call: str, code: int
):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        context = spilling(run, tmp_path, 4)
        testing.inject_io_fault(call, errno=code)
        for _ in range(2):
            with context:
                y = chain(x)
            y.sum().backward()
            run.check(gradient=x.grad)
        return x.grad

    with pytest.warns(UserWarning, match=r"failed|stay on the device") as given:
        stats = assert_same_gradients(
            program, device=device_under_test, min_moved_fraction=0.3, kept_reason="tier_full"
        )
    texts = [str(each.message) for each in given]
    assert sum("writing them to a disk failed" in text for text in texts) <= 1
    assert sum("stay on the device" in text for text in texts) >= 1
    assert len(texts) <= 2
    assert stats.bytes_spilled == 0
    assert stats.records_kept["tier_full"] >= DEPTH - 6


@pytest.mark.parametrize(("call", "code"), [("pwrite", errno.EIO), ("reserve", errno.ENOSPC)])
def test_a_disk_that_failed_for_a_moment_is_used_again_in_the_next_step(
    device_under_test: Device, tmp_path: Path, call: str, code: int
):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        for step in range(3):
            before = torchoffload.stats()
            if step == 0 and not run.stock:
                testing.inject_io_fault(call, errno=code)
            with spilling(run, tmp_path, 4):
                y = chain(x)
            testing.clear_io_faults()
            y.sum().backward()
            run.check(gradient=x.grad)
            now = torchoffload.stats()
            if not run.stock:
                kept = now.records_kept.get("tier_full", 0) - before.records_kept.get("tier_full", 0)
                spilled_bytes = now.bytes_spilled - before.bytes_spilled
                assert (kept > 0, spilled_bytes > 0) == ((True, False) if step == 0 else (False, True))
        return x.grad

    with pytest.warns(UserWarning, match="saved tensors stay") as told:
        assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5, kept_reason="tier_full")
    assert len(told) == 2, "each of them is told once"


def test_a_read_that_fails_is_a_clear_error_and_backward_can_be_tried_again(device_under_test: Device, tmp_path: Path):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        with spilling(run, tmp_path, 1):
            y = chain(x).sum()
        if not run.stock:
            testing.inject_io_fault("pread", errno=errno.EIO)
            with pytest.raises(RuntimeError, match=r"could not be read back: read of .* failed .*Input/output error"):
                torch.autograd.grad(y, x, retain_graph=True)
            testing.clear_io_faults()
        return torch.autograd.grad(y, x)

    assert_same_gradients(program, device=device_under_test, moved_bytes=DEPTH * NBYTES)


def test_a_directory_that_is_gone_is_a_full_disk(device_under_test: Device, tmp_path: Path):
    directory = tmp_path / "gone"

    def program(run: Run) -> Any:
        directory.mkdir(exist_ok=True)
        x = run.leaf(SIDE, SIDE)
        context = spilling(run, directory, 8)
        with context:
            early = SavesInput.apply(x)
        directory.rmdir()
        with context:
            y = chain(x)
        (early.sum() + y.sum()).backward()
        return x.grad

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stats = assert_same_gradients(
            program, device=device_under_test, min_moved_fraction=0.1, kept_reason="tier_full"
        )
    assert stats.records_kept["tier_full"] > 0


def test_nothing_in_the_spill_directory_has_a_name(device_under_test: Device, tmp_path: Path):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        with spilling(run, tmp_path, 1):
            y = chain(x)
        assert list(tmp_path.iterdir()) == []
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=DEPTH * NBYTES)
