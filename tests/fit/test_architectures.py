"""fit on a tiny model of each architecture that transformers has: the bits of stock, whatever the plan.

Every 24th architecture, and all of them if TORCHOFFLOAD_TEST_LONG is set.
"""

import os
import warnings

import pytest
import torch

import torchoffload
from architectures import NotMade, make_architecture, model_types
from devices import Device
from fitted_models import options_of

pytest.importorskip("transformers")
pytestmark = [pytest.mark.devices("disk"), pytest.mark.slow]

STEPS = 8
_PARTS = 24


def trained(model_type: str, device: Device | None, share: float | None = None) -> list[torch.Tensor]:
    """Return the losses and gradients of some steps, and the buffers and the random state after them."""
    made = make_architecture(model_type)
    torch.manual_seed(3)
    fitted = None if device is None else torchoffload.fit(made.model, 1 << 50, on_unfit="warn", **options_of(device))
    seen = []
    for step in range(STEPS):
        loss = made.loss()
        loss.backward()
        seen += [loss.detach(), *(each.grad.clone() for each in made.model.parameters() if each.grad is not None)]
        made.model.zero_grad()
        if fitted is None or share is None or step < STEPS // 2 or fitted.phase == "survey":
            continue  # there is a second survey, and a later end, if a dry run was wrong
        if points := fitted.frontier():
            low, high = points[0].memory_bytes, points[-1].memory_bytes
            fitted.replan(int((low + (high - low) * share) / 0.96) + 1)
            share = None
    seen += [each.detach().clone() for each in made.model.buffers()]
    if fitted is not None:
        fitted.remove()
    return [*seen, torch.rand(2)]


@pytest.mark.parametrize("part", range(0, _PARTS, 1 if os.environ.get("TORCHOFFLOAD_TEST_LONG") else 24))
def test_each_architecture_of_transformers_has_the_bits_of_stock(part: int, device_under_test: Device) -> None:
    compared, wrong = 0, []
    for number, model_type in enumerate(model_types()):
        if number % _PARTS != part:
            continue
        try:
            stock, again = trained(model_type, None), trained(model_type, None)
        except NotMade:
            continue
        if not all(torch.equal(one, other) for one, other in zip(stock, again, strict=True)):
            continue  # not the same bits twice in stock
        compared += 1
        for share in (None, 0.0):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    ours = trained(model_type, device_under_test, share)
            except Exception as error:
                wrong.append(f"{model_type}: {type(error).__name__}: {str(error)[:200]}")
                continue
            same = len(stock) == len(ours) and all(map(torch.equal, stock, ours))
            wrong += [] if same else [f"{model_type}: other bits at {share}"]
    assert not wrong, "\n".join(wrong)
    assert compared >= 5
