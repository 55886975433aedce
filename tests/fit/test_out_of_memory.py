"""Steps of fit that run out of memory: the loop that goes on meets few of them, and the report tells of them."""

import gc
from typing import Any

import pytest
import torch
from torch import nn

import torchoffload
from planned_blocks import BLOCKS, WIDTH
from torchoffload._fit.step import least_plan, plan_step


def model_of_blocks(count: int = 4) -> nn.Module:
    return nn.Sequential(*(BLOCKS["transformer"]() for _ in range(count)))


class Scarce:
    """A device that has less memory than its meter says: plans that take more than a limit run out of it.

    It counts as PyTorch's allocator does. A step raises in its forward, after the first block.
    """

    def __init__(self, model: nn.Module, handle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.limit_bytes = 1 << 60
        self.ooms: list[int] = []  # what the plans took under which a step ran out of memory
        self.peaks: list[int] = []  # of the plans that were followed in each step
        self._driver = handle._driver
        monkeypatch.setattr(self._driver.meter, "oom_count", lambda: len(self.ooms))
        model[1].register_forward_pre_hook(self._allocate)

    def _allocate(self, _module: nn.Module, _args: Any) -> None:
        followed = self._driver._followed
        if followed is None or torch._C._current_graph_task_id() != -1:
            return
        self.peaks.append(followed.step.peak_bytes(followed.plan))
        if self.peaks[-1] > self.limit_bytes:
            self.ooms.append(self.peaks[-1])
            raise torch.OutOfMemoryError("CUDA out of memory.")


def train(model: nn.Module, steps: int) -> None:
    """A loop that goes on after it has run out of memory."""
    for _ in range(steps):
        try:
            model(torch.randn(4, 8, WIDTH, requires_grad=True)).square().mean().backward()
        except torch.OutOfMemoryError:
            model.zero_grad()
            gc.collect()


def surveyed(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, Any, Scarce]:
    model = model_of_blocks()
    handle = torchoffload.fit(model, 1 << 50, move=False)
    train(model, 20)
    assert handle.phase == "settled"
    return model, handle, Scarce(model, handle, monkeypatch)


def test_plans_that_take_less_memory_are_tried_first(monkeypatch: pytest.MonkeyPatch):
    model, handle, _ = surveyed(monkeypatch)
    points = handle.frontier()
    with handle:
        handle.replan(int((points[0].memory_bytes + points[-1].memory_bytes) / 2 / 0.96))
        peaks = [trial.step.peak_bytes(trial.plan) for trial in handle._driver.candidates.trials]
        assert peaks == sorted(peaks)
        train(model, 1)


def test_after_a_trial_that_ran_out_of_memory_the_next_step_takes_the_least(monkeypatch: pytest.MonkeyPatch):
    """And then plans for less memory are tried: one that ran is known, whatever these do."""
    model, handle, scarce = surveyed(monkeypatch)
    points = handle.frontier()
    with handle:
        scarce.limit_bytes = points[len(points) // 2].memory_bytes
        handle.replan(int(points[-1].memory_bytes / 0.96) + 1)
        train(model, 3)
        least_bytes = least_plan(handle._driver.step).peak_bytes
        assert len(scarce.ooms) == 1
        assert scarce.peaks[1] == least_bytes
        assert "ran out of memory" in handle.report()
        train(model, 40)
        assert handle.phase == "settled"
        assert len(scarce.ooms) <= 2
        assert "ran out of memory" in handle.report()


def test_no_plan_is_tried_after_one_ran_out_of_memory_where_others_did_not(monkeypatch: pytest.MonkeyPatch):
    model, handle, scarce = surveyed(monkeypatch)
    points = handle.frontier()
    with handle:
        handle.replan(int((points[0].memory_bytes + points[-1].memory_bytes) / 2 / 0.96))
        step, trials = handle._driver.step, handle._driver.candidates.trials
        del trials[1:]
        handle._driver.candidates.add(step, plan_step(step, points[-1].memory_bytes))
        train(model, 4)  # the first one has run
        assert handle._driver.candidates.current is trials[1]
        scarce.limit_bytes = 0
        train(model, 1)
        assert len(scarce.ooms) == 1
        scarce.limit_bytes = 1 << 60
        train(model, 1)
        assert handle.phase == "settled"
        assert handle._driver.settled is trials[0]
        assert "ran out of memory" in handle.report()


def test_a_device_that_is_always_full_ends_in_the_least_memory(monkeypatch: pytest.MonkeyPatch):
    model, handle, scarce = surveyed(monkeypatch)
    points = handle.frontier()
    with handle:
        scarce.limit_bytes = points[0].memory_bytes + 1000
        handle.replan(int(points[-1].memory_bytes / 0.96) + 1)
        train(model, 60)
        assert handle.phase == "settled"
        assert handle.plan.predicted_peak_bytes <= scarce.limit_bytes
        assert len(scarce.ooms) <= 2


def test_plans_take_no_more_than_the_device_has_when_they_are_made(monkeypatch: pytest.MonkeyPatch):
    """Another process may have taken some of what was free when fit was called."""
    model, handle, _ = surveyed(monkeypatch)
    points, meter = handle.frontier(), handle._driver.meter
    monkeypatch.setattr(type(meter), "measures_memory", True)
    monkeypatch.setattr(meter, "total_bytes", lambda: points[len(points) // 2].memory_bytes)
    with handle:
        handle.replan(1 << 50)
        train(model, 40)
        assert handle.phase == "settled"
        assert handle.plan.predicted_peak_bytes <= points[len(points) // 2].memory_bytes * 0.96
        assert "of which the device had" in handle.report()
        monkeypatch.setattr(meter, "total_bytes", lambda: 1000)
        with pytest.raises(RuntimeError, match=r"1000 B, all that the device has left for this process, is too little"):
            handle.replan(1 << 50)
