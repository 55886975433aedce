"""Absent tensors: they have a layout and no memory, and whoever reads them gets an error until they have some."""

import pytest
import torch

from torchoffload._core import core
from torchoffload._fit.operators import Layout

CPU = torch.device("cpu")


def absent(*sizes: int) -> torch.Tensor:
    return core.absent_tensor(*Layout.of(torch.ones(sizes)))


def test_it_has_the_layout_that_was_asked_for():
    like = torch.ones(6, 8, dtype=torch.bfloat16)[1:, ::2].t()
    layout = Layout.of(like)
    assert layout is not None
    assert Layout.of(core.absent_tensor(*layout)) == layout


def test_views_of_it_can_be_made():
    tensor = absent(4, 6)
    assert tensor.view(-1, 3)[1:].t().split(2)[1].shape == (1, 7)


@pytest.mark.parametrize(
    "read",
    [
        lambda tensor: tensor + 1,
        lambda tensor: tensor.t().sum(),
        lambda tensor: tensor.data_ptr(),
        lambda tensor: tensor.data.sin(),
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.untyped_storage().data_ptr(),
        lambda tensor: tensor.add_(1),
        lambda tensor: torch.ones(4, 6).copy_(tensor),
    ],
)
def test_whoever_reads_it_gets_an_error(read):
    with pytest.raises(RuntimeError, match="a value is asked for that the recomputation of a block left out"):
        read(absent(4, 6))


def test_memory_is_for_it_and_for_all_its_views():
    tensor = absent(4, 6)
    view = tensor.t()[2:]
    core.give_memory(view[1:])
    tensor.copy_(torch.arange(24.0).view(4, 6))
    assert view[0].tolist() == [2.0, 8.0, 14.0, 20.0]


def test_what_has_memory_keeps_it():
    tensor = torch.ones(3)
    address = tensor.data_ptr()
    core.give_memory(tensor)
    assert tensor.data_ptr() == address


def test_it_takes_no_memory():
    tensor = core.absent_tensor((1 << 50,), (1,), 0, 1 << 50, torch.uint8, CPU)
    assert tensor[1 << 40 :].numel() == (1 << 50) - (1 << 40)


def test_only_plain_tensors_have_a_layout():
    complex_tensor = torch.ones(3, dtype=torch.complex64)
    assert Layout.of(complex_tensor) is not None
    assert Layout.of(complex_tensor.conj()) is None
    assert Layout.of(complex_tensor.conj().imag) is None
    assert Layout.of(torch.ones(2, 2).to_sparse()) is None
    assert Layout.of(torch.ones(2, device="meta")) is None
    assert Layout.of(torch.nn.Parameter(torch.ones(2))) is None
