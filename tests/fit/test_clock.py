"""What the clock of a fitted model tells of a finished step."""

import contextlib

import pytest
import torch

import torchoffload
from devices import Device
from simulated_allocator import SimulatedAllocator, SimulatedMeter
from torchoffload._fit.model.clock import Clock, FinishedStep

pytestmark = pytest.mark.devices("simulated-late")


class Listener:
    """Keeps the finished steps."""

    def __init__(self) -> None:
        self.finished: list[FinishedStep] = []

    def step_begins(self, size: int) -> None:
        pass

    def step_finished(self, step: FinishedStep) -> None:
        self.finished.append(step)

    def backward_began(self) -> None:
        pass

    def backward_ended(self) -> None:
        pass

    def note_stuck(self) -> None:
        pass


def test_a_step_tells_whether_pinned_memory_was_taken_or_given_back(device_under_test: Device):
    listener = Listener()
    clock = Clock(listener, SimulatedMeter(SimulatedAllocator()), lambda *values: values)
    clock.measures = True
    torchoffload.trim()
    with device_under_test.scope():
        for moves in (True, True, False, True):
            clock.call_begins(1)
            if not moves:
                torchoffload.trim()
            with device_under_test.context() if moves else contextlib.nullcontext():
                weight = torch.ones(1 << 18, requires_grad=True)
                loss = (weight * weight).exp().sum()
            clock.call_ends(loss)
            loss.backward()
            del loss
    clock.call_begins(1)
    assert [each.has_resized_host for each in listener.finished] == [True, False, True, True]
