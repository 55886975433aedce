"""Blocks that could not be computed again in the backward of a fitted model: an error, then another plan."""

import copy

import pytest
import torch
from torch import nn

import torchoffload
from devices import Device
from fitted_models import options_of
from models import Block
from planned_blocks import WIDTH

pytestmark = pytest.mark.devices("disk")


class Shifted(nn.Module):
    """Reads a parameter by an operator that saves nothing, so that autograd does not mind if it is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.zeros(4 * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x) + self.shift))


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(16, 8, WIDTH)).square().mean()


def shift(model: nn.Module) -> None:
    with torch.no_grad():
        for block in model:
            if isinstance(block, Shifted):
                block.shift.add_(0.125)


def test_a_refusal_under_a_settled_plan_is_an_error_once_and_the_kind_is_kept_from_then_on(device_under_test: Device):
    model = nn.Sequential(*(make() for _ in range(3) for make in (Shifted, Block)))
    options = options_of(device_under_test) | {"move": False}
    with torchoffload.fit(model, "1GiB", **options) as handle:
        for _ in range(8):
            loss_of(model).backward()
        points = handle.frontier()
        handle.replan(int(points[0].memory_bytes / 0.96) + 1)
        for _ in range(16):
            loss_of(model).backward()
        assert handle.plan.recompute_s > 0
        assert handle.phase == "settled"
        loss = loss_of(model)
        shift(model)
        with pytest.raises(RuntimeError, match=r"the parameter shift of shape \(128,\) of a Shifted was written to"):
            loss.backward()
        handle.replan("1GiB")
        for _ in range(16):
            model.zero_grad()
            stock = copy.deepcopy(model)
            torch.manual_seed(1)
            loss = loss_of(model)
            torch.manual_seed(1)
            expected = loss_of(stock)
            shift(model)
            expected.backward()
            loss.backward()
            for own, other in zip(model.parameters(), stock.parameters(), strict=True):
                assert torch.equal(own.grad, other.grad)
        assert handle.phase == "settled"
        assert "the parameter shift of shape (128,) of a Shifted was written to" in handle.report()
