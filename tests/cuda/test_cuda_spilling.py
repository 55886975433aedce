"""Host memory, then a disk, on a GPU: bits, streams, captures, threads, failures, and memory that is written over."""

import errno
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchoffload
from devices import Device
from gradients import Run, assert_same_gradients
from spilling_contexts import DEPTH, chain

pytestmark = [pytest.mark.cuda, pytest.mark.devices("cuda")]

MIB = 1 << 20
SIDE = 512
NBYTES = 4 * SIDE * SIDE  # 1 MiB


@pytest.fixture(autouse=True)
def from_zero() -> Iterator[None]:
    gc.collect()
    torchoffload.trim()
    torchoffload.reset_stats()
    yield
    gc.collect()


def spilling(run: Run, directory: Path, budget_bytes: int = 3 * MIB, **options: Any) -> Any:
    return run.offload(on_full="disk", disk_dir=str(directory), budget_bytes=budget_bytes, **options)


@pytest.mark.parametrize("budget_bytes", [0, MIB, 5 * MIB])
@pytest.mark.parametrize("reload_window_bytes", [0, 3 * MIB, None])
@pytest.mark.parametrize("use_pin_memory", [True, False])
def test_gradients_are_the_same_whatever_the_budget(
    device_under_test: Device,
    tmp_path: Path,
    budget_bytes: int,
    reload_window_bytes: int | None,
    use_pin_memory: bool,
):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        for _ in range(3):
            with spilling(
                run,
                tmp_path,
                budget_bytes,
                reload_window_bytes=reload_window_bytes,
                use_pin_memory=use_pin_memory,
            ):
                y = chain(x)
            y.sum().backward()
            run.check(gradient=x.grad)
        return x.grad

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=3 * DEPTH * NBYTES)
    assert stats.bytes_spilled >= 3 * (DEPTH - 6) * NBYTES
    assert stats.bytes_fetched > 0
    assert stats.records_kept == {}


def linear_step(model: torch.nn.Module, rows: int, kept: list[Any] | None = None, **options: Any) -> tuple[int, int]:
    """One step; how often it waited for the disk, and the bytes that went there."""
    before = torchoffload.stats()
    x = torch.randn(rows, 2048, device="cuda", requires_grad=True)
    with torchoffload.OffloadActivations(on_full="disk", **options):
        y = model(x).pow(2).sum()
    if kept is None:
        y.backward()
    else:
        kept.append(y)
    torch.cuda.synchronize()
    now = torchoffload.stats()
    return now.disk_waits - before.disk_waits, now.bytes_spilled - before.bytes_spilled


def test_a_disk_that_was_full_for_a_moment_is_used_again(tmp_path: Path):
    testing = _testing()
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(12)]).cuda()
    options = {"disk_dir": str(tmp_path), "budget_bytes": 24 * MIB}
    testing.inject_io_fault("reserve", errno=errno.ENOSPC)
    try:
        with pytest.warns(UserWarning, match="No space left on device"):
            assert linear_step(model, 1024, **options)[1] == 0
    finally:
        testing.clear_io_faults()
    spilled = [linear_step(model, 1024, **options)[1] for _ in range(3)]
    assert min(spilled[1:]) > 0, spilled


@pytest.mark.slow
def test_a_graph_that_is_kept_makes_no_later_step_wait(tmp_path: Path):
    blocks = [torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.GELU()) for _ in range(24)]
    model = torch.nn.Sequential(*blocks).cuda()
    options = {"disk_dir": str(tmp_path), "budget_bytes": 1 << 30, "learn": False}
    kept: list[Any] = []
    for rows in (8192, 8192, 6144, 6144):
        linear_step(model, rows, **options)
    without = [linear_step(model, 6144, **options) for _ in range(3)]
    linear_step(model, 8192, **options)
    linear_step(model, 64, kept, **options)
    for _ in range(2):
        linear_step(model, 6144, **options)
    beside = [linear_step(model, 6144, **options) for _ in range(3)]
    assert min(waits for waits, _ in beside) <= max(waits for waits, _ in without) + 2, (without, beside)


def test_the_disk_as_the_tier_takes_everything_and_host_memory_passes_it_on(device_under_test: Device, tmp_path: Path):
    def program(run: Run) -> Any:
        x = run.leaf(2048, 2048)  # 16 MiB
        with run.offload(tier="disk", disk_dir=str(tmp_path)):
            y = chain(x, 80)  # 1.25 GiB, which is more than may pass at once
        y.sum().backward()
        return x.grad

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=80 * 16 * MIB)
    assert stats.bytes_spilled >= 16 * 16 * MIB
    assert stats.peak_pinned_bytes <= (1 << 30) + 320 * MIB


def test_tensors_of_the_cpu_go_to_the_disk_beside_those_of_the_gpu(device_under_test: Device, tmp_path: Path):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        on_cpu = torch.linspace(-1, 1, SIDE * SIDE).view(SIDE, SIDE).requires_grad_()
        with run.offload(tier="disk", disk_dir=str(tmp_path)):
            y = chain(x)
            of_cpu = chain(on_cpu)
        y.sum().backward()
        of_cpu.sum().backward()
        return x.grad, on_cpu.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=2 * DEPTH * NBYTES)


