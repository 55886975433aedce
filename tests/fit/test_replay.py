"""A call of a block that is recorded and replayed: what is named, held and made again, and what is refused."""

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from torchoffload._fit.block.blocks import plan_block, unplan_block
from torchoffload._fit.block.graph import BlockPlan, block_frontier
from torchoffload._fit.block.record import Recorder

WIDTH = 16
NOTHING_KEPT = BlockPlan(operators=())
Function = Callable[["Block", torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """Two linear layers with a function of the test's between them."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.function = function
        self.large = torch.ones(64, 300, WIDTH)  # no buffer, and too large to be copied when it is read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.function(self, self.up(x)))


def gradients(
    function: Function,
    plan: BlockPlan | None = NOTHING_KEPT,
    *,
    between: Callable[[Block], None] = lambda block: None,
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
) -> list[torch.Tensor]:
    """What a step leaves, with the program's doings between forward and backward; without a plan it is stock."""
    block = Block(function)
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).requires_grad_()
    if plan is not None:
        plan_block(block, plan)
    torch.manual_seed(1)
    loss = block(x).square().sum()
    between(block)
    backward(loss)
    found = [x.grad, *(each.grad for each in block.parameters()), *block.buffers(), torch.rand(1)]
    return [each.clone() for each in found]


def assert_as_stock(function: Function, plan: BlockPlan = NOTHING_KEPT, **doings: Any) -> None:
    stock, found = gradients(function, None, **doings), gradients(function, plan, **doings)
    assert [torch.equal(*pair) for pair in zip(stock, found, strict=True)] == [True] * len(stock)


def test_nothing_of_the_users_is_called_in_backward():
    calls = []

    def function(block: Block, h: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return torch.sin(h)

    assert_as_stock(function)
    assert len(calls) == 2  # stock's, and the planned block's


def test_what_was_read_is_what_it_was_though_python_changes_it():
    state = {"factor": 2.0}

    def change(_block: Block) -> None:
        state["factor"] += 1

    def function(block: Block, h: torch.Tensor) -> torch.Tensor:
        return torch.sin(h * state["factor"]) * random.Random(7).random()

    def step(plan: BlockPlan | None) -> list[torch.Tensor]:
        state["factor"] = 2.0
        return gradients(function, plan, between=change)

    assert all(map(torch.equal, step(None), step(NOTHING_KEPT)))


def switch_dtype(_block: Block) -> None:
    torch.set_default_dtype(torch.float32)


def test_switches_are_those_of_forward():
    def function(block: Block, h: torch.Tensor) -> torch.Tensor:
        torch.set_default_dtype(torch.float64)
        made = torch.ops.aten.full.default([WIDTH], 1 / 3)
        return torch.sin((h * made).float())

    try:
        assert_as_stock(function, between=switch_dtype)
    finally:
        torch.set_default_dtype(torch.float32)


def test_random_numbers_are_drawn_again_and_the_generator_goes_on_from_where_it_was():
    def draw(_block: Block) -> None:
        torch.rand(5)

    assert_as_stock(lambda block, h: functional.dropout(torch.sin(h), 0.4) * torch.rand_like(h), between=draw)


@pytest.mark.parametrize("wraps_loop", [False, True])
def test_functional_gradients_inside_of_a_block(wraps_loop: bool):
    """torch.func.grad allows no saved-tensor hooks: what is saved inside of it is held, and the rest is made again."""

    def energy(h: torch.Tensor) -> torch.Tensor:
        return (torch.sin(h) * h.exp()).sum()

    def function(block: Block, h: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(h)
        slope = torch.func.grad(lambda t: energy(block.down(t)))(h)
        products = (
            torch.func.vmap(torch.func.grad(energy))(h) if wraps_loop else torch.func.vjp(energy, h)[1](h.sum())[0]
        )
        return torch.sin(h * slope) + torch.cos(products)

    assert_as_stock(function)
    block = Block(function)
    plan_block(block, NOTHING_KEPT)
    with torch.autograd.graph.save_on_cpu(), pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
        block(torch.ones(4, WIDTH, requires_grad=True))


def test_a_small_buffer_that_is_written_to_before_backward_was_copied():
    def function(block: Block, h: torch.Tensor) -> torch.Tensor:
        return torch.sin(h + block.scale)  # autograd does not save it

    assert_as_stock(function, between=lambda block: block.scale.add_(1))


def test_a_parameter_that_is_written_to_before_backward_is_refused_by_name():
    def function(block: Block, h: torch.Tensor) -> torch.Tensor:
        return torch.sin(h)

    def write(block: Block) -> None:
        with torch.no_grad():
            block.up.bias.add_(1)  # autograd does not save it, but the recomputation reads it

    with pytest.raises(RuntimeError, match=r"the parameter up.bias of shape \(16,\) of a Block was written to after"):
        gradients(function, between=write)


def test_a_saved_tensor_that_is_written_to_is_autograds_own_error():
    def step(plan: BlockPlan | None) -> str:
        kept: list[torch.Tensor] = []

        def function(block: Block, h: torch.Tensor) -> torch.Tensor:
            kept.append(torch.exp(h))
            return kept[0]

        def write(_block: Block) -> None:
            with torch.no_grad():
                kept[0].add_(1)

        with pytest.raises(RuntimeError) as raised:
            gradients(function, plan, between=write)
        return str(raised.value)

    assert step(NOTHING_KEPT) == step(None)
    assert "modified by an inplace operation" in step(None)


def test_a_kept_value_that_is_written_to_and_that_nobody_saved_is_made_again():
    kept: list[torch.Tensor] = []

    def function(block: Block, h: torch.Tensor) -> torch.Tensor:
        kept.append((h + 1).detach())
        return torch.sin(h) * torch.cos(kept[-1] + 1)

    block = Block(function)
    with Recorder(block, ((torch.ones(4, WIDTH),), {})) as recorder:
        block(torch.ones(4, WIDTH))
    operators = tuple(call.operator for call in recorder.record.operators)
    plan = BlockPlan(operators=operators, kept=frozenset(range(len(operators))))
    assert_as_stock(function, plan, between=lambda block: kept[-1].mul_(3))


def test_what_is_written_to_by_the_block_itself_is_copied_before():
    def function(block: Block, h: torch.Tensor) -> torch.Tensor:
        large = block.large
        early = torch.sin(h.sum() + large).mean()
        large.mul_(2)
        return h * early * large.mean()

    assert_as_stock(function)


def test_what_a_later_call_writes_to_is_copied_for_the_earlier_one():
    def step(plan: BlockPlan | None) -> list[torch.Tensor]:
        def function(block: Block, h: torch.Tensor) -> torch.Tensor:
            h = torch.sin(h.sum() + shared).mean() * h
            if block is blocks[1]:
                shared.mul_(2)
            return torch.sin(h)

        shared = torch.ones(64, 300, WIDTH)
        blocks = [Block(function), Block(function)]
        x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).requires_grad_()
        for block in blocks if plan is not None else ():
            plan_block(block, plan)
        blocks[1](blocks[0](x)).sum().backward()
        return [x.grad, *(each.grad for block in blocks for each in block.parameters())]

    assert all(map(torch.equal, step(None), step(NOTHING_KEPT)))


def test_what_is_read_without_having_been_written_to_is_held():
    def function(block: Block, h: torch.Tensor) -> torch.Tensor:
        filled = torch.empty(WIDTH)
        filled.numpy()[:] = 2
        return torch.sin(h * filled)

    assert_as_stock(function)


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_of_gradients(create_graph: bool):
    def backward(loss: torch.Tensor) -> None:
        loss.backward(retain_graph=True, create_graph=create_graph)
        loss.backward()

    assert_as_stock(lambda block, h: torch.sin(h) * torch.exp(h), backward=backward)


def test_an_exception_in_forward_leaves_nothing_behind():
    class Stop(Exception):
        pass

    found: list[weakref.ref[torch.Tensor]] = []

    def function(block: Block, h: torch.Tensor) -> torch.Tensor:
        found.append(weakref.ref(torch.sin(h)))
        raise Stop

    block = Block(function)
    plan_block(block, NOTHING_KEPT)
    with pytest.raises(Stop):
        block(torch.ones(4, WIDTH, requires_grad=True))
    gc.collect()
    assert [each() for each in found] == [None]
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    block.function = lambda block, h: torch.sin(h)
    block(torch.ones(4, WIDTH, requires_grad=True)).sum().backward()
    unplan_block(block)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
@pytest.mark.parametrize("seed", range(6))
def test_recurrent_networks(kind: type[nn.RNNBase], seed: int):
    def step(planned: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = kind(WIDTH, WIDTH, 2, batch_first=True)
        x = torch.randn(3, 5, WIDTH, requires_grad=True)
        if planned:
            with Recorder(module, ((x,), {})) as recorder:
                module(x)
            operators = tuple(call.operator for call in recorder.record.operators)
            choice = random.Random(seed)
            kept = frozenset(number for number in range(len(operators)) if seed and choice.random() < 0.5)
            plan_block(module, BlockPlan(operators=operators, kept=kept))
        module(x)[0].square().sum().backward()
        return [x.grad, *(each.grad for each in module.parameters())]

    assert all(map(torch.equal, step(False), step(True)))


def test_batch_normalization_with_an_activation_in_place_has_plans_and_updates_its_statistics_once():
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3))

    x = torch.randn(2, 3, 9, 9)
    block = make()
    with Recorder(block, ((x,), {})) as recorder:
        block(x)
    corners = block_frontier(recorder.record)
    assert len(corners) > 1
    assert corners[0].kept_bytes == 0
    stock = make()
    stock(x).square().sum().backward()
    for corner in corners:
        block = make()
        plan_block(block, corner.plan)
        block(x).square().sum().backward()
        pairs = [*zip(stock.buffers(), block.buffers(), strict=True)]
        pairs += [(one.grad, other.grad) for one, other in zip(stock.parameters(), block.parameters(), strict=True)]
        assert all(torch.equal(*pair) for pair in pairs)
