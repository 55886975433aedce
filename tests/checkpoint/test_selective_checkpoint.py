"""selective_checkpoint_context_fn: as torch's own selective checkpoint, and what the policy saves moves."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import torchoffload
from devices import Device
from gradients import Run, assert_same_gradients
from models import Block
from selective import (
    HAS_CPU_OFFLOAD,
    NBYTES,
    PRODUCTS,
    aten,
    blocks,
    needs_cpu_offload,
    policy_of,
    selective,
    two_layers,
)

# ---- what moves ----


@pytest.mark.parametrize(
    "policy",
    [PRODUCTS, policy_of({aten.mm.default: True}), policy_of({aten.mm.default: "PREFER_SAVE"}, "MUST_RECOMPUTE")],
    ids=["list", "bool", "policy"],
)
def test_what_the_policy_saves_moves(device_under_test: Device, policy: Any):
    def program(run: Run):
        return blocks(run, policy)

    # The input of each block, of which the first is exp's result too, and two products in each.
    assert_same_gradients(program, device=device_under_test, moved_bytes=(3 + 6) * NBYTES)


@needs_cpu_offload
@pytest.mark.parametrize("name", ["MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD"])
def test_cpu_offload_policies_are_carried_out(device_under_test: Device, name: str):
    def program(run: Run):
        return blocks(run, policy_of({aten.mm.default: name}, "PREFER_RECOMPUTE"))

    assert_same_gradients(program, device=device_under_test, moved_bytes=(3 + 6) * NBYTES)


@needs_cpu_offload
@pytest.mark.parametrize("name", ["MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD"])
def test_only_what_is_marked_for_cpu_offload_moves(device_under_test: Device, name: str):
    policy = policy_of({aten.mm.default: "MUST_SAVE", aten.sin.default: name})

    def program(run: Run):
        return blocks(run, policy, **({} if run.stock else {"only_cpu_offload": True}))

    assert_same_gradients(program, device=device_under_test, moved_bytes=(3 + 3) * NBYTES)


def test_everything_saved_of_a_transformer_block(device_under_test: Device):
    """Several outputs, outputs that are no tensors, views of all kinds, and weights, which stay."""

    def program(run: Run):
        block, x = run.module(Block), run.leaf(2, 16, 32)
        context_fn = selective(run, policy_of({}, "PREFER_SAVE"))
        with run.offload():
            y = checkpoint(block, x.exp(), use_reentrant=False, context_fn=context_fn)
            loss = checkpoint(block, y, use_reentrant=False, context_fn=context_fn).square().sum()
        loss.backward()
        return x.grad, block

    assert_same_gradients(program, device=device_under_test)


def test_views_of_weights_are_made_again(device_under_test: Device):
    def program(run: Run):
        linear, x = run.module(lambda: nn.Linear(32, 32)), run.leaf(16, 32)
        context_fn = selective(run, [aten.t.default, aten.addmm.default])
        with run.offload():
            y = checkpoint(lambda x: linear(x).sin(), x, use_reentrant=False, context_fn=context_fn).exp()
        y.sum().backward()
        return x.grad, linear

    assert_same_gradients(program, device=device_under_test, moved_bytes=3 * NBYTES // 2)


def test_an_output_on_the_memory_of_another_is_saved_with_it(device_under_test: Device):
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        product = x.view(2, 16, 32) @ weight  # mm, then _unsafe_view
        return product.transpose(0, 1).sin().transpose(0, 1).reshape(32, 32)

    def program(run: Run):
        return blocks(run, [*PRODUCTS, aten._unsafe_view.default, aten.transpose.int], function=function)

    assert_same_gradients(program, device=device_under_test, moved_bytes=(3 + 3) * NBYTES)


def test_operators_with_several_outputs_and_with_numbers(device_under_test: Device):
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        values, places = (x @ weight).topk(32)
        first, *rest = F.layer_norm(values, (32,)).split(16)
        return torch.cat([first, *rest]) * places.max().item() + values.sum()

    def program(run: Run):
        chosen = [
            aten.topk.default,
            aten.native_layer_norm.default,
            aten.split.Tensor,
            aten._local_scalar_dense.default,
        ]
        return blocks(run, chosen, function=function)

    assert_same_gradients(program, device=device_under_test)


def test_wrapper_subclasses(device_under_test: Device):
    """Inner tensors move, and what is inside of a weight does not."""

    def program(run: Run):
        x = TwoTensor(run.tensor(32, 32), run.tensor(32, 32)).requires_grad_()
        weight = nn.Parameter(TwoTensor(run.tensor(32, 32), run.tensor(32, 32)))
        context_fn = selective(run, [aten.mm.default, aten.t.default])
        with run.offload():
            y = checkpoint(lambda x: two_layers(x, weight), x.exp(), use_reentrant=False, context_fn=context_fn)
            loss = y.sum()
        loss.backward()
        return [(each.grad.a, each.grad.b) for each in (x, weight)]

    assert_same_gradients(program, device=device_under_test, moved_bytes=2 * 3 * NBYTES)


def test_what_is_saved_leaves_the_device(device_under_test: Device):
    """What the memory at the loss is smaller by: every product, and the inputs of all blocks but the first."""
    away = []

    def program(run: Run):
        x, weight = run.leaf(256, 256), run.parameter(256, 256)
        context_fn = selective(run, PRODUCTS)
        with run.offload():
            y = x.sin()
            for _ in range(3):
                y = checkpoint(two_layers, y, weight, use_reentrant=False, context_fn=context_fn)
            loss = y.sum()
        if not run.stock:
            del y
            away.append(sum(tape.bytes_away for tape in torchoffload.stats().tapes))
            if run.simulation is not None:  # x, the parameter, and what the window of the seeded device may hold
                assert run.simulation.allocated_bytes() <= 3 * 256 * 256 * 4
        loss.backward()
        return x.grad, weight.grad

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=10 * 256 * 256 * 4)
    assert away[-1] >= 8 * 256 * 256 * 4
    assert stats.live_slots == 0


# ---- errors, which are stock's ----


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_second_backward_is_stocks_error(device_under_test: Device, early_stop: bool):
    def program(run: Run):
        x, weight = run.leaf(32, 32), run.parameter(32, 32)
        with run.offload(), set_checkpoint_early_stop(early_stop):
            loss = checkpoint(
                two_layers, x.exp(), weight, use_reentrant=False, context_fn=selective(run, PRODUCTS)
            ).sum()
        loss.backward(retain_graph=True)
        with run.raising("again"):
            loss.backward()
        return x.grad, weight.grad

    assert_same_gradients(program, device=device_under_test)


def change_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    product = x @ weight
    sine = product.sin()
    with torch.no_grad():
        product.detach().mul_(2)
    return sine.exp()


@pytest.mark.parametrize("operator", [aten.mm.default, aten.mul_.Tensor], ids=["of-another", "of-itself"])
def test_a_changed_saved_tensor_is_stocks_error(device_under_test: Device, operator: Any):
    def program(run: Run):
        with run.raising("changed"):
            blocks(run, [operator], function=change_product)

    assert_same_gradients(program, device=device_under_test)


def test_what_may_change_stays(device_under_test: Device):
    def program(run: Run):
        return blocks(run, PRODUCTS, function=change_product, allow_cache_entry_mutation=True)

    assert_same_gradients(program, device=device_under_test, moved_bytes=3 * NBYTES)


@needs_cpu_offload  # before, a recomputation could call what its forward had not
def test_another_recomputation_is_stocks_error(device_under_test: Device):
    def program(run: Run):
        calls: list[None] = []

        def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            calls.append(None)
            return (x.cos() if len(calls) > 1 else x.sin()) @ weight

        with run.raising("other"):
            blocks(run, PRODUCTS, count=1, function=function)

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5)


def test_a_policy_that_raises(device_under_test: Device):
    def policy(_context: Any, operator: Any, *_arguments: Any, **_keywords: Any) -> bool:
        if operator is aten.tanh.default:
            raise ValueError("not tanh")
        return operator is aten.mm.default

    def program(run: Run):
        blocks(run, policy)

    assert_same_gradients(program, device=device_under_test, may_raise=True)


@pytest.mark.parametrize("wrong", [3, [aten.mm], ["mm"]], ids=str)
def test_a_wrong_policy_is_stocks_error(wrong: Any):
    with pytest.raises((TypeError, ValueError)) as stock:
        create_selective_checkpoint_contexts(wrong)
    with pytest.raises(stock.type) as ours:
        torchoffload.selective_checkpoint_context_fn(wrong)
    assert str(ours.value) == str(stock.value)


@pytest.mark.parametrize("option", ["allow_cache_entry_mutation", "only_cpu_offload"])
def test_an_option_that_is_no_bool(option: str):
    with pytest.raises(TypeError, match=option):
        torchoffload.selective_checkpoint_context_fn(PRODUCTS, **{option: 1})


@pytest.mark.skipif(HAS_CPU_OFFLOAD, reason="CheckpointPolicy.MUST_CPU_OFFLOAD is there")
def test_only_cpu_offload_without_such_policies():
    with pytest.raises(ValueError, match=r"has no CheckpointPolicy\.MUST_CPU_OFFLOAD"):
        torchoffload.selective_checkpoint_context_fn(PRODUCTS, only_cpu_offload=True)
