"""Coded copies on a GPU: gradients, streams, captures, staging memory, and what is learned of which records to code.

Which bits come back is in tests/engine/test_coded_values.py.
"""

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

import torchoffload
from coded_copies import NOTHING_AHEAD, codes_of_cuda, same_bits, saved_and_back
from devices import Device
from gradients import Run, assert_same_gradients
from places import environment_with_support

pytestmark = [pytest.mark.cuda, pytest.mark.devices("cuda")]

MIB = 1 << 20
DELAY_CYCLES = 20_000_000  # about 10 ms


@pytest.fixture(autouse=True)
def from_zero(device_under_test: Device) -> Iterator[None]:
    gc.collect()
    torchoffload.reset_stats()
    with codes_of_cuda(device_under_test):
        yield
    gc.collect()


def test_no_device_here_has_an_obstacle(device_under_test: Device):
    saved_and_back(device_under_test, torch.randn(MIB, device="cuda").bfloat16())
    stats = torchoffload.stats()
    assert stats.coding_obstacles == {}
    assert stats.records_coded == 1
    assert 0 < stats.staging_bytes <= 200 * MIB


def layers_in_bfloat16(run: Run, options: dict[str, object], width: int) -> None:
    """Steps of layers that begin with a normalisation in float32, as language models do."""
    weights = [run.leaf(width, width) for _ in range(6)]
    for step in range(6):
        with run.offload(**({"compress": True} | options)):
            y = torch.randn(width, width, device=run.device, dtype=torch.bfloat16)
            for number, weight in enumerate(weights):
                wide = y.float()
                normed = wide * wide.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
                y = torch.nn.functional.gelu(normed.bfloat16() @ weight.bfloat16()) + y
                if run.device.type == "cuda" and step == 1 and number % 2 == 0:
                    torch.cuda._sleep(DELAY_CYCLES)
        y.float().square().mean().backward()
        run.check(gradients=[weight.grad.clone() for weight in weights])
        for weight in weights:
            weight.grad = None


@pytest.mark.parametrize("options", [NOTHING_AHEAD, {}, {"learn": True}, {"compress": "auto", "learn": True}])
def test_gradients_are_those_of_stock(device_under_test: Device, options: dict[str, object]):
    def program(run: Run):
        layers_in_bfloat16(run, options, width=1024)

    # Learned plans keep what the windows have room for; but the first step is learned from, and moves all.
    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.1)
    if "compress" not in options:
        assert torchoffload.stats().records_coded > 0


# ---- kernels that are made in the background, each in a process of its own ----

MADE_WHILE_STEPS_GO_ON = """
import time, torch, torchoffload
from autograd_threads import await_autograd
x = torch.randn(1 << 22, device="cuda").bfloat16().requires_grad_()
wanted = torch.autograd.grad((x.sin() * x).exp().sum(), x)[0]
deadline = time.monotonic() + 60
counts = []
while not counts or counts[-1] == 0:
    assert time.monotonic() < deadline, torchoffload.report()
    torchoffload.reset_stats()
    with torchoffload.OffloadActivations(compress=True, offload_window_bytes=0, reload_window_bytes=0):
        y = (x.sin() * x).exp().sum()
    got = torch.autograd.grad(y, x)[0]
    assert torch.equal(got.view(torch.int16), wanted.view(torch.int16))
    counts.append(torchoffload.stats().records_coded)
assert torchoffload.stats().coding_obstacles == {}
await_autograd("cuda")
print("right")
"""

THE_PROGRAM_ENDS_MEANWHILE = """
import torch, torchoffload
from autograd_threads import await_autograd
x = torch.randn(1 << 22, device="cuda").bfloat16().requires_grad_()
with torchoffload.OffloadActivations(compress=True):
    y = x.sin()
y.sum().backward()
await_autograd("cuda")
print("right")
"""

A_GRAPH_IS_CAPTURED_MEANWHILE = """
import torch, torchoffload
from autograd_threads import await_autograd
from torchoffload._C_testing import testing
x = torch.ones(1 << 20, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="global"):
    y = x * 2
    testing.await_coders()
    z = y + 1
x.fill_(3)
graph.replay()
assert torch.equal(z, x * 2 + 1)
w = torch.randn(1 << 22, device="cuda").bfloat16().requires_grad_()
with torchoffload.OffloadActivations(compress=True, offload_window_bytes=0, reload_window_bytes=0):
    v = w.sin()
v.sum().backward()
assert torchoffload.stats().records_coded == 1, torchoffload.report()
await_autograd("cuda")
print("right")
"""

