"""The module that a step begins with: the innermost one around its first block."""

import random
import weakref

import pytest
import torch
from torch import nn

from fitted_models import fitted_on
from planned_blocks import BLOCKS, WIDTH
from simulated_allocator import SimulatedAllocator
from torchoffload._fit.model.openers import Openers


class Pair(nn.Module):
    """Two networks inside of a module that a loop may call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.left, self.inner.right = nn.Sequential(nn.Linear(1, 1)), nn.Sequential(nn.Linear(1, 1))


def begun(openers: Openers, *entered: nn.Module, has_block: bool = True) -> tuple[nn.Module | None, bool]:
    """Return the opener, as far as it is known, and whether it is certain, of a step that enters these modules."""
    outer, *inside = map(weakref.ref, entered)
    found = openers.call_begins(outer)
    for each in inside:
        if openers.is_sure:
            break
        found = openers.enters(each) or found
    is_sure = openers.is_sure
    if has_block and not is_sure:
        openers.block_begins()
    return None if found is None else found(), is_sure


def test_the_first_step_begins_with_the_innermost_module_that_is_entered():
    pair, openers = Pair(), Openers()
    assert begun(openers, pair, pair.inner, pair.inner.left) == (pair.inner.left, False)


def test_a_module_around_known_openers_is_taken_for_the_one_that_it_was_before():
    pair, openers = Pair(), Openers()
    left, right = pair.inner.left, pair.inner.right
    openers.known = [weakref.ref(left), weakref.ref(right)]
    assert begun(openers, pair, has_block=False) == (None, False)
    assert begun(openers, pair, pair.inner, right) == (right, True)
    assert begun(openers, pair, has_block=False) == (right, False)
    assert begun(openers, pair, pair.inner, left) == (left, True)
    assert begun(openers, pair, has_block=False) == (left, False)
    assert begun(openers, left) == (left, True)


def test_a_module_that_is_around_no_known_opener_is_a_new_one():
    pair, openers = Pair(), Openers()
    openers.known = [weakref.ref(pair.inner.left)]
    assert begun(openers, pair, pair.inner, pair.inner.right) == (pair.inner.right, True)


def test_blocks_that_stand_directly_in_a_module_around_known_openers_begin_with_that_module():
    pair, openers = Pair(), Openers()
    openers.known = [weakref.ref(pair.inner.left)]
    assert begun(openers, pair, pair.inner) == (None, False)
    assert begun(openers, pair, has_block=False) == (pair.inner, False)


def test_blocks_that_the_loop_calls_one_by_one_are_one_sort_of_steps():
    """Though it leaves some of them out, at random."""
    torch.manual_seed(0)
    rng, model, phases = random.Random(0), nn.Sequential(*(BLOCKS["transformer"]() for _ in range(6))), []
    with SimulatedAllocator() as allocator, fitted_on(model, allocator, 1 << 40) as handle:
        for _ in range(60):
            x = torch.randn(2, 8, WIDTH)
            for block in model:
                x = x if rng.random() < 0.3 else block(x)
            if x.requires_grad:
                x.sum().backward()
            phases.append(handle.phase)
        assert phases[-1] == "settled"
        assert "survey" not in phases[phases.index("settled") :], phases
        assert "Steps that begin with" not in handle.report()


class Encoded(nn.Module):
    """Blocks in a module of a module, which a program may replace as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x)).sum()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(BLOCKS["transformer"]() for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize("step", [1, 4, 16])
def test_steps_of_an_encoder_that_is_replaced_begin_with_the_new_one(step: int):
    torch.manual_seed(0)
    model = Encoded()
    with SimulatedAllocator() as allocator, fitted_on(model, allocator, 1 << 40) as handle:
        for number in range(step + 12):
            if number == step:
                model.encoder = Encoder()
            model(torch.randn(2, 8, WIDTH)).backward()
        assert handle.phase == "settled", handle.report()
        driver = handle._driver
        assert driver._opener() is model.encoder.layers
        assert [each() for each in driver._openers.known] == [model.encoder.layers]
        assert set(driver.names) == {*model.encoder.layers, model.head}
