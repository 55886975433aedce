"""The generic backend on a CUDA device, which TORCHOFFLOAD_GENERIC_BACKEND=1 gives to it."""

import os
import subprocess
import sys

import pytest

from places import TESTS, environment_with_support

pytestmark = pytest.mark.cuda

CASES = [
    "gradients/test_gradients_order.py",
    "gradients/test_gradients_windows.py",
    "gradients/test_gradients_threads.py",
    "gradients/test_gradients_views.py",
    "gradients/test_gradients_dtypes.py",
    "gradients/test_gradients_hazards.py",
]

WHO_MOVES = """
import torch, torchoffload
from autograd_threads import await_autograd
x = torch.linspace(1, 2, 1 << 16, device="cuda", requires_grad=True)
with torchoffload.OffloadActivations(min_offload_size=0, offload_window_bytes=0):
    y = x.sin().exp()
y.sum().backward()
assert torch.equal(x.grad, x.detach().sin().exp() * x.detach().cos())
assert torchoffload.stats().bytes_reloaded > 0
await_autograd("cuda")
print(torchoffload.report())
"""


def test_it_moves_tensors_of_a_cuda_device():
    environment = environment_with_support() | {"TORCHOFFLOAD_GENERIC_BACKEND": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WHO_MOVES], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "not made beside the computation" not in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_gradient_cases_pass_through_it():
    """Which backend serves CUDA is decided once for a process, so the cases run in one of their own."""
    environment = os.environ | {"TORCHOFFLOAD_GENERIC_BACKEND": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-k", "cuda", "-p", "no:cacheprovider", *CASES]
    done = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
