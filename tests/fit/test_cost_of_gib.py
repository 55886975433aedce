"""The report of a fitted model sets the time that the step computes for each GiB beside the link's."""

import re

import pytest
import torch

import torchoffload
from devices import Device
from fitted_models import Model, options_of
from planned_blocks import BLOCKS, WIDTH

pytestmark = pytest.mark.devices("disk")


def report_of(device: Device, **more: object) -> str:
    model = Model(BLOCKS["transformer"])
    with torchoffload.fit(model, "1GiB", **options_of(device), **more) as handle:
        for _ in range(16):
            model(torch.randn(4, 8, WIDTH)).backward()
        return handle.report()


def test_it_says_what_a_gib_costs(device_under_test: Device, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torchoffload._observe.cost._LEAST_BYTES", 1)
    found = re.search(
        r"computes (\d+) ms for each GiB that it saves, and the link takes (\d+) ms for it, out and back\.",
        report_of(device_under_test),
    )
    assert found is not None
    assert int(found[1]) > 0


def test_a_step_that_saves_little_says_nothing_of_it(device_under_test: Device):
    assert "for each GiB" not in report_of(device_under_test)


def test_without_a_link_nothing_is_said(device_under_test: Device, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torchoffload._observe.cost._LEAST_BYTES", 1)
    assert "for each GiB" not in report_of(device_under_test, move=False)
