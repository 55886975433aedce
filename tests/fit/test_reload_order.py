"""The order in which a planned block's bytes come back: as the recomputation and the backward ask for them."""

import dataclasses

import pytest
import torch
from torch import nn

from devices import Device
from planned_blocks import corners
from torchoffload._fit.block.blocks import plan_block

testing = pytest.importorskip("torchoffload._C_testing", reason="it is reached through the test build alone").testing

pytestmark = pytest.mark.devices("simulated-late", "simulated-early")

WIDTH, ROWS = 16, 32
UNIT = WIDTH * ROWS * 4  # bytes of a block's input; each product is so many times as wide that it is known by its size
PRODUCTS = ((2, 3), (4, 5), (6, 7))


class Widening(nn.Module):
    """Three products, of which the first two are wider than the input."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        widths = ((1, first), (first, second), (second, 1))
        self.layers = nn.ModuleList(nn.Linear(w * WIDTH, v * WIDTH, bias=False) for w, v in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layers
        return x + third(torch.sin(second(torch.sin(first(x)))))


def reloads(device: Device, window: int) -> list[int]:
    """What is copied back, in units and in the order of the copies. Each of three blocks moves input and products."""
    with device.scope():
        blocks = nn.Sequential(*(Widening(*products) for products in PRODUCTS))
        x = torch.randn(ROWS, WIDTH)
        plan = corners(blocks[0], x.clone().requires_grad_())[0].plan
        products = [number for number, each in enumerate(plan.operators) if str(each) == "aten.mm.default"]
        kept = frozenset(products[:2])
        for block in blocks:
            plan_block(block, dataclasses.replace(plan, kept=kept, moved=kept, skipped=frozenset()))
        leaf = x.clone().requires_grad_()
        with device.context(offload_window_bytes=0, reload_window_bytes=window * UNIT):
            loss = blocks(leaf).sum()
        testing.start_seam_log()
        try:
            loss.backward()
        finally:
            testing.stop_seam_log()
        copies = [line for line in testing.seam_log() if line.startswith("copy_in")]
        return [int(line.split()[-1]) // UNIT for line in copies]


def test_without_a_window_each_copy_is_made_as_it_is_asked_for(device_under_test: Device):
    """What was moved, from the last one on, is enough to make the rest again. Then backward asks for the input."""
    assert reloads(device_under_test, 0) == [7, 6, 1, 5, 4, 1, 3, 2, 1]


@pytest.mark.parametrize("window", [1, 3, 5, 7, 9, 13, 14, 24, 100])
def test_each_copy_is_made_once(device_under_test: Device, window: int):
    found = reloads(device_under_test, window)
    assert sorted(found) == [1, 1, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("window", [1, 3, 5, 7, 9, 13, 14, 24, 100])
def test_what_a_block_needs_comes_before_what_an_earlier_one_needs(device_under_test: Device, window: int):
    found = reloads(device_under_test, window)
    places = {each: place for place, each in enumerate(found) if each > 1}
    assert max(places[7], places[6]) < min(places[5], places[4])
    assert max(places[5], places[4]) < min(places[3], places[2])
