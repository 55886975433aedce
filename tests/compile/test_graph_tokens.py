"""Tokens, which stand for the values that move between two compiled graphs, as those of test_graph_moves.py."""

import pytest
import torch

import torchoffload
from devices import Device

pytestmark = pytest.mark.devices("disk")


def test_a_token_has_no_memory_and_says_so(device_under_test: Device):
    with device_under_test.context():
        token = torch.ops.torchoffload.pack(torch.rand(16, 16), 0)
    assert (token.shape, token.stride(), token.dtype) == ((16, 16), (16, 1), torch.float8_e5m2fnuz)
    for read in (token.data_ptr, lambda: token.view(torch.uint8) + 1, lambda: torch.zeros(16, 16).copy_(token)):
        with pytest.raises(RuntimeError, match="this tensor is a token"):
            read()


def test_a_released_value_must_be_the_one_that_was_packed(device_under_test: Device):
    x = torch.rand(16, 16)
    with device_under_test.context():
        token = torch.ops.torchoffload.pack(x, 0)
        with pytest.raises(RuntimeError, match="made one value in two places"):
            torch.ops.torchoffload.release(token, x.clone(), None)


def test_a_copied_token_is_no_token(device_under_test: Device):
    with pytest.raises(RuntimeError, match="in place of the token"):
        torch.ops.torchoffload.unpack(torch.zeros(4, dtype=torch.uint8), torch.device("cpu"), torch.float32)


def test_a_dropped_token_releases_its_slot(device_under_test: Device):
    before = torchoffload.stats().live_slots
    with device_under_test.context():
        x = torch.rand(64, 64)
        token = torch.ops.torchoffload.release(torch.ops.torchoffload.pack(x, 0), x, None)
    assert torchoffload.stats().live_slots == before + 1
    del token
    assert torchoffload.stats().live_slots == before


def test_a_graph_moves_its_values(device_under_test: Device):
    """The shortest of those of test_graph_moves.py."""
    from functorch.compile import nop
    from torch._dynamo.backends.common import aot_autograd

    def layers(x: torch.Tensor) -> torch.Tensor:
        return (x.sin().exp() @ x).tanh().sum()

    backend = aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=torchoffload.partition_fn)
    gradients, before = [], torchoffload.stats().bytes_offloaded
    for compiler, context in (("aot_eager", torchoffload.NoOpManager()), (backend, device_under_test.context())):
        torch._dynamo.reset()
        x = torch.linspace(0, 1, 1024).reshape(32, 32).requires_grad_()
        with context:
            loss = torch.compile(layers, backend=compiler, fullgraph=True)(x)
        loss.backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    assert torchoffload.stats().bytes_offloaded - before >= 2 * 32 * 32 * 4


@pytest.mark.devices("simulated-late")
def test_a_value_that_another_stream_releases_is_safe_from_the_stream_that_made_it(device_under_test: Device):
    """Its memory goes back to the stream that made it, which waits for nothing that the other stream does."""
    with device_under_test.scope() as simulation:
        side = simulation.new_stream()
        x = torch.linspace(0, 1, 1024)
        expected = x.clone()
        with device_under_test.context(offload_window_bytes=1 << 20):
            token = torch.ops.torchoffload.pack(x, 0)
            with simulation.stream(side):
                token = torch.ops.torchoffload.release(token, x, None)
            simulation.fill(x, simulation.current_stream())
            x.zero_()
        assert torch.equal(torch.ops.torchoffload.unpack(token, x.device, x.dtype), expected)