def test_two_directories(device_under_test: Device, tmp_path: Path):
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()

    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        with run.offload(on_full="disk", disk_dir=directories, budget_bytes=2 * MIB):
            y = chain(x)
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=DEPTH * NBYTES)


def test_the_device_is_ahead_of_the_disk(device_under_test: Device, tmp_path: Path):
    """The copies out begin long after they were enqueued: the disk's threads have to wait for them."""

    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        if not run.stock:
            torch.cuda._sleep(200_000_000)  # about 100 ms
        with spilling(run, tmp_path, 2 * MIB):
            y = chain(x)
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=DEPTH * NBYTES)


def test_on_streams_of_the_programs_own(device_under_test: Device, tmp_path: Path):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            with spilling(run, tmp_path, MIB):
                y = chain(x)
            (gradient,) = torch.autograd.grad(y.sum(), x)
        torch.cuda.current_stream().wait_stream(side)
        return gradient

    assert_same_gradients(program, device=device_under_test, moved_bytes=DEPTH * NBYTES)


def test_beside_a_capture_of_another_thread(device_under_test: Device, tmp_path: Path):
    """The disk's threads ask the driver, and disturb no capture."""

    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        captured: list[torch.Tensor] = []
        is_captured = threading.Event()

        def capture() -> None:
            static = torch.ones(8, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                captured.append(static * 2)
                is_captured.wait(10)
            graph.replay()

        capturing = threading.Thread(target=capture)
        with spilling(run, tmp_path, 2 * MIB):
            y = chain(x)
        if not run.stock:
            torch.cuda.synchronize()
            capturing.start()
        y.sum().backward()
        if not run.stock:
            is_captured.set()
            capturing.join()
            torch.cuda.synchronize()
            assert captured[0].tolist() == [2.0] * 8
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=DEPTH * NBYTES)


def test_threads_share_a_budget(device_under_test: Device, tmp_path: Path):
    def program(run: Run) -> Any:
        leaves = [run.leaf(SIDE, SIDE) for _ in range(3)]
        errors: list[BaseException] = []

        def train(x: torch.Tensor) -> None:
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    for _ in range(3):
                        with spilling(run, tmp_path, 2 * MIB):
                            y = chain(x)
                        y.sum().backward()
                    torch.cuda.current_stream().synchronize()
            except BaseException as error:
                errors.append(error)

        torch.cuda.synchronize()
        threads = [threading.Thread(target=train, args=(x,)) for x in leaves]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(200)
            assert not thread.is_alive(), "it waits for ever"
        assert errors == []
        torch.cuda.synchronize()
        return [x.grad for x in leaves]

    assert_same_gradients(program, device=device_under_test, moved_bytes=9 * DEPTH * NBYTES)


def test_a_model_trains_as_it_does_without(device_under_test: Device, tmp_path: Path):
    def program(run: Run) -> Any:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(SIDE, SIDE) for _ in range(8)]
        model = torch.nn.Sequential(*(each for layer in layers for each in (layer, torch.nn.GELU()))).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = run.tensor(4 * SIDE, SIDE)
        for _ in range(6):
            with spilling(run, tmp_path, 8 * MIB, learn=True, offload_window_bytes=None):
                loss = model(data).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.check(loss=loss.detach())
        return [parameter.detach() for parameter in model.parameters()]

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.05)


def _testing() -> Any:
    build = pytest.importorskip("torchoffload._C_testing", reason="faults are injected into the test build alone")
    return build.testing


@pytest.fixture
def io_faults() -> Iterator[Any]:
    testing = _testing()
    yield testing
    testing.clear_io_faults()


def test_a_read_that_fails_is_a_clear_error(device_under_test: Device, tmp_path: Path, io_faults: Any):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        with spilling(run, tmp_path, MIB):
            y = chain(x).sum()
        if not run.stock:
            io_faults.inject_io_fault("pread", errno=errno.EIO)
            with pytest.raises(RuntimeError, match="could not be read back: read of"):
                torch.autograd.grad(y, x, retain_graph=True)
            io_faults.clear_io_faults()
        return torch.autograd.grad(y, x)

    assert_same_gradients(program, device=device_under_test, moved_bytes=DEPTH * NBYTES)


def test_a_disk_that_takes_nothing_leaves_tensors_in_memory_and_then_on_the_device(
    device_under_test: Device, tmp_path: Path, io_faults: Any
):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        io_faults.inject_io_fault("pwrite", errno=errno.EIO)
        with spilling(run, tmp_path, 4 * MIB):
            y = chain(x)
        y.sum().backward()
        return x.grad

    with pytest.warns(UserWarning, match=r"writing them to a disk failed|stay on the device"):
        assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.1, kept_reason="tier_full")
