"""What fit tells of itself while it works: one line of the log as each phase begins, and its text in repr()."""

import logging
import re
from typing import Any

import pytest
import torch

import torchoffload
from devices import Device
from fitted_models import Model, options_of
from planned_blocks import BLOCKS, WIDTH

DOES = r"(nothing moves and nothing is computed again|\d calls of blocks compute something again, \d move something)"

pytestmark = pytest.mark.devices("disk")


def train(model: Any, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(4, 8, WIDTH)).backward()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert {(record.name, record.levelname) for record in caplog.records} <= {("torchoffload", "INFO")}
    told = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return told


def test_each_phase_is_one_line_of_the_log(device_under_test: Device, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="torchoffload")
    model = Model(BLOCKS["transformer"])
    with torchoffload.fit(model, "1GiB", blocks="net.blocks.*", **options_of(device_under_test)) as handle:
        train(model, 16)
        survey, trials, settled = lines(caplog)
        begins = r"^fit: Model, 4 blocks \(net\.blocks\.\*\): "
        assert re.match(begins + "the survey begins: the first steps run in the least memory and are measured$", survey)
        predicted = r"predicted [\d.]+ ms a step and [\d.]+ [KM]iB at the peak"
        assert re.match(begins + rf"trials begin: .* The first one: {predicted}$", trials)
        ends = rf"settled after \d+ steps: {predicted}, measured [\d.]+ ms; {DOES}$"
        assert re.match(begins + ends, settled)
        handle.replan(int(handle.frontier()[0].memory_bytes / 0.96) + 1)
        train(model, 16)
        trials, settled = lines(caplog)
        assert "trials begin" in trials
        assert re.search(rf"; {DOES}$", settled)
        with pytest.raises(torch.OutOfMemoryError):
            handle.replan(sum(each.numel() * each.element_size() for each in model.parameters()))
    assert "least memory: no plan fits" in lines(caplog)[0]


def test_repr_has_the_phase_the_step_of_it_and_the_blocks(device_under_test: Device):
    model = Model(BLOCKS["transformer"])
    with torchoffload.fit(model, "1GiB", blocks=["first", "net.blocks.*"], **options_of(device_under_test)) as handle:
        assert repr(handle) == "Fitted(Model, 5 blocks (first, net.blocks.*), survey, step 1)"
        seen = []
        for _ in range(16):
            train(model, 1)
            seen.append(repr(handle))
        assert seen[1] == "Fitted(Model, 5 blocks (first, net.blocks.*), survey, step 2)"
        assert any(re.search(rf", trials, step 1: {DOES}\)$", each) for each in seen)
        assert re.search(rf", settled, step \d+: {DOES}\)$", seen[-1])
        steps = [int(each.partition("step ")[2].partition(":")[0]) for each in seen if ", settled" in each]
        assert steps == list(range(1, len(steps) + 1))
    assert repr(handle) == "Fitted(Model, 5 blocks (first, net.blocks.*), removed)"
