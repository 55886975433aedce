"""CUDA graphs: a captured step replays as stock does."""

import subprocess
import sys

import pytest
import torch

from devices import Device
from gradients import Run, assert_same_gradients
from models import mlp
from places import SUPPORT

pytestmark = [pytest.mark.cuda, pytest.mark.devices("cuda")]


def warm_up(step) -> None:
    """Before a capture, on a stream of its own, as PyTorch's notes on CUDA graphs ask for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)


def test_a_whole_training_step_is_captured_and_replayed_with_new_inputs(device_under_test: Device):
    def program(run: Run):
        model, x = mlp(run), run.tensor(16, 32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            with run.offload(offload_window_bytes=0):
                loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss

        warm_up(step)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            loss = step()
        for _ in range(3):
            x.copy_(run.tensor(16, 32))
            graph.replay()
            run.check(loss=loss, model=model)
        with run.offload(offload_window_bytes=0):  # and eagerly again
            again = model(x).square().sum()
        again.backward()
        return model

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.1, kept_reason="capturing")


@pytest.mark.parametrize("name", ["asked_for_inside", "dies_inside", "pins_nothing", "packed_before_flushed_inside"])
def test_a_capture_meets_what_was_offloaded_before_it(device_under_test: Device, name: str):
    program = SUPPORT / "capture_programs.py"
    done = subprocess.run([sys.executable, program, name], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("right\n")
