"""What is saved for code of the user's comes back with its storage and its offset: as_strided counts from the storage.

A formula of PyTorch's own looks at no offset. So of a small view that an operator saves the span alone moves.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torchoffload
from devices import Device
from functions import Save
from gradients import Run, assert_same_gradients
from selective import selective

BIG_BYTES = 64 * 4
BEFORE_THE_VIEW, BEHIND_THE_VIEW = 4, 50


def placed(tensor: torch.Tensor) -> dict[str, Any]:
    """Where a tensor stands in its storage, and all that the storage holds."""
    storage = tensor.untyped_storage()
    everything = tensor.as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
    return {"offset": tensor.storage_offset(), "nbytes": storage.nbytes(), "bytes": everything}


def strided(view: torch.Tensor, offset: int) -> torch.Tensor:
    """Four elements that are counted from the beginning of the storage, and lie outside of the view."""
    return view.as_strided((4,), (1,), offset)


class Strided(torch.autograd.Function):
    """weight * strided(view, offset), whose backward takes the view apart again."""

    @staticmethod
    def forward(ctx: Any, view: torch.Tensor, weight: torch.Tensor, offset: int) -> torch.Tensor:
        ctx.save_for_backward(view)
        ctx.offset = offset
        return strided(view, offset) * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (view,) = ctx.saved_tensors
        return None, strided(view, ctx.offset) * gradient, None


class StridedInTwoParts(Strided):
    """The same, with setup_context."""

    generate_vmap_rule = True

    @staticmethod
    def forward(view: torch.Tensor, weight: torch.Tensor, offset: int) -> torch.Tensor:
        return strided(view, offset) * weight

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.offset = inputs[2]


@torch.library.custom_op("torchoffload_tests::strided", mutates_args=())
def strided_operator(view: torch.Tensor, weight: torch.Tensor, offset: int) -> torch.Tensor:
    return strided(view, offset) * weight


strided_operator.register_autograd(StridedInTwoParts.backward, setup_context=StridedInTwoParts.setup_context)

SAVERS: dict[str, Callable[..., torch.Tensor]] = {
    "function": Strided.apply,
    "setup-context": StridedInTwoParts.apply,
    "library": strided_operator,
}


@pytest.mark.parametrize("offset", [BEFORE_THE_VIEW, BEHIND_THE_VIEW])
@pytest.mark.parametrize("saver", SAVERS)
def test_a_backward_reaches_outside_of_the_view_that_it_saved(device_under_test: Device, saver: str, offset: int):
    def program(run: Run):
        weight, big = run.leaf(4), run.tensor(64)
        with run.offload():
            y = SAVERS[saver](big[8:18], weight, offset)
        del big
        y.sum().backward()
        return weight.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=BIG_BYTES)


def test_offset_and_storage_come_back_as_they_were(device_under_test: Device):
    def program(run: Run):
        x, big = run.leaf(4), run.tensor(64)
        with run.offload():
            y = Save.apply(x, lambda *views: run.check(views=[placed(view) for view in views]), big[8:18], big[40:])
            z = Save.apply(y, lambda view: run.check(again=placed(view)), big[8:18])
        del big
        run.check(read_outside_backward=[placed(view) for view in z.grad_fn.saved_tensors])
        z.sum().backward()

    assert_same_gradients(program, device=device_under_test, moved_bytes=BIG_BYTES)


@pytest.mark.parametrize("order", [("operator", "function"), ("function", "operator")], ids="-".join)
def test_a_record_of_a_smaller_span_stands_for_no_view_of_a_function(device_under_test: Device, order: tuple[str, str]):
    """Both orders: the operator's span moves alone where it comes first, and joins the whole where it comes second."""

    def program(run: Run):
        weight, big = run.leaf(10), run.tensor(64)
        view = big[8:18]
        with run.offload():
            results = {
                name: weight * view if name == "operator" else Strided.apply(view, weight[:4], BEHIND_THE_VIEW)
                for name in order
            }
        del big, view
        (results["operator"].sum() + results["function"].sum()).backward()
        return weight.grad

    span_bytes = 10 * 4 if order[0] == "operator" else 0
    assert_same_gradients(program, device=device_under_test, moved_bytes=span_bytes + BIG_BYTES)


