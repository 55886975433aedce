"""Streams that their owner destroys: their handles may name others later, which have waited for nothing."""

import pytest
import torch

from devices import Device
from gradients import Run, assert_same_gradients

ROWS = 1024
DELAY_CYCLES = 20_000_000  # about 10 ms


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
