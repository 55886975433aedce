"""Tensors of rare kinds, and storages that others own, change or take away."""

import tempfile

import pytest
import torch
from torch import nn

from devices import Device
from functions import Save
from gradients import Run, assert_same_gradients

# ---- rare tensors ----


@pytest.mark.except_devices("privateuseone")  # it has strided tensors only
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:Sparse CSR")
def test_tensors_of_rare_layouts_stay(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 32)
        values = run.tensor(32, 32)
        rare = [values.to_sparse(), values.to_sparse_csr()]
        if run.device.type == "cpu":
            rare.append(torch.quantize_per_tensor(values, 0.1, 0, torch.qint8))
        with run.offload():
            y = x
            for tensor in rare:
                dense = torch.Tensor.dequantize if tensor.is_quantized else torch.Tensor.to_dense
                y = Save.apply(y, dense, tensor)
            z = y.exp()
        z.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=4096, kept_reason="layout")


@pytest.mark.except_devices("privateuseone")  # it has strided tensors only
def test_a_changed_sparse_operand_is_stocks_error(device_under_test: Device):
    def program(run: Run):
        sparse, x = run.tensor(32, 32).relu().to_sparse(), run.leaf(32, 32)
        with run.offload():
            y = torch.sparse.mm(sparse, x).exp()
        sparse.mul_(2)
        with run.raising("changed"):
            y.sum().backward()

    assert_same_gradients(program, device=device_under_test, moved_bytes=4096, kept_reason="layout")


@pytest.mark.except_devices("privateuseone")  # it has strided tensors only
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_strided_nested_tensors(device_under_test: Device):
    def program(run: Run):
        nested = torch.nested.nested_tensor([run.tensor(3, 8), run.tensor(5, 8)], requires_grad=True)
        x = run.leaf(32, 32)
        with run.offload():
            y, z = torch.relu(nested * nested), x.exp()
        y.to_padded_tensor(0.0).sum().backward()
        z.sum().backward()
        return nested.grad.to_padded_tensor(0.0), x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=4096, kept_reason="layout")


def test_complex_tensors_made_of_two(device_under_test: Device):
    complex_tensor = pytest.importorskip("torch._subclasses.complex_tensor").ComplexTensor

    def program(run: Run):
        x = complex_tensor(run.tensor(32, 32), run.tensor(32, 32)).requires_grad_()
        with run.offload():
            y = (x * x).exp()
        y.abs().sum().backward()
        return x.grad.re, x.grad.im

    assert_same_gradients(program, device=device_under_test, moved_bytes=4 * 4096)


# ---- storages that others own, or take away ----


@pytest.mark.devices("disk")  # the memory of other devices is their own
def test_storages_of_a_file_and_of_numpy(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(64, 64)
        with tempfile.NamedTemporaryFile() as file:
            mapped = torch.from_file(file.name, shared=True, size=64 * 64).view(64, 64).fill_(0.5)
            array = run.tensor(64, 64).numpy()
            with run.offload():
                y = ((x * mapped).sin() * torch.from_numpy(array)).exp()
            del mapped, array
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test)


def test_a_lazy_clone_is_written_to_after_saving(device_under_test: Device):
    """Both share bytes until one is written to: writing moves one of them to other memory."""

    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            y = x * 2
            z = y.square().exp()
            clone = torch._lazy_clone(y)
            w = clone * z
            with torch.no_grad():
                clone.detach().add_(1)
        with run.raising("changed", origin=False):
            w.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5)


def test_modules_are_converted_by_swapping_between_steps(device_under_test: Device):
    def program(run: Run):
        model, x = run.module(lambda: nn.Linear(32, 32)), run.leaf(16, 32)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            for convert in (nn.Module.double, nn.Module.float):
                with run.offload():
                    y = model(x).exp()
                y.sum().backward()
                del y
                convert(model)
                x = run.leaf(16, 32).to(model.weight.dtype)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        return model

    assert_same_gradients(program, device=device_under_test)
