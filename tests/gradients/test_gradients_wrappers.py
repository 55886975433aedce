"""Wrapper subclasses: their inner plain tensors move, the rest stays identical."""

import pathlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor

from devices import Device
from functions import Save
from gradients import Run, assert_same_gradients

ELEMENT_BYTES = 32 * 32 * 4


def two(run: Run) -> TwoTensor:
    return TwoTensor(run.tensor(32, 32), run.tensor(32, 32))


def halves(wrapped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return wrapped.a, wrapped.b


def test_both_inner_tensors_of_a_wrapper_move(device_under_test: Device):
    def program(run: Run):
        x = two(run).requires_grad_()
        with run.offload():
            y = (x.sin() * x).exp()
        run.check(kind=type(y.grad_fn._saved_result).__name__)
        y.sum().backward()
        return halves(x.grad)

    # x once, x.sin(), and the result.
    assert_same_gradients(program, device=device_under_test, moved_bytes=3 * 2 * ELEMENT_BYTES)


def test_a_wrapper_of_wrappers(device_under_test: Device):
    def program(run: Run):
        x = TwoTensor(two(run), two(run)).requires_grad_()
        with run.offload():
            y = x.exp()
        y.sum().backward()
        return halves(x.grad.a) + halves(x.grad.b)

    assert_same_gradients(program, device=device_under_test, moved_bytes=4 * ELEMENT_BYTES)


def test_a_parameter_made_of_a_wrapper_and_views_on_it_never_move(device_under_test: Device):
    def program(run: Run):
        weight, x = nn.Parameter(two(run)), two(run).requires_grad_()
        with run.offload():
            y = x @ weight.t()
        y.sum().backward()
        return halves(x.grad) + halves(weight.grad)

    assert_same_gradients(program, device=device_under_test, moved_bytes=2 * ELEMENT_BYTES, kept_reason="parameter")


def test_a_wrapper_is_unpacked_twice(device_under_test: Device):
    def program(run: Run):
        x = two(run).requires_grad_()
        with run.offload():
            y = x.exp().sin()
        for _ in range(3):
            y.sum().backward(retain_graph=True)
        return halves(x.grad)

    assert_same_gradients(program, device=device_under_test, moved_bytes=2 * ELEMENT_BYTES)


def test_a_wrapper_that_was_written_to_after_its_save(device_under_test: Device):
    def program(run: Run):
        x = two(run).requires_grad_()
        with run.offload():
            y = x.exp()
            z = y.sin()
        with torch.no_grad():
            y.add_(1)
        with run.raising("backward"):
            z.sum().backward()

    assert_same_gradients(program, device=device_under_test)


def test_a_jagged_tensor_keeps_its_offsets(device_under_test: Device):
    """Other offsets, even of equal values, would be another symbolic size."""

    def program(run: Run):
        parts = [run.leaf(length, 16) for length in (3, 7, 5)]
        with run.offload():
            x = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
            y = (x.sin() * x).exp()
        saved = y.grad_fn._saved_result
        run.check(same_offsets=saved.offsets() is y.offsets(), same_size=saved.shape == y.shape)
        torch.cat(y.unbind()).sum().backward()
        return [part.grad for part in parts]

    assert_same_gradients(program, device=device_under_test, moved_bytes=3 * (3 + 7 + 5) * 16 * 4)


@pytest.fixture
def mesh(tmp_path: pathlib.Path) -> Iterator[DeviceMesh]:
    """A mesh of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


ON_THE_CPU = pytest.mark.devices("disk", "simulated-late", "simulated-early", "simulated-seeded")


@ON_THE_CPU
def test_the_local_tensor_of_a_dtensor_moves(device_under_test: Device, mesh: DeviceMesh):
    def program(run: Run):
        x = DTensor.from_local(run.leaf(32, 32), mesh, [Shard(0)])
        weight = nn.Parameter(DTensor.from_local(run.tensor(32, 32), mesh, [Replicate()]))
        with run.offload():
            y = ((x @ weight).sin() * x).exp()
        saved = y.grad_fn._saved_result
        run.check(kind=type(saved).__name__, placements=str(saved.placements), shape=str(saved.shape))
        y.sum().backward()
        return weight.grad.to_local()

    # x, x @ weight, its sin, and the result; weight stays.
    assert_same_gradients(program, device=device_under_test, moved_bytes=4 * ELEMENT_BYTES, kept_reason="parameter")


@ON_THE_CPU
def test_a_collective_on_its_way_is_waited_for(device_under_test: Device, mesh: DeviceMesh):
    def program(run: Run):
        x, inner = run.leaf(4), AsyncCollectiveTensor(run.tensor(32, 32))
        local = DTensor.from_local(inner, mesh, [Replicate()], run_check=False)

        def look(unpacked: torch.Tensor) -> None:
            run.check(saved=unpacked.to_local() + 0)

        with run.offload():
            y = Save.apply(x, look, local)
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=ELEMENT_BYTES)
