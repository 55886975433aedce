"""Faults in the middle of training: a full or failing disk, a spent budget, exceptions where nobody expects them.

Each program trains the same steps stock and offloaded, with the fault in the offloaded run alone: what the fault keeps
or refuses must not show in any gradient, then or later, and nothing of it may stay behind.
"""

import contextlib
import errno
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torchoffload
from devices import Device
from gradients import Run, assert_same_gradients

testing = pytest.importorskip("torchoffload._C_testing", reason="faults are injected into the test build alone").testing

NBYTES = 64 * 64 * 4
DEPTH = 4  # saved tensors of a step, each of NBYTES
STEPS = 3  # the fault strikes in the second


@pytest.fixture(autouse=True)
def _system_calls_that_work():
    testing.clear_io_faults()
    yield
    testing.clear_io_faults()


@pytest.fixture
def fresh_disk(tmp_path) -> Device:
    """The disk tier with a spill file of its own, so that it is known when it grows."""
    return Device("disk", tmp_path)


def forward(x: torch.Tensor) -> torch.Tensor:
    for _ in range(DEPTH):
        x = x.sigmoid()
    return x.sum()


def forward_in(context: Any, x: torch.Tensor, forward: Callable[[torch.Tensor], Any] = forward) -> None:
    with context:
        forward(x)


@contextlib.contextmanager
def io_fault(run: Run, call: str, **fault: int) -> Iterator[None]:
    """The system call fails inside, in the offloaded run."""
    if not run.stock:
        testing.inject_io_fault(call, **fault)
    try:
        yield
    finally:
        testing.clear_io_faults()


