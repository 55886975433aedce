"""What two saves of wrapper subclasses share, and what they must not; what is inside of a parameter is one."""

import pytest
import torch
from test_gradients_wrappers import halves, two
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import torchoffload
from devices import Device
from functions import Save
from gradients import Run, assert_same_gradients

NBYTES = 32 * 32 * 4


# ---- writes ----


def test_a_wrapper_that_is_changed_between_two_saves_is_moved_twice(device_under_test: Device):
    """What is written through a wrapper raises its own version, and nobody's inside of it."""

    def program(run: Run):
        x = two(run).requires_grad_()
        with run.offload():
            h = x * 2
            dropped = h.sin()
            other = h.exp().exp()  # so that the copies of `h` are made
            with torch.no_grad():
                h.add_(1)
            y = h.sin()
        del dropped, other
        y.sum().backward()
        return halves(x.grad)

    # h, before and after; the results of both exp.
    assert_same_gradients(program, device=device_under_test, moved_bytes=4 * 2 * NBYTES)


def test_a_view_on_a_wrapper_that_is_changed_between_two_saves(device_under_test: Device):
    def program(run: Run):
        x = two(run).requires_grad_()
        with run.offload():
            h = x * 2
            dropped = h.t().sin()
            other = h.exp().exp()
            with torch.no_grad():
                h.t().add_(1)
            y = h.t().sin() + h.cos()
        del dropped, other
        y.sum().backward()
        return halves(x.grad)

    assert_same_gradients(program, device=device_under_test, moved_bytes=4 * 2 * NBYTES)


def test_a_plain_tensor_that_is_changed_through_a_wrapper_between_two_saves(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            h = (x * 2).detach()
            first = Save.apply(x, lambda plain: plain.sin(), h)
            wrapper = TwoTensor(h, h)
            second = Save.apply(x, lambda wrapped: wrapped.a + wrapped.b, wrapper)
            third = (first + second).exp()
            wrapper.add_(1)
            fourth = Save.apply(x, lambda plain: plain.cos(), h)
        del first, second, third
        fourth.sum().backward()
        return x.grad

    # h, exp's result, and h after it was changed.
    assert_same_gradients(program, device=device_under_test, moved_bytes=3 * NBYTES)


def test_a_wrapper_written_to_after_its_save_is_stocks_error_with_its_view_saved_too(device_under_test: Device):
    def program(run: Run):
        x = two(run).requires_grad_()
        with run.offload():
            h = x * 2
            y = h.sin() * h.t().cos()
        with torch.no_grad():
            h.add_(1)
        with run.raising("backward", origin=False):
            y.sum().backward()

    assert_same_gradients(program, device=device_under_test)


# ---- one storage, one record ----


def test_a_wrapper_and_its_transpose_move_once(device_under_test: Device):
    def program(run: Run):
        x = two(run).requires_grad_()
        with run.offload():
            h = x.exp()
            y = (h @ h.t()).sin()
        y.sum().backward()
        return halves(x.grad)

    # h, and its product.
    assert_same_gradients(program, device=device_under_test, moved_bytes=2 * 2 * NBYTES)


def test_parts_of_a_wrapper_move_as_the_one_buffer_they_are_in(device_under_test: Device):
    def program(run: Run):
        x = TwoTensor(run.tensor(32, 96), run.tensor(32, 96)).requires_grad_()
        with run.offload():
            query, key, value = (x * 2).chunk(3, dim=-1)
            y = (query * key * value).sum()
        y.backward()
        return halves(x.grad)

    # The buffer of all three, and the product of two.
    assert_same_gradients(program, device=device_under_test, moved_bytes=2 * (96 + 32) * 32 * 4)


def test_a_plain_tensor_and_wrappers_around_it_move_once(device_under_test: Device):
    """As at the edge of a tensor-parallel region: each of the layers wraps the input anew."""

    def program(run: Run):
        x = run.leaf(32, 32)

        def look(wrapped: TwoTensor) -> torch.Tensor:
            run.check(kind=type(wrapped).__name__)
            return wrapped.a

        with run.offload():
            h = x.exp()
            y = Save.apply(h, look, TwoTensor(h, h))
            y = Save.apply(y, look, TwoTensor(h, h))
            y = Save.apply(y, lambda plain: plain, h)
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=NBYTES)


def test_inner_tensors_keep_their_offsets_whatever_they_share_a_record_with(device_under_test: Device):
    """A wrapper may compare its parts' offsets: one is in a record of another save, the other alone in its storage."""

    def program(run: Run):
        x, first, second = run.leaf(2, 32), run.tensor(32, 32), run.tensor(32, 32)

        def look(wrapped: TwoTensor) -> torch.Tensor:
            run.check(offsets=[part.storage_offset() for part in halves(wrapped)])
            return wrapped.a + wrapped.b

        with run.offload():
            y = Save.apply(x, lambda plain: plain[:2], first)
            y = Save.apply(y, look, TwoTensor(first[3:5], second[3:5]))
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=2 * NBYTES)


# ---- parameters and marks ----


@pytest.mark.parametrize("alias", ["detached", "inner", "rewrapped"])
def test_aliases_of_a_parameter_made_of_a_wrapper_never_move(device_under_test: Device, alias: str):
    aliases = {
        "detached": lambda weight: weight.detach(),
        "inner": lambda weight: weight.a,
        "rewrapped": lambda weight: TwoTensor(weight.b, weight.a),
    }

    def program(run: Run):
        weight, x = nn.Parameter(two(run)), run.leaf(32, 32)
        with run.offload():
            y = Save.apply(x, lambda *_: None, weight)
            y = Save.apply(y, lambda saved: getattr(saved, "a", saved), aliases[alias](weight))
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=0, kept_reason="parameter")


def test_a_wrapper_among_the_buffers_of_a_given_model_never_moves(device_under_test: Device):
    def program(run: Run):
        model, x = nn.Linear(1, 1), two(run).requires_grad_()
        model.register_buffer("table", two(run))
        with run.offload(model=model):
            y = x * model.table
        y.sum().backward()
        return halves(x.grad)

    assert_same_gradients(program, device=device_under_test, moved_bytes=0, kept_reason="parameter")


def test_a_wrapper_that_is_marked_never_moves(device_under_test: Device):
    def program(run: Run):
        x = two(run).requires_grad_()
        torchoffload.never_offload(x)
        with run.offload():
            y = x.sin()
        y.sum().backward()
        return halves(x.grad)

    assert_same_gradients(program, device=device_under_test, moved_bytes=0, kept_reason="marked")
