"""CUDA graphs: a captured step replays as stock does; what cannot be captured says so, and later steps are right."""

import pytest
import torch

import torchoffload
from devices import Device
from gradients import Run, assert_same_gradients
from models import mlp

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


def test_a_tensor_offloaded_before_the_capture_is_asked_for_inside_it(device_under_test: Device):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))).cuda()
    x = torch.randn(64, 64, device="cuda")

    def forward() -> torch.Tensor:
        with device_under_test.context(offload_window_bytes=0):
            return model(x).square().sum()

    warm_up(lambda: forward().backward())
    loss = forward()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="offloaded before this CUDA graph capture"), torch.cuda.graph(graph):
        loss.backward()
    torch.cuda.synchronize()
    model.zero_grad()
    forward().backward()
    offloaded = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    assert all(torch.equal(a, parameter.grad) for a, parameter in zip(offloaded, model.parameters(), strict=True))


def test_a_graph_of_autograd_that_dies_inside_a_capture_is_let_go_after_it(device_under_test: Device):
    before = torchoffload.stats()
    x = torch.randn(256, 256, device="cuda", requires_grad=True)
    with device_under_test.context(offload_window_bytes=1 << 30):
        held = [x.sin().exp().sum()]  # its copies out may be in flight
    y = torch.ones(256, 256, device="cuda")
    warm_up(lambda: y.mul(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held.clear()
        z = y.mul(3)
    graph.replay()
    assert torch.equal(z, torch.full_like(z, 3))
    with device_under_test.context():
        loss = x.sin().sum()
    loss.backward()
    del loss
    assert torchoffload.stats().live_records == before.live_records
    assert torchoffload.stats().live_slots == before.live_slots


def test_no_pinned_memory_is_taken_under_a_capture(device_under_test: Device):
    torchoffload.trim()
    before = torchoffload.stats().pinned_bytes
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    warm_up(lambda: x.sin().sum().backward())
    graph = torch.cuda.CUDAGraph()
    x.grad = None
    with torch.cuda.graph(graph):
        with device_under_test.context(offload_window_bytes=0):
            loss = x.sin().exp().sum()
        loss.backward()
    graph.replay()
    assert torchoffload.stats().pinned_bytes == before
    expected = x.detach().sin().exp() * x.detach().cos()
    assert torch.allclose(x.grad, expected, rtol=1e-5, atol=1e-6)