NOTHING_IS_MADE_ON_A_DEVICE_THAT_IS_NOT_USED = """
import torch, torchoffload
from autograd_threads import await_autograd
x = torch.randn(1 << 22, device="cuda:1").bfloat16().requires_grad_()
with torchoffload.OffloadActivations(compress=True):
    y = x.sin()
y.sum().backward()
assert not torch._C._cuda_hasPrimaryContext(0)
await_autograd("cuda:1")
print("right")
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(MADE_WHILE_STEPS_GO_ON, id="while steps go on"),
        pytest.param(THE_PROGRAM_ENDS_MEANWHILE, id="as the program ends"),
        pytest.param(A_GRAPH_IS_CAPTURED_MEANWHILE, id="while a graph is captured"),
        pytest.param(
            NOTHING_IS_MADE_ON_A_DEVICE_THAT_IS_NOT_USED, id="only where it is used", marks=pytest.mark.two_gpus
        ),
    ],
)
def test_kernels_are_made_in_the_background(program: str):
    environment = environment_with_support() | {"TORCHOFFLOAD_TESTING": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


def test_side_streams_and_threads(device_under_test: Device):
    values = [torch.randn(3 * MIB + index, device="cuda").bfloat16() for index in range(4)]
    torch.cuda.synchronize()
    right = [False] * len(values)

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                right[index] = same_bits(saved_and_back(device_under_test, values[index]), values[index])
                if not right[index]:
                    return

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(values))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * len(values)


def test_a_capture_leaves_coding_alone(device_under_test: Device):
    x = torch.randn(2 * MIB, device="cuda").bfloat16().requires_grad_()

    def step() -> torch.Tensor:
        with device_under_test.context(compress=True):
            y = (x.sin() * x).exp().sum()
        (gradient,) = torch.autograd.grad(y, x)
        return gradient

    expected = step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert same_bits(captured, expected)
    assert same_bits(step(), expected)


def test_staging_memory_is_given_back_by_trim(device_under_test: Device):
    saved_and_back(device_under_test, torch.randn(MIB, device="cuda").bfloat16())
    gc.collect()
    before = torch.cuda.memory_allocated()
    staging_bytes = torchoffload.stats().staging_bytes
    torchoffload.trim()
    assert torchoffload.stats().staging_bytes == 0
    assert before - torch.cuda.memory_allocated() >= staging_bytes


def test_what_was_seen_to_be_widened_is_coded_from_then_on(device_under_test: Device):
    coded = []
    for step in range(4):
        torchoffload.reset_stats()
        x = torch.randn(4 * MIB, device="cuda").bfloat16().requires_grad_()
        y = x
        with device_under_test.context(compress=True, learn=True, offload_window_bytes=0, reload_window_bytes=77):
            for _ in range(4):
                y = y.float().sin().bfloat16()  # saves its input, which was widened
                y = (y.float() + step / 3).sin().bfloat16()  # saves a sum, which was not, but for the first step's
        torch.cuda.synchronize()  # the host looks at what has arrived
        y.float().sum().backward()
        del x, y
        torch.cuda.synchronize()
        gc.collect()
        coded.append(torchoffload.stats().records_coded)
    assert coded[0] == 0
    assert coded[1] >= 4
    assert coded[3] == 4


def test_auto_codes_a_step_that_waits_for_the_link(device_under_test: Device):
    coded = []
    for _ in range(6):
        torchoffload.reset_stats()
        x = torch.randn(16 * MIB, device="cuda").bfloat16().requires_grad_()
        with device_under_test.context(compress="auto", learn=True, **NOTHING_AHEAD):
            y = x
            for _ in range(8):
                y = y.sin()
        y.sum().backward()
        del x, y
        gc.collect()
        torch.cuda.synchronize()
        coded.append(torchoffload.stats().records_coded)
    assert coded[0] == coded[1] == 0
    assert coded[-1] > 0
