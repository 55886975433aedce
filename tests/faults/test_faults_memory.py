"""Memory that is refused: no room on the device for a reload, and no pinned memory for an offload."""

import contextlib
import resource
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchoffload
from devices import Device
from gradients import Run, assert_same_gradients

testing = pytest.importorskip("torchoffload._C_testing", reason="faults are injected into the test build alone").testing

DEPTH = 4
SIMULATED = ("simulated-late", "simulated-early", "simulated-seeded")
WITH_LIMITS = (*SIMULATED, "privateuseone", "cuda")
OUT_OF_MEMORY = "out of memory"


def refuse_locked(why: str) -> None:
    testing.refuse_registration(why)
    testing.refuse_private_host_memory(why)


@pytest.fixture(autouse=True)
def _memory_that_is_given():
    testing.refuse_plain_memory(False)
    yield
    testing.limit_device_memory(None)
    refuse_locked("")
    torchoffload.trim()
    testing.refuse_plain_memory(False)


def side_of(device: Device) -> int:
    """On CUDA a tensor is a segment of its own (64 MiB), so that freeing one leaves room for one."""
    return 4096 if device.name == "cuda" else 64


def forward(x: torch.Tensor) -> torch.Tensor:
    for _ in range(DEPTH):
        x = x.sigmoid()
    return x.sum()


def sigmoid_in(context: Any, x: torch.Tensor, saved: list[torch.Tensor]) -> None:
    """Its copy is enqueued at the exit."""
    with context:
        saved.append(x.sigmoid())


@contextlib.contextmanager
def memory_limit(run: Run, spare_bytes: int) -> Iterator[None]:
    """What is allocated now, and `spare_bytes`, are all that the device has; in the offloaded run."""
    if run.stock:
        yield
    elif run.simulation:
        testing.limit_device_memory(max(run.simulation.allocated_bytes() + spare_bytes, 0))
        yield
        testing.limit_device_memory(None)
    else:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + spare_bytes) / total_bytes)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.devices(*WITH_LIMITS)
def test_a_reload_without_room_takes_that_of_reloads_made_ahead(device_under_test: Device):
    """They belong to another tape, whose backward has stopped."""
    side = side_of(device_under_test)
    nbytes = 4 * side * side

    def program(run: Run) -> Any:
        leaves, x = [run.leaf(side, side) for _ in range(6)], run.leaf(side, side)
        with run.offload(reload_window_bytes=DEPTH * nbytes):
            branches = [leaf.sigmoid() for leaf in leaves]
            branches = [branch.sum() for branch in branches]
        with run.offload(reload_window_bytes=0):
            y = forward(x)
        run.check(last=torch.autograd.grad(branches[-1], leaves[-1]))  # loads the four before it ahead
        with memory_limit(run, 0 if device_under_test.name == "cuda" else -2 * nbytes):
            run.check(other=torch.autograd.grad(y, x))
        return torch.autograd.grad(sum(branches[:-1]), leaves[:-1])

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=(6 + DEPTH) * nbytes)
    assert stats.passed_by == DEPTH


@pytest.mark.devices(*WITH_LIMITS)
def test_a_reload_without_room_takes_that_of_sources_on_their_way_out(device_under_test: Device):
    side = side_of(device_under_test)
    nbytes = 4 * side * side

    def program(run: Run) -> Any:
        x = run.leaf(side, side)
        with run.offload(reload_window_bytes=0):
            early = forward(x)
        with run.offload(offload_window_bytes=2 * DEPTH * nbytes):
            late = forward(x)
        with memory_limit(run, 0 if device_under_test.name == "cuda" else -2 * nbytes):
            run.check(early=torch.autograd.grad(early, x))
        return torch.autograd.grad(late, x)

    assert_same_gradients(program, device=device_under_test, moved_bytes=2 * DEPTH * nbytes)


@pytest.mark.devices(*WITH_LIMITS)
@pytest.mark.parametrize("window_records", [0, DEPTH])
def test_no_room_at_all_is_pytorchs_own_error_and_backward_again_is_right(device_under_test: Device, window_records):
    side = side_of(device_under_test)
    nbytes = 4 * side * side

    def program(run: Run) -> Any:
        x, context = run.leaf(side, side), run.offload(reload_window_bytes=window_records * nbytes)
        for _ in range(3):
            with context:
                y = forward(x)
            if not run.stock:
                no_room = pytest.raises(torch.OutOfMemoryError, match=OUT_OF_MEMORY)
                with memory_limit(run, 0 if device_under_test.name == "cuda" else -(1 << 40)), no_room:
                    y.backward(retain_graph=True)
            y.backward()
            run.check(gradient=x.grad)
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=3 * DEPTH * nbytes)


@pytest.mark.devices(*SIMULATED, "privateuseone")
@pytest.mark.parametrize("refused_at", range(2 * DEPTH))
def test_any_one_allocation_of_a_backward_may_be_refused_once(device_under_test: Device, refused_at: int):
    """The one that asks is tried again; a reload ahead is left for later."""

    def program(run: Run) -> Any:
        x, context = run.leaf(64, 64), run.offload(reload_window_bytes=2 * 64 * 64 * 4)
        for _ in range(2):
            with context:
                y = forward(x)
            if not run.stock:
                testing.refuse_allocation(refused_at)
            y.backward()
            run.check(gradient=x.grad)
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=2 * DEPTH * 64 * 64 * 4)
    testing.set_allocation_hook(None)


# ---- pinned memory ----