def warned_as_an_error(forward: Callable[[], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="saved tensors stay"):
            forward()


def training(around: Callable[[Run], Any], **options: Any) -> Callable[[Run], Any]:
    """A program of STEPS steps, the second of them inside ``around(run)``."""

    def program(run: Run) -> Any:
        x, context = run.leaf(64, 64), run.offload(**options)
        for step in range(STEPS):
            with around(run) if step == 1 else contextlib.nullcontext():
                if not run.stock:
                    torchoffload.trim()  # the store has to grow in each step
                with context:
                    y = forward(x)
                y.backward()
            run.check(gradient=x.grad)
        return x.grad

    return program


# ---- a full disk, and one that fails to write ----


@pytest.mark.parametrize("after", range(DEPTH + 1))
def test_a_write_that_finds_the_disk_full_keeps_its_record(fresh_disk: Device, after: int):
    program = training(lambda run: io_fault(run, "pwrite", errno=errno.ENOSPC, after=after, times=1))
    kept = [] if after == DEPTH else ["write_failed"]
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        stats = assert_same_gradients(program, device=fresh_disk, moved_bytes=STEPS * DEPTH * NBYTES, kept_reason=kept)
    assert stats.records_kept.get("write_failed", 0) == len(kept)
    assert [str(each.message).count("No space left on device") for each in given] == [1] * len(kept)


def test_every_write_of_a_step_fails(fresh_disk: Device):
    program = training(lambda run: io_fault(run, "pwrite", errno=errno.EIO, times=1000))
    with pytest.warns(UserWarning, match="stays in memory because writing it failed") as given:
        stats = assert_same_gradients(program, device=fresh_disk, kept_reason="write_failed", min_moved_fraction=0.5)
    assert len(given) == 1, "one warning for all of them"
    assert stats.records_kept["write_failed"] == DEPTH


def test_a_disk_without_room_to_grow_keeps_the_step_and_serves_the_next(fresh_disk: Device):
    program = training(lambda run: io_fault(run, "reserve", errno=errno.ENOSPC, times=1000))
    with pytest.warns(UserWarning, match="saved tensors stay on the device") as given:
        stats = assert_same_gradients(
            program, device=fresh_disk, moved_bytes=(STEPS - 1) * DEPTH * NBYTES, kept_reason="tier_full"
        )
    assert len(given) == 1
    assert stats.records_kept["tier_full"] == DEPTH


def test_a_disk_with_little_room_gives_the_least_that_is_needed(fresh_disk: Device):
    program = training(lambda run: io_fault(run, "reserve", errno=errno.ENOSPC, times=1))
    assert_same_gradients(program, device=fresh_disk, moved_bytes=STEPS * DEPTH * NBYTES)


def test_a_full_disk_as_an_error_ends_the_step_and_no_other(fresh_disk: Device):
    def program(run: Run) -> Any:
        x, context = run.leaf(64, 64), run.offload(on_full="error")
        for step in range(STEPS):
            if step == 1 and not run.stock:
                torchoffload.trim()
                refused = pytest.raises(RuntimeError, match=r"cannot be offloaded: cannot reserve .*No space left")
                with io_fault(run, "reserve", errno=errno.ENOSPC, times=1000), refused, context:
                    forward(x)
            with context:
                y = forward(x)
            y.backward()
        return x.grad

    assert_same_gradients(program, device=fresh_disk, kept_reason="tier_full", min_moved_fraction=0.8)


@pytest.mark.parametrize("call", ["pwrite", "pread"])
@pytest.mark.parametrize("max_bytes", [512, 1000, 4096])
def test_transfers_that_fall_short_are_carried_on(fresh_disk: Device, call: str, max_bytes: int):
    program = training(lambda run: io_fault(run, call, max_bytes=max_bytes))
    assert_same_gradients(program, device=fresh_disk, moved_bytes=STEPS * DEPTH * NBYTES)


@pytest.mark.parametrize("call", ["pwrite", "pread"])
def test_a_file_system_that_refuses_direct_io_is_served_through_the_cache(fresh_disk: Device, call: str):
    program = training(lambda run: io_fault(run, call, errno=errno.EINVAL, times=1))
    assert_same_gradients(program, device=fresh_disk, moved_bytes=STEPS * DEPTH * NBYTES)


def test_a_write_back_that_fails_keeps_the_record(fresh_disk: Device):
    @contextlib.contextmanager
    def cached_and_failing(run: Run) -> Iterator[None]:
        with io_fault(run, "write_back", errno=errno.EIO, times=1000):
            if not run.stock:
                testing.inject_io_fault("pwrite", errno=errno.EINVAL, times=1)  # from here on through the cache
            yield

    with pytest.warns(UserWarning, match="Input/output error"):
        assert_same_gradients(
            training(cached_and_failing), device=fresh_disk, kept_reason="write_failed", min_moved_fraction=0.5
        )


# ---- a disk that fails to read ----


@pytest.mark.parametrize("after", range(DEPTH))
def test_a_failed_read_is_an_error_that_backward_again_survives(fresh_disk: Device, after: int):
    def program(run: Run) -> Any:
        x, context = run.leaf(64, 64), run.offload(reload_window_bytes=0)
        for _ in range(STEPS):
            with context:
                y = forward(x)
            if not run.stock:
                failed = pytest.raises(
                    RuntimeError, match=r"could not be read back: read of 16384 bytes at offset \d+ "
                )
                with io_fault(run, "pread", errno=errno.EIO, after=after, times=1), failed:
                    y.backward(retain_graph=True)
            y.backward()
            run.check(gradient=x.grad)
        return x.grad

    assert_same_gradients(program, device=fresh_disk, moved_bytes=STEPS * DEPTH * NBYTES)


def test_a_spill_file_that_ends_too_early_is_an_error(fresh_disk: Device):
    def program(run: Run) -> Any:
        x, context = run.leaf(64, 64), run.offload(reload_window_bytes=0)
        with context:
            y = forward(x)
        if not run.stock:
            failed = pytest.raises(RuntimeError, match="failed after 0 bytes: end of file")
            with io_fault(run, "pread", max_bytes=0), failed:
                y.backward(retain_graph=True)
        y.backward()
        return x.grad

    assert_same_gradients(program, device=fresh_disk, moved_bytes=DEPTH * NBYTES)


def test_a_graph_dropped_after_a_failed_read_gives_everything_back(fresh_disk: Device):
    def program(run: Run) -> Any:
        x, context = run.leaf(64, 64), run.offload(reload_window_bytes=None)
        with context:
            y = forward(x)
        if not run.stock:
            with io_fault(run, "pread", errno=errno.EIO, times=1000), pytest.raises(RuntimeError, match="read back"):
                y.backward()
        del y
        with context:
            y = forward(x)
        y.backward()
        return x.grad

    assert_same_gradients(program, device=fresh_disk, moved_bytes=2 * DEPTH * NBYTES)


# ---- a spent budget ----


@pytest.mark.parametrize("fitting", range(1, DEPTH + 1))
def test_a_budget_reached_in_the_middle_of_a_step_keeps_the_rest(device_under_test: Device, fitting: int):
    def program(run: Run) -> Any:
        x, context = run.leaf(64, 64), run.offload(budget_bytes=fitting * NBYTES)
        for _ in range(STEPS):
            with context:
                y = forward(x)
            y.backward()
            run.check(gradient=x.grad)
        return x.grad

    with contextlib.nullcontext() if fitting == DEPTH else pytest.warns(UserWarning, match="budget_bytes"):
        assert_same_gradients(
            program,
            device=device_under_test,
            moved_bytes=STEPS * fitting * NBYTES,
            kept_reason=[] if fitting == DEPTH else "tier_full",
        )


def test_a_spent_budget_as_an_error_ends_the_step_and_no_other(device_under_test: Device):
    def program(run: Run) -> Any:
        x, context = run.leaf(64, 64), run.offload(budget_bytes=DEPTH * NBYTES, on_full="error")
        for _ in range(STEPS):
            with context:
                y = forward(x)
                if not run.stock:
                    with pytest.raises(RuntimeError, match="the budget of"):
                        x.exp()
            y.backward()
            run.check(gradient=x.grad)
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=STEPS * DEPTH * NBYTES)