@pytest.mark.parametrize("joined", [False, True], ids=["alone", "beside-another-save"])
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_what_a_checkpoint_computes_again_reaches_outside_of_its_input(
    device_under_test: Device, use_reentrant: bool, joined: bool
):
    def program(run: Run):
        weight, big = run.leaf(10), run.tensor(64)
        view = big[8:18]

        def block(view: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return strided(view, BEHIND_THE_VIEW) * weight[:4].sin()

        with run.offload():
            other = weight.cos() * view if joined else weight
            y = checkpoint(block, view, weight, use_reentrant=use_reentrant)
        del big, view
        (y.sum() + other.sum()).backward()
        return weight.grad

    assert_same_gradients(program, device=device_under_test)


@torch.library.custom_op("torchoffload_tests::part_of_a_buffer", mutates_args=())
def part_of_a_buffer(x: torch.Tensor) -> torch.Tensor:
    """A small view of a new storage that nobody else has."""
    return x.repeat(16)[8:18].sin_()


part_of_a_buffer.register_autograd(
    lambda ctx, gradient: torch.nn.functional.pad(gradient, (0, 22)) * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


def test_what_a_selective_checkpoint_saved_keeps_its_offset(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32)

        def block(x: torch.Tensor) -> torch.Tensor:
            part = part_of_a_buffer(x)
            return strided(part.detach(), BEHIND_THE_VIEW) * x[:4].exp() + part[:4]

        context_fn = selective(run, [torch.ops.torchoffload_tests.part_of_a_buffer.default])
        with run.offload():
            y = checkpoint(block, x * 2, use_reentrant=False, context_fn=context_fn)
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=32 * 4 + 16 * 32 * 4)


def test_a_compiled_region_reaches_outside_of_its_input(device_under_test: Device):
    def program(run: Run):
        weight, big = run.leaf(4), run.tensor(64)
        function = torch.compile(
            lambda view, weight: (strided(view, BEHIND_THE_VIEW) * weight).sin(), backend="aot_eager"
        )
        with run.offload():
            y = function(big[8:18], weight)
        del big
        y.sum().backward()
        return weight.grad

    assert_same_gradients(program, device=device_under_test)


def test_the_inputs_of_chosen_modules_keep_their_offsets(device_under_test: Device):
    """A candidate is moved after the operator that saved it: what it is for is asked at the save."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, view: torch.Tensor) -> torch.Tensor:
            return Strided.apply(view, self.weight.sin(), BEHIND_THE_VIEW)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def forward(self, big: torch.Tensor) -> torch.Tensor:
            view = big[8:18]
            before = Strided.apply(view, self.layer.weight, BEFORE_THE_VIEW)
            return before + self.layer(view)

    def program(run: Run):
        model = run.module(Model)
        if not run.stock:
            options = {"tier": device_under_test.tier, "min_offload_size": 0, "offload_window_bytes": 0}
            torchoffload.offload_modules(model, "layer", only_inputs=True, learn=False, **options)
        y = model(run.tensor(64))
        y.sum().backward()
        return model

    assert_same_gradients(program, device=device_under_test, moved_bytes=BIG_BYTES, min_moved_fraction=0.5)


def test_an_operator_of_torch_ops_may_be_a_function_in_cpp(device_under_test: Device):
    """One of PyTorch's own stands for it here: both come through torch.ops, and its whole storage moves."""

    def program(run: Run):
        weight, big = run.leaf(10), run.tensor(64)
        with run.offload():
            y = torch.ops.aten.mul(weight, big[8:18])
            z = torch.ops.aten.mul.Tensor(y, big[8:18])
        del big
        run.check(place=placed(y.grad_fn._saved_other))
        z.sum().backward()
        return weight.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=BIG_BYTES)


def test_a_function_under_vmap_reaches_outside_of_its_view(device_under_test: Device):
    """The other transforms of torch.func refuse every saved-tensor hook."""

    def program(run: Run):
        weight, big = run.leaf(4), run.tensor(64)
        view = big[8:18]
        with run.offload():
            base = weight.exp()
            y = torch.func.vmap(lambda row: StridedInTwoParts.apply(view, row, BEHIND_THE_VIEW).sin())(
                base.expand(3, 4)
            )
        del big
        y.sum().backward()
        return weight.grad

    assert_same_gradients(program, device=device_under_test)
