"""What a Function saves while a stream of its own still fills it, as overlapped gathers do."""

import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch

from devices import Device
from gradients import Run, assert_same_gradients
from places import environment_with_support

ROWS = 1024
DELAY_CYCLES = 20_000_000  # about 10 ms


class FilledBeside(torch.autograd.Function):
    """x, saving 2x, which a side stream still computes: the caller joins that stream before it uses the result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, side: torch.cuda.Stream) -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(DELAY_CYCLES)
            doubled = x * 2
        x.record_stream(side)
        doubled.record_stream(torch.cuda.current_stream())
        ctx.save_for_backward(doubled)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (doubled,) = ctx.saved_tensors
        return gradient * doubled, None


@pytest.mark.cuda
@pytest.mark.devices("cuda")
def test_what_a_function_fills_on_a_stream_of_its_own_is_copied_when_it_is_there(device_under_test: Device):
    if torch.cuda.get_allocator_backend() != "native":
        return  # another allocator does not tell on which stream its memory is: see the limits in docs/compatibility.md

    side = torch.cuda.Stream()

    def program(run: Run):
        x = run.leaf(ROWS, ROWS)
        with torch.cuda.stream(side):
            rubbish = torch.full((ROWS, ROWS), 7.0, device=run.device)
        torch.cuda.synchronize()
        del rubbish  # whose memory the Function will be given
        with run.offload():
            y = FilledBeside.apply(x, side)
            z = y.sin()  # the copy of what was saved is enqueued
            torch.cuda.current_stream().wait_stream(side)
            y = y.exp()
        (y.sum() + z.sum()).backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test)


_FIRST_OF_A_PROCESS = """
import sys
import torch, torchoffload
from autograd_threads import await_autograd
from test_cuda_side_streams import FilledBeside
if sys.argv[1] == "allocated before":
    torch.zeros(1, device="cuda")
with torchoffload.OffloadActivations(min_offload_size=0, offload_window_bytes=0, learn=False):
    side = torch.cuda.Stream()
    x = torch.full((1024, 1024), 3.0, device="cuda", requires_grad=True)
    y = FilledBeside.apply(x, side)
    z = y.sin()
    torch.cuda.current_stream().wait_stream(side)
    y = y.exp()
y.sum().backward()
assert torch.equal(x.grad, 6 * x.detach().exp()), x.grad
await_autograd("cuda")
"""


@pytest.mark.cuda
@pytest.mark.devices("cuda")
@pytest.mark.parametrize("when", ["allocated before", "nothing allocated before"])
def test_the_first_saved_tensor_of_a_process_is_waited_for_as_any(device_under_test: Device, when: str):
    if torch.cuda.get_allocator_backend() != "native":
        return
    here = pathlib.Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", _FIRST_OF_A_PROCESS, when],
        env=environment_with_support(here), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-800:]
