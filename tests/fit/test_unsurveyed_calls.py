"""Calls that no surveyed step had: of other modules, or of blocks that came behind the survey."""

import random
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import torchoffload
from devices import Device
from fitted_models import Wide, options_of
from gradients import Run, execute
from planned_blocks import WIDTH
from torchoffload._fit.machine.link import LinkRates

ROOM = 1 << 50


class Tasks(nn.Module):
    """A trunk, and blocks of one kind for each task."""

    def __init__(self, tasks: int = 6) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*(Wide(3, 2) for _ in range(3)))
        self.tasks = nn.ModuleList(nn.Sequential(*(Wide(3, 2) for _ in range(3))) for _ in range(tasks))

    def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
        return self.loss(x, task)

    def loss(self, x: torch.Tensor, task: int) -> torch.Tensor:
        return self.tasks[task](self.trunk(x)).square().mean()


@pytest.mark.devices("disk", "cuda")
def test_tasks_that_are_drawn_at_random_settle(device_under_test: Device):
    draw = random.Random(0)
    torch.manual_seed(0)
    with device_under_test.scope():
        model = Tasks().to(device_under_test.torch_device)
        x = torch.randn(8, 8, WIDTH, device=device_under_test.torch_device)
        phases = []
        with torchoffload.fit(model, ROOM, **options_of(device_under_test)) as handle:
            for _ in range(250):
                model.loss(x, draw.randrange(6)).backward()
                model.zero_grad()
                phases.append(handle.phase)
    assert set(phases[-50:]) == {"settled"}


@pytest.mark.devices("disk", "cuda")
def test_ever_new_tasks_are_told_of_once_and_settle(device_under_test: Device):
    """Each new task begins a survey, and at most eight do. Gradients are those of stock throughout."""

    def program(run: Run):
        torch.manual_seed(0)
        model = Tasks(14).to(run.device)
        handle = None if run.stock else torchoffload.fit(model, ROOM, **options_of(device_under_test))
        phases: list[Any] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(14 * 14):
                model.loss(run.tensor(4, 8, WIDTH), step // 14).backward()
                run.check(gradients=[each.grad for each in model.parameters() if each.grad is not None])
                model.zero_grad()
                phases.append(None if handle is None else handle.phase)
        if handle is not None:
            warned = [str(each.message) for each in caught if "again and again" in str(each.message)]
            assert len(warned) == 1
            assert "call fit for each of these parts" in handle.report()
            assert set(phases[-30:]) == {"settled"}
            handle.remove()

    stock, fitted = (execute(program, device_under_test, stock=each) for each in (True, False))
    assert stock == fitted


@pytest.mark.devices("disk")
def test_too_little_memory_is_told_once(device_under_test: Device):
    draw, errors = random.Random(0), []
    torch.manual_seed(0)
    with device_under_test.scope():
        model = Tasks()
        weights = sum(each.nbytes for each in model.parameters())
        with torchoffload.fit(model, int(2.05 * weights), **options_of(device_under_test)):
            for step in range(120):
                try:
                    model.loss(torch.randn(64, 8, WIDTH), draw.randrange(6)).backward()
                except torch.OutOfMemoryError:
                    errors.append(step)
                model.zero_grad()
    assert len(errors) == 1


@pytest.mark.devices("simulated-late", "simulated-early")
def test_a_task_behind_the_survey_keeps_to_the_memory(device_under_test: Device, monkeypatch: pytest.MonkeyPatch):
    simulated = pytest.importorskip("simulated", reason="the simulated device is in the test build alone")
    with device_under_test.scope() as simulation, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tasks whose calls were not seen
        torch.manual_seed(0)
        model = Tasks()
        meter = simulated.SimulationMeter(simulation)
        monkeypatch.setattr("torchoffload._fit.model.fit.meter_for", lambda _device: meter)
        monkeypatch.setattr("torchoffload._fit.model.fitted_model.measure_link", lambda *_: LinkRates(2e8, 2e8, 1e-5))
        for each in model.parameters():
            each.grad = torch.zeros_like(each)

        def step(task: int) -> int:
            simulation.take_peak_bytes()
            model(torch.randn(64, 8, WIDTH), task).backward()
            model.zero_grad(set_to_none=False)
            return simulation.take_peak_bytes()

        with torchoffload.fit(model, 1 << 40, min_offload_size=0) as handle:
            for number in range(30):
                step(number % 2)
            assert handle.phase == "settled"
            before = max(step(0), step(1))
            assert "no call of them was seen" in handle.report()
            assert max(step(task) for task in (2, 3, 4, 5)) <= before
            assert "no call of them was seen" not in handle.report()
