"""fit on the zoo: models of many kinds that it was not built on, as a user would train them."""

import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import torchoffload
from devices import Device
from fitted_models import options_of

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from zoo_models import ZOO, make_zoo_model

pytest.importorskip("transformers")
pytestmark = pytest.mark.devices("disk")

MOST_STEPS = 16  # 12 until settled, and a few that follow the plan
MORE_STEPS = {"graph_network": 24}  # its survey may take 12: the blocks are chosen anew, and the sizes of steps differ
SHARES = (0.0, 0.5, 1.0) if os.environ.get("TORCHOFFLOAD_TEST_LONG") else (0.0, 0.5)


def train(name: str, options: dict[str, Any] | None, memory: int | None = None) -> tuple[list[Any], Any]:
    """Train a tiny model, as it is or fitted. Returns each step's loss and gradients, the end, and the handle."""
    made = make_zoo_model(name, "tiny", torch.device("cpu"))
    torch.manual_seed(3)
    random.seed(3)
    fitted = None if options is None else torchoffload.fit(made.model, memory or 1 << 50, **options)
    if fitted is not None:
        fitted.trained = made  # the handle holds the model weakly
    seen: list[Any] = []
    for step in range(MORE_STEPS.get(name, MOST_STEPS)):
        loss = made.loss(step)
        loss.backward()
        gradients = [None if each.grad is None else each.grad.clone() for each in made.model.parameters()]
        seen.append((loss.detach(), gradients))
        if made.optimizer is not None:
            made.optimizer.step()
        made.model.zero_grad()
    seen.append((torch.rand(1), [each.detach().clone() for each in (*made.model.parameters(), *made.model.buffers())]))
    return seen, fitted


def assert_same(stock: list[Any], ours: list[Any]) -> None:
    for step, (expected, found) in enumerate(zip(stock, ours, strict=True)):
        assert torch.equal(expected[0], found[0]), f"the loss of step {step}"
        for number, (one, other) in enumerate(zip(expected[1], found[1], strict=True)):
            assert (one is None) == (other is None), (step, number)
            assert one is None or torch.equal(one, other), (step, number)


@pytest.mark.parametrize("name", ZOO)
def test_a_model_of_the_zoo_is_fitted_bit_for_bit(name: str, device_under_test: Device) -> None:
    """With all memory, and with shares of the way from the least memory to that of the plain step."""
    stock, _ = train(name, None)
    options = options_of(device_under_test)
    free, fitted = train(name, options)
    with fitted:
        assert_same(stock, free)
        assert fitted.phase == "settled", fitted.report()
        points = fitted.frontier()
        low, high = points[0].memory_bytes, points[-1].memory_bytes
    for share in SHARES:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ours, fitted = train(name, options, int((low + (high - low) * share) / (1 - 0.04)) + 1)
        with fitted:
            assert_same(stock, ours)
            assert fitted.phase == "settled", f"{share}: {fitted.report()}"
