"""Every dtype, size and lazy flag comes back bit for bit."""

import pytest
import torch

from devices import Device
from functions import Save
from gradients import Run, assert_same_gradients

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]


def every_byte(run: Run, dtype: torch.dtype) -> torch.Tensor:
    """1024 bytes that take all values, NaNs of every kind among them; 0 and 1 for bool."""
    values = torch.empty(1024, dtype=torch.uint8, device=run.device)
    values.copy_(torch.arange(1024) * 37 % (2 if dtype is torch.bool else 256))
    return values.view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_a_dtype_comes_back_bit_for_bit(device_under_test: Device, dtype: torch.dtype):
    def program(run: Run):
        x, values = run.leaf(4), every_byte(run, dtype)
        shifted = values[3:]

        def look(*unpacked: torch.Tensor) -> None:
            run.check(dtypes=tuple(each.dtype for each in unpacked), sizes=tuple(each.shape for each in unpacked))
            run.check(values=[each.contiguous().view(torch.uint8) for each in unpacked])

        with run.offload():
            y = Save.apply(x, look, values, shifted, values.view(8, -1).t())
        del values, shifted
        y.sum().backward()

    assert_same_gradients(program, device=device_under_test, moved_bytes=1024)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128])
def test_arithmetic_in_a_dtype(device_under_test: Device, dtype: torch.dtype):
    def program(run: Run):
        x, weight = run.leaf(16, 32, dtype=dtype), run.leaf(32, 16, dtype=dtype)
        with run.offload():
            y = (x @ weight).tanh() * (x @ weight).exp()
        y.abs().square().sum().backward()
        return x.grad, weight.grad

    assert_same_gradients(program, device=device_under_test)


def test_conjugate_views(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(16, 16, dtype=torch.complex64)

        def look(*unpacked: torch.Tensor) -> None:
            run.check(views=unpacked)

        with run.offload():
            a = x.tanh()  # 2048 bytes
            y = a.conj() * a + a.t().conj() * a.mH
            y = Save.apply(y, look, a.conj(), a, a.mT.conj()[2:], a.conj().conj())
        y.abs().sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test)


def test_negative_views(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(16, 16, dtype=torch.complex64)

        def look(*unpacked: torch.Tensor) -> None:
            run.check(views=unpacked)

        with run.offload():
            a = x.tanh()
            y = a.conj().imag * a.real  # the conjugate's imaginary part is a view with the negative bit
            y = Save.apply(y, look, a.conj().imag, a.imag, torch._neg_view(a.detach().real), a.conj().imag.t()[1:])
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test)


def test_conjugate_and_negative_views_of_one_storage_move_once(device_under_test: Device):
    def program(run: Run):
        x, base = run.leaf(4), run.tensor(16, 16, dtype=torch.complex64)
        both = torch._neg_view(base.conj())
        run.check(flags=(both.is_conj(), both.is_neg()))
        with run.offload():
            y = Save.apply(x, lambda *unpacked: run.check(views=unpacked), base, base.conj(), base.conj().imag, both)
        del base, both
        y.sum().backward()

    assert_same_gradients(program, device=device_under_test, moved_bytes=2048)


def test_a_zero_dimensional_tensor_moves(device_under_test: Device):
    def program(run: Run):
        x = run.leaf()
        with run.offload():
            y = x.exp().sin()  # exp saves its result, sin saves the same
        y.backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=4)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0, 7)])
def test_an_empty_tensor_comes_back_empty(device_under_test: Device, shape: tuple[int, ...]):
    def program(run: Run):
        x, empty, other = run.leaf(32, 32), run.leaf(*shape), run.tensor(*shape)
        with run.offload():
            y = empty.exp() * other
            z = Save.apply(x.exp(), lambda *unpacked: run.check(views=unpacked), empty, empty.transpose(0, -1), x)
        (y.sum() + z.sum()).backward()
        return empty.grad, x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=2 * 4096)


def test_an_empty_view_of_a_big_storage(device_under_test: Device):
    def program(run: Run):
        x, base = run.leaf(4), run.tensor(32, 32)
        with run.offload():
            y = Save.apply(x, lambda *unpacked: run.check(views=unpacked), base[:0], base, base[32:], base[:, 5:5])
        y.sum().backward()

    assert_same_gradients(program, device=device_under_test, moved_bytes=4096)


@pytest.mark.parametrize("count", [1, 127, 128, 129, 1023, 1025, 4097])
def test_odd_sizes(device_under_test: Device, count: int):
    def program(run: Run):
        x = run.leaf(count, dtype=torch.float16)
        with run.offload():
            y = x.exp().exp()
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=2 * 2 * count)


def test_nan_and_signed_zero_keep_their_bits(device_under_test: Device):
    def program(run: Run):
        x, values = run.leaf(4), run.tensor(8)
        values.copy_(torch.tensor([float("nan"), -float("nan"), 0.0, -0.0, float("inf"), -float("inf"), 1e-45, -1e-45]))
        values.view(torch.int32)[0] = 0x7F812345  # a signalling NaN with a payload
        with run.offload():
            y = Save.apply(x, lambda unpacked: run.check(values=unpacked.view(torch.int32)), values)
        del values
        y.sum().backward()

    assert_same_gradients(program, device=device_under_test, moved_bytes=32)
