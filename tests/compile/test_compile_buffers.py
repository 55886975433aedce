"""What a compiled region does with the memory it saved: donated buffers, shared ones."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from devices import Device
from gradients import Run, assert_same_gradients
from models import Block

pytestmark = [pytest.mark.slow, pytest.mark.devices("disk", "cuda")]


def compiled(function: Callable, **options) -> Callable:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, **options)


@pytest.fixture(autouse=True)
def _compiled_here():
    """Inductor's cache does not ask whether buffers were donated when it stored a backward."""
    with torch._functorch.config.patch(enable_autograd_cache=False), torch._inductor.config.patch(fx_graph_cache=False):
        yield


def overwritten(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Inductor's backward writes its gradient of x @ weight over the saved x @ weight."""
    return (x.cos().sigmoid() @ weight).tanh().exp().sum(-1)


def saved_bytes_written_in_backward(device: torch.device) -> int:
    """How many of the tensors that `overwritten` saves does a stock backward write into?"""
    x, weight = (torch.rand(32, 32, device=device, requires_grad=True) for _ in range(2))
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = compiled(overwritten)(x, weight).sum()
    before = [tensor.detach().clone() for tensor in saved]
    loss.backward()
    return sum(tensor.nbytes for tensor, old in zip(saved, before, strict=True) if not torch.equal(tensor, old))


# ---- donated buffers ----


def test_a_compiled_backward_writes_into_what_it_unpacked(device_under_test: Device):
    assert saved_bytes_written_in_backward(device_under_test.torch_device) > 0, "nothing is donated: this shows nothing"

    def program(run: Run):
        x, weight, block = run.leaf(32, 32), run.parameter(32, 32), compiled(overwritten)
        for _ in range(3):
            with run.offload():
                y = x.exp()
                loss = (block(y, weight) + y.sin().sum(-1)).sum()
            loss.backward()
            run.check(x=x.grad, weight=weight.grad)
        return x.grad, weight.grad

    assert_same_gradients(program, device=device_under_test)


def test_a_compiled_backward_writes_while_other_graphs_are_alive(device_under_test: Device):
    """Two forwards of one region under one context, and a third that is dropped: each has memory of its own."""

    def program(run: Run):
        x, weight, block = run.leaf(32, 32), run.parameter(32, 32), compiled(overwritten)
        with run.offload():
            losses = [block(x * scale, weight).sum() for scale in (1, 2, 3)]
        del losses[1]
        for loss in losses:
            loss.backward()
            run.check(x=x.grad, weight=weight.grad)
        with run.offload():
            again = block(x, weight).sum()
        again.backward()
        return x.grad, weight.grad

    assert_same_gradients(program, device=device_under_test)


def test_a_compiled_backward_writes_into_a_source_whose_copy_was_not_waited_for(device_under_test: Device):
    """With a window for everything the source is still here at unpack, and is what backward writes into."""

    def program(run: Run):
        x, weight, block = run.leaf(256, 256), run.parameter(256, 256), compiled(overwritten)
        for _ in range(3):
            with run.offload(offload_window_bytes=1 << 30):
                loss = block(x, weight).sum()
            loss.backward()
            run.check(x=x.grad, weight=weight.grad)
        with run.offload(offload_window_bytes=1 << 30):
            other = x.exp().sin().sum()
        other.backward()
        return x.grad, weight.grad

    assert_same_gradients(program, device=device_under_test)


def test_retain_graph_with_donated_buffers_raises_pytorchs_own_error(device_under_test: Device):
    def program(run: Run):
        x, weight, block = run.leaf(32, 32), run.parameter(32, 32), compiled(overwritten)
        with run.offload():
            first = block(x, weight).sum()
        first.backward()  # compiles a backward that is given buffers
        with run.offload():
            loss = block(x, weight).sum()
        with run.raising("retained"):
            loss.backward(retain_graph=True)
        with run.raising("once_more"):
            loss.backward()
        return x.grad, weight.grad

    stats = assert_same_gradients(program, device=device_under_test)
    assert stats.bytes_reloaded > 0


@pytest.mark.parametrize("how", ["retained first", "donation off"])
def test_retain_graph_without_donated_buffers(device_under_test: Device, how: str):
    """A backward that was first compiled for a retained graph is given no buffer."""

    def program(run: Run):
        x, weight = run.leaf(32, 32), run.parameter(32, 32)
        with torch._functorch.config.patch(donated_buffer=how == "retained first"):
            block = compiled(overwritten)
            with run.offload():
                loss = block(x, weight).sum()
            for retain in (True, True, False):
                loss.backward(retain_graph=retain)
                run.check(x=x.grad, weight=weight.grad)
        return x.grad, weight.grad

    assert_same_gradients(program, device=device_under_test)


def test_double_backward_raises_pytorchs_own_error(device_under_test: Device):
    def program(run: Run):
        x, weight = run.leaf(32, 32), run.parameter(32, 32)
        with torch._functorch.config.patch(donated_buffer=False):
            block = compiled(overwritten)
            with run.offload():
                loss = block(x, weight).sum()
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            run.check(gradient=gradient)
            with run.raising("twice"):
                gradient.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test)


