"""A tensor changed after it was saved raises autograd's own error: the same type, the same text, early and late."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from devices import Device
from functions import Save
from gradients import Run, assert_same_gradients

# The ways to change a saved tensor that bump its version.
CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda tensor: tensor.add_(1),
    "no-grad": lambda tensor: torch.no_grad()(tensor.mul_)(2),
    "detached": lambda tensor: tensor.detach().zero_(),
    "view": lambda tensor: tensor.view(-1)[5:7].zero_(),
    "transposed-view": lambda tensor: torch.no_grad()(tensor.t().add_)(1),
    "setitem": lambda tensor: tensor.__setitem__(0, 3.0),
    "copy_": lambda tensor: tensor.copy_(tensor.detach() + 1),
    "twice": lambda tensor: tensor.add_(1).mul_(2),
}


def change_and_run_backward(run: Run, make: Callable, change: Callable, when: str, **options):
    """Saves through `make`, which returns (what to change, output), changes it, and runs backward."""
    x = run.leaf(32, 32)
    with run.offload(**options):
        changed, y = make(x)
        if when == "early":
            change(changed)  # the copy has not begun
        y = y.exp()
        if when == "late-inside":
            for _ in range(8):
                y = y.sigmoid()
            change(changed)  # by now the copy is out
    if when == "late":
        change(changed)
    with run.raising("error"):
        y.sum().backward()
    run.check(gradient=x.grad)
    with run.offload(**options):  # a later step is right
        z = x.exp().sin()
    z.sum().backward()
    return x.grad


def input_of_sin(x: torch.Tensor):
    a = x * 2
    return a, a.sin()


def result_of_exp(x: torch.Tensor):
    y = x.exp()
    return y, y * 1.0


def view_saved(x: torch.Tensor):
    a = x * 2
    a.view_held = a.t()
    return a, a.view_held.sin()


def temporary_view_saved(x: torch.Tensor):
    a = x * 2
    return a, a.t().sin()


@pytest.mark.parametrize("when", ["early", "late-inside", "late"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_moved_tensor_changed_after_saving(device_under_test: Device, change: str, when: str):
    assert_same_gradients(
        lambda run: change_and_run_backward(run, input_of_sin, CHANGES[change], when), device=device_under_test
    )


@pytest.mark.parametrize("make", [result_of_exp, view_saved, temporary_view_saved])
@pytest.mark.parametrize("change", ["add_", "no-grad", "view"])
def test_a_moved_result_or_view_changed_after_saving(device_under_test: Device, change: str, make: Callable):
    assert_same_gradients(
        lambda run: change_and_run_backward(run, make, CHANGES[change], "late"), device=device_under_test
    )


@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize("change", ["add_", "no-grad", "view"])
@pytest.mark.parametrize("make", [input_of_sin, result_of_exp, view_saved, temporary_view_saved])
def test_a_kept_tensor_changed_after_saving(device_under_test: Device, make: Callable, change: str, when: str):
    assert_same_gradients(
        lambda run: change_and_run_backward(run, make, CHANGES[change], when, min_offload_size=1 << 20),
        device=device_under_test,
        moved_bytes=0,
        kept_reason="small",
    )


@pytest.mark.parametrize("change", ["no-grad", "detached"])
@pytest.mark.parametrize("moved", [True, False], ids=["moved", "kept"])
def test_a_leaf_changed_after_saving(device_under_test: Device, change: str, moved: bool):
    def program(run: Run):
        options = {} if moved else {"min_offload_size": 1 << 20}
        x = run.leaf(32, 32)
        with run.offload(**options):
            y = x.sin()
        CHANGES[change](x)
        with run.raising("error"):
            y.sum().backward()

    kept = {} if moved else {"kept_reason": "small"}
    assert_same_gradients(program, device=device_under_test, moved_bytes=4096 if moved else 0, **kept)


def test_a_parameter_changed_after_saving(device_under_test: Device):
    def program(run: Run):
        x, weight = run.leaf(16, 32), run.parameter(32, 32)
        with run.offload():
            y = torch.nn.functional.linear(x, weight)
        with torch.no_grad():
            weight.mul_(2)
        with run.raising("error"):  # linear saves weight.t(), which it does not hold
            y.sum().backward()

    assert_same_gradients(program, device=device_under_test, moved_bytes=2048, kept_reason="parameter")


def test_a_tensor_kept_by_a_no_op_manager_changed_after_saving(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload(), run.noop():
            a = x * 2
            y = a.sin()
            z = x.exp()
        a.add_(1)
        z.mul_(2)
        for output in (y, z):
            with run.raising("error"):
                output.sum().backward()
        with run.offload():
            y = x.exp()
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=4096)


def test_a_change_that_autograd_allows_is_allowed(device_under_test: Device):
    """What is changed was not saved: relu_ saves its result, add_ and dropout_ save no argument."""

    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            y = functional.relu_(x * 2)
            z = (x * 3).add_(1).mul_(2).exp()
            w = functional.dropout(x * 4, 0.5, inplace=True)
        (y.sum() + z.sum() + w.sum()).backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test)


def test_in_place_operators_that_save_their_own_result(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            y = (x * 2).exp_().sigmoid_().tanh_()  # each changes what the one before saved
        with run.raising("error"):
            y.sum().backward()

    assert_same_gradients(program, device=device_under_test)


def test_a_chain_of_in_place_operators_with_nothing_lost(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            y = torch.relu_(x.clone().add_(0.5)) * 3
            buffer = torch.zeros_like(x)
            buffer[:16] = y[:16].exp()
            buffer[16:] = y[16:].sin()
            z = buffer.tanh()
        z.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test)


def test_a_change_between_two_saves_fails_only_the_first(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            a = x * 2
            first = a.sin()
            x.exp()  # the copy of a leaves here
            a.detach().add_(1)
            second = a.sin()
        second.sum().backward(retain_graph=True)
        run.check(second=x.grad)
        with run.raising("first"):
            first.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test)


def test_a_custom_function_that_marks_dirty(device_under_test: Device):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            ctx.save_for_backward(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return gradient * x

    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            y = Double.apply(x.clone()).exp()
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test)


def test_a_tensor_changed_by_the_optimizer_between_backwards(device_under_test: Device):
    def program(run: Run):
        x, weight = run.leaf(16, 32), run.leaf(32, 32)  # a leaf that is no Parameter: it moves
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        with run.offload():
            loss = (x @ weight).square().sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with run.raising("second"):
            loss.backward()
        return x.grad, weight

    assert_same_gradients(program, device=device_under_test)


def test_set_data_after_saving(device_under_test: Device):
    """`.data =` gives the tensor another storage; what was saved is the old one, in both."""

    def program(run: Run):
        x, base = run.leaf(4), run.tensor(32, 32)
        with run.offload():
            y = Save.apply(x, lambda unpacked: run.check(shape=unpacked.shape), base)
            z = x.exp()
        base.data = run.tensor(32, 32)
        with run.raising("backward"):
            (y + z).sum().backward()

    assert_same_gradients(program, device=device_under_test, moved_bytes=4096 + 16)
