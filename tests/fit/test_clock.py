"""What the clock of a fitted model tells of a finished step."""

import contextlib

import pytest
import torch

import torchoffload
from devices import Device
from simulated_allocator import SimulatedAllocator, SimulatedMeter
from torchoffload._devices import Counts
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


class Meter(SimulatedMeter):
    """A meter of a device on which as many bytes are reserved as the test says."""

    reserved_bytes = 0

    def counts(self) -> Counts:
        return super().counts()._replace(reserved_bytes=self.reserved_bytes)


@pytest.mark.parametrize("own_bytes", [1010, 990])
def test_ranks_agree_on_the_bytes_that_were_reserved_as_backward_ended(own_bytes: int):
    """The loop may empty the cache behind backward: what the next call sees is not what the ranks needed."""
    listener, meter = Listener(), Meter(SimulatedAllocator())
    clock = Clock(listener, meter, lambda *values: (*values[:3], max(values[3], 1010)))
    clock.call_begins(1)
    weight = torch.ones(1, requires_grad=True)
    loss = weight.exp().sum()
    clock.call_ends(loss)
    meter.reserved_bytes = own_bytes
    loss.backward()
    del loss
    meter.reserved_bytes = 500
    clock.call_begins(1)
    assert [each.reserved_bytes for each in listener.finished] == [1010]
    assert [(each.began_reserved_bytes, each.ended_reserved_bytes) for each in listener.finished] == [(0, own_bytes)]


def test_a_rank_tells_the_others_what_was_reserved_as_its_backward_ended():
    told = []
    meter = Meter(SimulatedAllocator())
    clock = Clock(Listener(), meter, lambda *values: told.append(values[3]) or values)
    clock.call_begins(1)
    weight = torch.ones(1, requires_grad=True)
    loss = weight.exp().sum()
    clock.call_ends(loss)
    meter.reserved_bytes = 1010
    loss.backward()
    del loss
    meter.reserved_bytes = 500
    clock.call_begins(1)
    assert told == [0, 1010]


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


def adversaries(clock: Clock) -> None:
    """As a generator and its critic: what the first call made has its backward behind that of a later call."""
    made_by, judged_by = (torch.ones(2, requires_grad=True) for _ in range(2))

    def called(value: torch.Tensor) -> torch.Tensor:
        clock.call_begins(1)
        output = value.exp()
        clock.call_ends(output)
        return output

    made = called(made_by)
    called(judged_by * made.detach()).sum().backward()
    called(judged_by * made).sum().backward()


def keeps_outputs(clock: Clock, kept: list[torch.Tensor]) -> None:
    """As an evaluation without no_grad(), whose outputs are collected."""
    clock.call_begins(1)
    kept.append(torch.ones(2, requires_grad=True).exp())
    clock.call_ends(kept[-1])
    clock.call_begins(1)
    loss = torch.ones(2, requires_grad=True).exp()
    clock.call_ends(loss)
    loss.sum().backward()


def test_a_call_whose_backward_comes_late_keeps_its_step_open_once_that_was_seen():
    listener = Listener()
    clock = Clock(listener, SimulatedMeter(SimulatedAllocator()), lambda *values: values)
    for _ in range(6):
        adversaries(clock)
    clock.call_begins(1)
    assert len(listener.finished) == 7, "two in the first iteration, and one in each later one"


def test_outputs_that_are_kept_hold_no_step_up():
    listener, kept = Listener(), []
    clock = Clock(listener, SimulatedMeter(SimulatedAllocator()), lambda *values: values)
    for _ in range(6):
        keeps_outputs(clock, kept)
    clock.call_begins(1)
    assert len(listener.finished) == 6