# ---- memory that a region shares ----


def test_views_of_one_buffer_saved_by_a_region(device_under_test: Device):
    """q, k and v are views of one product, which moves once; what is donated of them never reaches the others."""
    saved_bytes = 0

    def program(run: Run):
        nonlocal saved_bytes
        block, x = run.module(Block), run.leaf(2, 16, 32)
        parameters = {parameter.data_ptr() for parameter in block.parameters()}
        step = compiled(block)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters and tensor.device == x.device:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        for _ in range(2):
            sizes: dict[int, int] = {}  # of what is saved, by address
            seen = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
            with seen if run.stock else run.offload():
                loss = step(x).square().sum()
            saved_bytes = sum(sizes.values()) or saved_bytes
            loss.backward()
        return block, x.grad

    stats = assert_same_gradients(program, device=device_under_test)
    assert stats.bytes_offloaded == 2 * saved_bytes


def test_inputs_and_outputs_of_a_region_saved_outside_it_too(device_under_test: Device):
    def region(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.exp()
        return y, y.tanh().t()

    def program(run: Run):
        x, block = run.leaf(32, 32), compiled(region)
        with run.offload():
            a = x.sigmoid()
            b, c = block(a)
            loss = (a.sin() * b.sin() * c.sin()).sum()
        loss.backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.parametrize("which", ["input", "output"])
def test_a_tensor_that_a_region_saved_is_written_to(device_under_test: Device, which: str):
    """Autograd's own error: a region's saved inputs and outputs carry the user's version counter."""

    def program(run: Run):
        x, weight = run.leaf(32, 32), run.parameter(32, 32)
        block = compiled(lambda x, weight: (x @ weight).exp())
        with run.offload():
            y = x * 2
            z = block(y, weight)
            loss = z.sum()
        with torch.no_grad():
            (y if which == "input" else z).add_(1)
        with run.raising("written"):
            loss.backward()

    assert_same_gradients(program, device=device_under_test)


def test_a_compiled_function_writes_into_what_an_eager_operator_saved(device_under_test: Device):
    """A kernel bumps no version, AOT does it for the region's inputs: another record, and autograd's own error."""

    def program(run: Run):
        x, scale = run.leaf(32, 32), compiled(lambda tensor: tensor.mul_(2))
        with run.offload():
            y = x * 1
            first = y.sin().sum()
            with torch.no_grad():
                scale(y)
            second = y.cos().sum()
        second.backward(retain_graph=True)
        run.check(gradient=x.grad)
        with run.raising("written"):
            first.backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=2 * 32 * 32 * 4)


@pytest.mark.parametrize("hooks", ["ours", "PyTorch's"])
def test_a_parameter_given_to_a_checkpointed_region_recompiles_it_under_any_hooks(
    device_under_test: Device, hooks: str
):
    """PyTorch's limit: no Parameter comes out of hooks, so the recomputation is compiled anew, and may save others."""
    x, weight = (torch.rand(32, 32, device=device_under_test.torch_device, requires_grad=True) for _ in range(2))
    block = compiled(overwritten)
    context = device_under_test.context() if hooks == "ours" else torch.autograd.graph.save_on_cpu()
    with context:
        loss = checkpoint(block, x.exp(), nn.Parameter(weight.detach()), use_reentrant=False).sum()
    with (
        torch._dynamo.config.patch(error_on_recompile=True),
        pytest.raises(torch._dynamo.exc.RecompileError, match="expected type of 'weight'"),
    ):
        loss.backward()
