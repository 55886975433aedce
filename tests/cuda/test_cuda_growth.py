"""Budgets and streams that a program makes anew in each step: what is held on the device and in the process."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import torchoffload
from devices import Device
from gradients import Run, assert_same_gradients

ROWS = 256
STREAMS = 200  # more than keep their events


@pytest.mark.cuda
@pytest.mark.devices("cuda")
def test_ever_new_budgets_hold_no_more_than_one(device_under_test: Device, tmp_path: Path):
    model = nn.Sequential(*[nn.Linear(1024, 1024, dtype=torch.bfloat16) for _ in range(8)]).cuda()

    def step(number: int) -> tuple[int, ...]:
        x = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        budget_bytes = (24 << 20) + number * 4096
        with torchoffload.OffloadActivations(on_full="disk", disk_dir=str(tmp_path), budget_bytes=budget_bytes):
            y = model(x).float().pow(2).sum()
        y.backward()
        del x, y
        threads, descriptors = os.listdir("/proc/self/task"), os.listdir("/proc/self/fd")
        return len(threads), len(descriptors), torch.cuda.memory_allocated()

    torchoffload.reset_stats()
    held = [step(number) for number in range(13)]
    assert held[12] == held[3]
    assert torchoffload.stats().bytes_spilled > 0


@pytest.mark.cuda
@pytest.mark.devices("cuda")
def test_the_points_of_a_stream_are_waited_for_after_its_events_went_to_others(device_under_test: Device):
    """Graphs of the first streams live on while many later streams come and go."""
    if torch.cuda.get_allocator_backend() != "native":
        return  # cudaMallocAsync frees on the stream of the allocation, which must not be gone by then
    cudart = torch.cuda.cudart()

    def new_stream() -> tuple[int, torch.cuda.Stream]:
        handle = torch.zeros(1, dtype=torch.int64)
        cudart.cudaStreamCreate(handle.data_ptr())
        return int(handle[0]), torch.cuda.ExternalStream(int(handle[0]))

    def program(run: Run):
        results, living, graphs = [], [], []
        for number in range(STREAMS):
            handle, stream = new_stream()
            living.append(handle)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                x = run.leaf(ROWS, ROWS)
                with run.offload(offload_window_bytes=0 if number % 2 else 1 << 20, reload_window_bytes=0):
                    y = x.sin().exp()
                if number % 20 == 0:
                    graphs.append((x, y))
                else:
                    y.sum().backward()
                    results.append(x.grad.clone())
            torch.cuda.current_stream().wait_stream(stream)
            del x, y
        for x, y in graphs:
            y.sum().backward()
            results.append(x.grad.clone())
        graphs.clear()
        del x, y
        torch.cuda.synchronize()
        for handle in living:
            cudart.cudaStreamDestroy(handle)
        return results

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.cuda
@pytest.mark.devices("cuda")
def test_a_stream_made_in_each_step_leaves_less_than_a_kilobyte_behind(device_under_test: Device):
    """Beside what CUDA and PyTorch keep themselves, which a run without us shows."""
    if torch.cuda.get_allocator_backend() != "native":
        return
    from churns import Streams
    from soak import malloc_bytes

    def growth_per_step(churn: Streams, steps: int = 1000) -> float:
        for number in range(200):
            churn.step(number)
        before = malloc_bytes()
        for number in range(steps):
            churn.step(number)
        return (malloc_bytes() - before) / steps

    with device_under_test.scope():
        stock, offloaded = Streams(device_under_test, 1), Streams(device_under_test, 1)
        stock.context = torch.enable_grad()
        assert growth_per_step(offloaded) < growth_per_step(stock) + 1024
        assert (stock.differing, offloaded.differing) == (0, 0)