@pytest.mark.devices(*SIMULATED)
def test_pinned_memory_that_is_refused_keeps_the_step_and_serves_the_next(device_under_test: Device):
    def program(run: Run) -> Any:
        x, context = run.leaf(64, 64), run.offload()
        for step in range(3):
            if not run.stock:
                torchoffload.trim()
                testing.refuse_registration("planted" if step == 1 else "")
            with context:
                y = forward(x)
            y.backward()
            run.check(gradient=x.grad)
        return x.grad

    torchoffload.trim()
    testing.refuse_plain_memory(True)
    with pytest.warns(UserWarning, match="the driver refused to pin .* bytes of host memory: planted") as given:
        stats = assert_same_gradients(
            program, device=device_under_test, moved_bytes=2 * DEPTH * 64 * 64 * 4, kept_reason="tier_full"
        )
    assert len(given) == 1
    assert stats.records_kept["tier_full"] == DEPTH
    assert stats.pinned_bytes < 1 << 30


@pytest.mark.devices(*SIMULATED)
@pytest.mark.parametrize("on_full", ["keep", "error"])
def test_pinned_memory_that_is_refused_at_the_exit_and_is_an_error(device_under_test: Device, on_full: str):
    error, text = (UserWarning, "stay on the device") if on_full == "keep" else (RuntimeError, "cannot be offloa")

    def program(run: Run) -> Any:
        x = run.leaf(64, 64)
        for _ in range(3):
            context = run.offload(on_full=on_full)
            if run.stock:
                y = x.sigmoid()
            else:
                torchoffload.trim()
                testing.refuse_registration("planted")
                saved = []
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    with pytest.raises(error, match=text):
                        sigmoid_in(context, x, saved)
                testing.refuse_registration("")
                y = saved.pop()
            with context:
                z = forward(x)
            (y.sum() + z).backward()
            run.check(gradient=x.grad)
        return x.grad

    torchoffload.trim()
    testing.refuse_plain_memory(True)
    assert_same_gradients(
        program, device=device_under_test, moved_bytes=3 * DEPTH * 64 * 64 * 4, kept_reason="tier_full"
    )


@pytest.mark.devices(*SIMULATED, "privateuseone")
def test_where_no_memory_can_be_locked_tensors_move_to_plain_memory_and_the_cost_is_told_once(
    device_under_test: Device,
):
    def program(run: Run) -> Any:
        x, context = run.leaf(64, 64), run.offload()
        for _ in range(3):
            with context:
                y = forward(x)
            y.backward()
            run.check(gradient=x.grad)
        return x.grad

    torchoffload.trim()
    refuse_locked("planted")
    with pytest.warns(UserWarning, match="host memory.*: planted.* several times slower.*ulimit -l") as given:
        stats = assert_same_gradients(program, device=device_under_test, moved_bytes=3 * DEPTH * 64 * 64 * 4)
    assert len(given) == 1
    assert stats.records_kept == {}


@contextlib.contextmanager
def little_lockable_memory(run: Run) -> Iterator[None]:
    """RLIMIT_MEMLOCK below what a step pins, in the offloaded run."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if not run.stock:
        torchoffload.trim()
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


@pytest.mark.except_devices("privateuseone")  # whose memory is locked in name alone
@pytest.mark.devices(*WITH_LIMITS)
def test_under_a_limit_of_locked_memory_a_step_is_right_whatever_the_driver_makes_of_it(device_under_test: Device):
    """Drivers may pin beyond the limit, and root always may: then the step moves as the others do."""

    def program(run: Run) -> Any:
        x, context = run.leaf(64, 64), run.offload()
        for step in range(3):
            with little_lockable_memory(run) if step == 1 else contextlib.nullcontext():
                with context:
                    y = forward(x)
                y.backward()
            run.check(gradient=x.grad)
        return x.grad

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.6)


@pytest.mark.devices(*SIMULATED)
def test_a_refusal_to_pin_names_the_limit_of_locked_memory(device_under_test: Device):
    def program(run: Run) -> Any:
        x = run.leaf(64, 64)
        with run.offload():
            early = forward(x)
        early.backward()
        testing.refuse_registration("" if run.stock else "planted")
        with little_lockable_memory(run), run.offload():
            y = forward(x)
        testing.refuse_registration("")
        y.backward()
        return x.grad

    testing.refuse_plain_memory(True)
    with pytest.warns(UserWarning, match="bytes of host memory: planted; RLIMIT_MEMLOCK is 65536 bytes"):
        assert_same_gradients(
            program, device=device_under_test, moved_bytes=DEPTH * 64 * 64 * 4, kept_reason="tier_full"
        )


# ---- a disk that failed ahead of its consumer ----


@pytest.mark.parametrize("after", range(DEPTH))
def test_a_read_ahead_that_failed_is_made_again_when_it_is_asked_for(tmp_path, after: int):
    def program(run: Run) -> Any:
        x, context = run.leaf(64, 64), run.offload(reload_window_bytes=1 << 20)
        for _ in range(3):
            with context:
                y = forward(x)
            if not run.stock:  # all reads but the first `after` fail, and with them what is loaded ahead
                testing.inject_io_fault("pread", errno=5, after=after, times=1000)
                with pytest.raises(RuntimeError, match="could not be read back"):
                    y.backward(retain_graph=True)
                testing.clear_io_faults()
            y.backward()  # none of what failed is left in its way
            run.check(gradient=x.grad)
        return x.grad

    assert_same_gradients(program, device=Device("disk", tmp_path), moved_bytes=3 * DEPTH * 64 * 64 * 4)