# ---- exceptions out of the hooks themselves ----


def test_a_warning_as_an_error_in_pack_ends_the_step_and_no_other(device_under_test: Device):
    def program(run: Run) -> Any:
        x = run.leaf(64, 64)
        for _ in range(STEPS):
            if not run.stock:
                warned_as_an_error(lambda: forward_in(run.offload(budget_bytes=1), x))
            with run.offload():
                y = forward(x)
            y.backward()
            run.check(gradient=x.grad)
        return x.grad

    assert_same_gradients(
        program, device=device_under_test, moved_bytes=STEPS * DEPTH * NBYTES, kept_reason="tier_full"
    )


def test_a_warning_as_an_error_at_the_exit_ends_the_step_and_no_other(fresh_disk: Device):
    def program(run: Run) -> Any:
        x = run.leaf(64, 64)
        for _ in range(STEPS):
            context = run.offload()
            if run.stock:
                y = x.sigmoid()
            else:
                torchoffload.trim()
                saved = []
                with io_fault(run, "reserve", errno=errno.ENOSPC, times=1000):
                    # Its copy is enqueued at the exit.
                    warned_as_an_error(lambda: forward_in(context, x, lambda x: saved.append(x.sigmoid())))
                y = saved.pop()
            with context:
                z = forward(x)
            (y.sum() + z).backward()
            run.check(gradient=x.grad)
        return x.grad

    assert_same_gradients(program, device=fresh_disk, moved_bytes=STEPS * DEPTH * NBYTES, kept_reason="tier_full")


def test_a_warning_as_an_error_inside_two_contexts(device_under_test: Device):
    def program(run: Run) -> Any:
        x, outer = run.leaf(64, 64), run.offload()
        for _ in range(STEPS):
            with outer:
                y = forward(x)
                if not run.stock:
                    warned_as_an_error(lambda: forward_in(run.offload(budget_bytes=1), x))
                z = forward(x)
            (y + z).backward()
            run.check(gradient=x.grad)
        return x.grad

    # The second chain saves the sigmoids' results again; they are other tensors.
    assert_same_gradients(
        program, device=device_under_test, moved_bytes=2 * STEPS * DEPTH * NBYTES, kept_reason="tier_full"
    )
