"""Streams that their owner destroys, and streams whose queues are full."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from devices import Device
from gradients import Run, assert_same_gradients
from torchoffload._fit.machine import allocator

ROWS = 1024
DELAY_CYCLES = 20_000_000  # about 10 ms


@pytest.fixture(autouse=True)
def _segments_that_do_not_grow() -> Iterator[None]:
    """Before PyTorch gives an expandable segment back, it waits for the segment's stream, also for one that is gone."""
    is_expandable = "expandable_segments:True" in allocator._settings()
    if is_expandable:  # a test of fit in this process has turned them on
        allocator._set("expandable_segments:False")
        torch.cuda.empty_cache()
    yield
    if is_expandable:
        allocator._set("expandable_segments:True")


@pytest.mark.cuda
@pytest.mark.devices("cuda")
def test_what_a_destroyed_stream_waited_for_is_not_remembered(device_under_test: Device):
    if torch.cuda.get_allocator_backend() != "native":
        return  # cudaMallocAsync frees on the stream of the allocation, which must not be gone by then
    cudart = torch.cuda.cudart()

    def program(run: Run):
        results = []
        for _ in range(6):
            handle = torch.zeros(1, dtype=torch.int64)
            cudart.cudaStreamCreate(handle.data_ptr())
            stream = torch.cuda.ExternalStream(int(handle[0]))
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                x = run.leaf(ROWS, ROWS)
                with run.offload(offload_window_bytes=0, reload_window_bytes=0):
                    torch.cuda._sleep(DELAY_CYCLES)
                    y = x.sin().exp()
                y.sum().backward()
                results.append(x.grad.clone())
            stream.synchronize()
            del x, y
            cudart.cudaStreamDestroy(int(handle[0]))
        return results

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.cuda
@pytest.mark.devices("cuda")
def test_a_stream_is_destroyed_with_copies_of_its_tensors_in_the_window(device_under_test: Device):
    """The next forward fills the window, and another graph dies: neither may name the stream.

    That forward has a leaf of its own: autograd itself names the stream that a leaf was first used on.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return
    cudart = torch.cuda.cudart()

    def program(run: Run):
        handle = torch.zeros(1, dtype=torch.int64)
        cudart.cudaStreamCreate(handle.data_ptr())
        stream = torch.cuda.ExternalStream(int(handle[0]))
        x, z = run.leaf(ROWS, ROWS), run.leaf(ROWS, ROWS)
        w = z
        torch.cuda.synchronize()
        with torch.cuda.stream(stream), run.offload(offload_window_bytes=16 * ROWS * ROWS * 4):
            y = x.sin().exp().sum()
        torch.cuda.synchronize()
        cudart.cudaStreamDestroy(int(handle[0]))
        with run.offload(offload_window_bytes=2 * ROWS * ROWS * 4):
            for _ in range(12):
                z = z.sin()
        z.sum().backward()
        del y
        return w.grad

    assert_same_gradients(program, device=device_under_test)


def _longest_pause_s(work) -> float:
    """How long another Python thread stood still, at most, while `work` ran."""
    longest, is_over = [0.0], threading.Event()

    def beat() -> None:
        last = time.monotonic()
        while not is_over.is_set():
            time.sleep(0.001)
            now = time.monotonic()
            longest[0] = max(longest[0], now - last)
            last = now

    other = threading.Thread(target=beat)
    other.start()
    try:
        work()
    finally:
        is_over.set()
        other.join()
    return longest[0]


@pytest.mark.cuda
@pytest.mark.devices("cuda")
def test_other_threads_run_while_a_full_stream_blocks_a_copy(device_under_test: Device):
    """More copies than a stream takes commands are enqueued while it waits for three seconds of computing."""
    x = torch.ones(1 << 18, device="cuda", requires_grad=True)
    begin = time.monotonic()
    torch.cuda._sleep(500_000_000)
    torch.cuda.synchronize()
    cycles_per_s = 500_000_000 / (time.monotonic() - begin)

    def forward(sleep_s: float) -> torch.Tensor:
        torch.cuda._sleep(max(1, int(sleep_s * cycles_per_s)))
        y = x
        with device_under_test.context(offload_window_bytes=64 << 30):
            for _ in range(900):
                y = torch.sin(y)
        return y

    forward(0).sum().backward()  # pinned memory is there from here on
    torch.cuda.synchronize()
    assert _longest_pause_s(lambda: forward(3.0)) < 0.5
    torch.cuda.synchronize()
