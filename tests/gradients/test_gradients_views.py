"""Every view comes back as it was packed, and no storage moves twice."""

from collections.abc import Callable

import pytest
import torch

from devices import Device
from functions import Save
from gradients import Run, assert_same_gradients

# name: (shape of the base, view of it, bytes of float32 that move where an operator saves it). The whole storage moves
# where the view reaches at least half of it, else the reached span alone.
VIEWS: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor], int]] = {
    "plain": ((32, 32), lambda x: x, 4096),
    "transposed": ((32, 32), lambda x: x.t(), 4096),
    "permuted": ((8, 4, 16), lambda x: x.permute(2, 0, 1), 2048),
    "large-slice": ((32, 32), lambda x: x[8:], 4096),
    "exactly-half": ((32, 32), lambda x: x[16:], 4096),
    "small-slice": ((32, 32), lambda x: x[3:7], 4 * 32 * 4),
    "odd-slice": ((4096,), lambda x: x[5:30], 25 * 4),
    "columns": ((32, 32), lambda x: x[:, 3:20], 4096),
    "steps": ((64, 16), lambda x: x[1::3], 4096),
    "one-column": ((32, 32), lambda x: x[:, 31], 4096),
    "expanded": ((32, 1), lambda x: x.expand(32, 64), 128),
    "expanded-in-front": ((1, 32), lambda x: x.expand(64, 32), 128),
    "expanded-scalar": ((1,), lambda x: x.expand(16, 16), 4),
    "expanded-slice": ((512,), lambda x: x[7:8].expand(16), 4),
    "padded-rows": ((32 * 40,), lambda x: x.as_strided((32, 32), (40, 1)), 32 * 40 * 4),
    "padded-rows-offset": ((32 * 40,), lambda x: x.as_strided((31, 32), (40, 1), 13), 32 * 40 * 4),
    "overlapping": ((64,), lambda x: x.unfold(0, 8, 2), 256),
    "diagonal": ((32, 32), lambda x: x.diagonal(), 4096),
    "unsqueezed": ((32, 32), lambda x: x[:, None, :, None], 4096),
    "size-one-strides": ((32, 32), lambda x: x.as_strided((1, 32), (7777, 1)), 128),
    "zero-stride-middle": ((8, 32), lambda x: x[:, None].expand(8, 5, 32).transpose(0, 1), 1024),
    "channels-last": ((2, 4, 4, 8), lambda x: x.permute(0, 3, 1, 2), 1024),
    "flipped-as-copy": ((32, 32), lambda x: x.flip(0), 4096),
}


def is_same_address(before: int, tensor: torch.Tensor) -> bool:
    """Kernels choose by alignment: the address comes back modulo 512."""
    return (tensor.data_ptr() - before) % 512 == 0


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_comes_back_as_it_was(device_under_test: Device, name: str):
    """A custom Function's view comes back on all of its storage."""
    shape, make_view, _ = VIEWS[name]

    def program(run: Run):
        x, base = run.leaf(4), run.tensor(*shape)
        view = make_view(base)
        address = view.data_ptr()

        def look(unpacked: torch.Tensor) -> None:
            run.check(view=unpacked, aligned=is_same_address(address, unpacked))

        with run.offload():
            y = Save.apply(x, look, view)
        del base, view
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=4 * torch.Size(shape).numel())


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_that_an_operator_saves_comes_back_as_it_was(device_under_test: Device, name: str):
    shape, make_view, moved_bytes = VIEWS[name]

    def program(run: Run):
        x, base = run.leaf(1), run.tensor(*shape)
        view = make_view(base)
        address = view.data_ptr()
        with run.offload():
            y = x * view
        del base, view
        unpacked = y.grad_fn._saved_other
        run.check(view=unpacked, aligned=is_same_address(address, unpacked))
        del unpacked
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=moved_bytes)


@pytest.mark.parametrize("name", [name for name, case in VIEWS.items() if case[2] >= 1024])
def test_a_view_and_its_base_share_a_record(device_under_test: Device, name: str):
    shape, make_view, _ = VIEWS[name]

    def program(run: Run):
        x, base = run.leaf(4), run.tensor(*shape)
        view = make_view(base)
        bases_bytes = base.untyped_storage().nbytes()

        def look(first: torch.Tensor, second: torch.Tensor) -> None:
            shares = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
            offsets = (first.storage_offset(), second.storage_offset())
            run.check(views=(first, second), shares=shares, offsets=offsets, size=first.untyped_storage().nbytes())

        run.check(size=bases_bytes)
        with run.offload():
            y = Save.apply(x, look, base, view)
            z = Save.apply(y, look, view, base)
        del base, view
        z.sum().backward()
        return x.grad

    base_bytes = 4 * torch.Size(shape).numel()
    moved_bytes = 2 * base_bytes if name == "flipped-as-copy" else base_bytes
    assert_same_gradients(program, device=device_under_test, moved_bytes=moved_bytes)


def test_x_and_its_transpose_move_once(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 48)
        with run.offload():
            a = x.tanh()  # 6144 bytes
            y = (a @ a.t()).sum()
        y.backward()
        return x.grad

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=6144)
    assert stats.bytes_deduplicated == 2 * 6144


@pytest.mark.parametrize("axis", [1, 2], ids=["batch-qkv-head", "batch-head-qkv"])
def test_interleaved_query_key_value_move_as_one_buffer(device_under_test: Device, axis: int):
    def program(run: Run):
        x, weight = run.leaf(16, 32), run.parameter(32, 96)
        with run.offload():
            buffer = x @ weight  # x: 2048
            q, k, v = buffer.view((16, 3, 32) if axis == 1 else (16, 32, 3)).unbind(axis)
            y = q * k * v  # the buffer: 6144; q * k: 2048
        y.sum().backward()
        return x.grad, weight.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=2048 + 6144 + 2048, kept_reason="parameter")


def test_a_small_span_of_a_big_storage_moves_alone_and_others_beside_it(device_under_test: Device):
    def program(run: Run):
        x, big = run.leaf(1), run.tensor(64, 1024)
        with run.offload():
            products = [
                x * big[5],  # 4096: its own record
                x * big[5, 16:32],  # within it: nothing more
                x * big[9],  # 4096: reaches outside
                x * big,  # 262144: the whole
                x * big[60],  # within the whole: nothing more
            ]
        del big
        run.check(saved=[product.grad_fn._saved_other for product in products])
        sum(product.sum() for product in products).backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=4096 + 4096 + 64 * 4096)


def test_a_small_span_does_not_drag_its_storage(device_under_test: Device):
    """What an operator saved says so where the program looks at it: the offset counts from the span."""

    def program(run: Run):
        x, big = run.leaf(1), run.tensor(64, 1024)
        with run.offload(offload_window_bytes=0):
            y = x * big[5]
        del big
        row = y.grad_fn._saved_other
        assert run.stock or (row.untyped_storage().nbytes() < 2 * 4096 and row.storage_offset() == 0)
        run.check(row=row)
        del row
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=4096)


def test_one_tensor_saved_often_moves_once(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            a = x.tanh()  # the only record
            y = a * a + a.sin() + a.cos() * a.detach() + a.t().sinh().t()
        y.sum().backward()
        return x.grad

    # a.cos() is saved by the multiplication only if a.detach() needed a gradient, which it does not.
    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=4096)
    assert stats.records_deduplicated >= 5
    assert stats.bytes_deduplicated == stats.records_deduplicated * 4096


def test_reinterpreted_views_of_one_storage_move_once(device_under_test: Device):
    def program(run: Run):
        x, base = run.leaf(4), run.tensor(32, 32)
        views = [
            base,
            base.view(torch.int32),
            base.view(torch.uint8),
            base.view(torch.int16)[:, 1:],
            torch.view_as_complex(base.view(32, 16, 2)),
        ]
        with run.offload():
            y = Save.apply(x, lambda *unpacked: run.check(views=unpacked), *views)
        del base, views
        y.sum().backward()

    assert_same_gradients(program, device=device_under_test, moved_bytes=4096)


def test_a_storage_at_an_address_used_before_is_another_record(device_under_test: Device):
    """Freed memory is handed out again at once: neither the address nor the size names a storage."""

    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            y = x
            for factor in range(1, 9):
                temporary = x.detach() * factor
                y = Save.apply(y, lambda unpacked: run.check(temporary=unpacked), temporary)
                del temporary
        y.sum().backward()

    assert_same_gradients(program, device=device_under_test, moved_bytes=8 * 4096)


def test_a_storage_saved_again_after_its_source_was_dropped_moves_once(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            a = x.tanh()  # 4096, out at once with a window of 0
            y = a
            for _ in range(6):
                y = y.sigmoid()  # 4096 each
            z = a * y  # both are known
        z.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=7 * 4096)


def test_channels_last_convolutions(device_under_test: Device):
    def program(run: Run):
        model = run.module(
            lambda: torch.nn.Sequential(
                torch.nn.Conv2d(4, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.SiLU(), torch.nn.Conv2d(8, 4, 3)
            ).to(memory_format=torch.channels_last)
        )
        x = run.tensor(2, 4, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
        with run.offload():
            y = model(x)
        y.square().mean().backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.parametrize("operation", ["mv", "dot", "sum", "matmul"])
def test_unaligned_views_give_the_same_bits(device_under_test: Device, operation: str):
    """An unaligned view that came back aligned differs in bits: the kernels choose by address."""

    def program(run: Run):
        for offset in range(1, 20, 3):
            buffer, x = run.tensor(70 * 70 + 64), run.leaf(67)
            matrix = buffer[offset : offset + 67 * 67].view(67, 67)
            look = {
                "mv": lambda m: m.mv(x.detach()),
                "dot": lambda m: m.view(-1)[:67].dot(x.detach()),
                "sum": lambda m: m.sum(),
                "matmul": lambda m: (m @ m)[0],
            }[operation]
            with run.offload():
                y = Save.apply(x, look, matrix)
            del buffer, matrix
            y.sum().backward()
            run.check(gradient=x.grad)

    assert_same_gradients(program, device=device_under_test)


def test_a_parameter_gradient_keeps_its_strides(device_under_test: Device):
    def program(run: Run):
        x, weight = run.leaf(16, 32), run.parameter(32, 32)
        with run.offload():
            y = torch.nn.functional.linear(x.t().contiguous().t(), weight.t()).t()
        y.square().sum().backward()
        return x.grad, weight.grad

    assert_same_gradients(program, device=device_under_test)
