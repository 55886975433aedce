"""What the clock of a fitted model tells of a finished step."""

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import torchoffload
from devices import Device
from simulated_allocator import SimulatedAllocator, SimulatedMeter
from torchoffload._devices import Counts
from torchoffload._fit.model.clock import Clock, FinishedStep
from torchoffload._fit.model.open_calls import OpenCalls

pytestmark = pytest.mark.devices("simulated-late")


class Listener:
    """Keeps the finished steps."""

    def __init__(self) -> None:
        self.finished: list[FinishedStep] = []

    def opener_of(self, called: Any) -> Any:
        return called

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


MAKER, JUDGE = nn.Linear(2, 2), nn.Linear(2, 2)
X = torch.ones(2)


def called(clock: Clock, module: nn.Module, value: torch.Tensor = X) -> torch.Tensor:
    clock.note_call(module, (value,))
    clock.call_begins(1)
    output = module(value).exp()
    clock.call_ends(output)
    return output


@dataclass
class Adversaries:
    """As a generator and its critic: what the generator made has its backward behind that of a later call, or none.

    ``judges_first``: the critic is called before the generator. ``judge``: its module. ``views``: how often it is
    called before the late backward.
    """

    judges_first: bool = False
    judge: nn.Module = JUDGE
    views: int = 1
    made: torch.Tensor = X  # the one before is alive until then

    def train(self, clock: Clock, *, trains_maker: bool) -> None:
        real = called(clock, self.judge) if self.judges_first else X
        self.made = called(clock, MAKER)
        (called(clock, self.judge, self.made.detach()) - real).sum().backward()
        if trains_maker:
            for view in range(1, self.views):
                called(clock, self.judge, self.made.detach() * view).sum().backward()
            called(clock, self.judge, self.made).sum().backward()


def loops(*views: int) -> list[Any]:
    return [
        pytest.param(
            Adversaries(judges_first, judge, each), id=f"{judges_first=}, is_one={judge is MAKER}, views={each}"
        )
        for judges_first in (False, True)
        for judge in (JUDGE, MAKER)
        for each in views
    ]


def keeps_outputs(clock: Clock, kept: list[torch.Tensor]) -> None:
    """As an evaluation without no_grad(), whose outputs are collected."""
    kept.append(called(clock, MAKER))
    called(clock, MAKER).sum().backward()


def finished(train: Callable[[Clock], None], count: int) -> int:
    """How many steps have ended once another call begins."""
    listener = Listener()
    clock = Clock(listener, SimulatedMeter(SimulatedAllocator()), lambda *values: values)
    for _ in range(count):
        train(clock)
    called(clock, MAKER)
    return len(listener.finished)


@pytest.mark.parametrize("loop", loops(1, 3))
def test_a_call_whose_backward_comes_late_keeps_its_step_open_once_that_was_seen(loop: Adversaries):
    first = finished(lambda clock: loop.train(clock, trains_maker=True), 1)
    assert finished(lambda clock: loop.train(clock, trains_maker=True), 6) == first + 5


@pytest.mark.parametrize("every", [2, 3, 5])
@pytest.mark.parametrize("loop", [*loops(1), loops(3)[0]])
def test_a_late_backward_that_the_loop_leaves_out_holds_no_step_up(loop: Adversaries, every: int):
    numbers = itertools.count()
    first = finished(lambda clock: loop.train(clock, trains_maker=True), 1)
    count = finished(lambda clock: loop.train(clock, trains_maker=next(numbers) % every == 0), 12)
    assert count == first + 11, "one in each iteration but the first"


@pytest.mark.parametrize("every", [2, 3, 5])
@pytest.mark.parametrize("loop", loops(3)[1:])
def test_a_step_ends_where_a_late_backward_comes_if_it_cannot_be_told_that_others_are_left_out(
    loop: Adversaries, every: int
):
    """Since the next iteration begins as the calls do that are made before the late backward."""
    numbers = itertools.count()
    assert finished(lambda clock: loop.train(clock, trains_maker=next(numbers) % every == 0), 48) > 48 // every


def test_a_late_backward_that_comes_behind_more_calls_than_before_is_awaited_as_well():
    loop = Adversaries()

    def train(clock: Clock, views: int) -> None:
        loop.views = views
        loop.train(clock, trains_maker=True)

    def count(views: list[int]) -> int:
        numbers = iter(views)
        return finished(lambda clock: train(clock, next(numbers)), len(views))

    assert count([1, 2, 1, 2, 3, 1, 2, 3, 3, 2, 1]) == count([1, 2, 1, 2, 3]) + 6, "once each number was seen"


def test_outputs_that_are_kept_hold_no_step_up():
    kept: list[torch.Tensor] = []
    assert finished(lambda clock: keeps_outputs(clock, kept), 6) == 6


@pytest.mark.parametrize("loop", loops(1, 3))
def test_samples_that_are_kept_hold_no_step_up(loop: Adversaries):
    kept = []

    def train(clock: Clock) -> None:
        loop.train(clock, trains_maker=True)
        kept.append(called(clock, MAKER))

    first = finished(lambda clock: loop.train(clock, trains_maker=True), 1)
    assert finished(train, 6) in (first + 5, first + 6)


@pytest.mark.parametrize("is_interrupted", [False, True])
@pytest.mark.parametrize("on", ["the thread of the call", "a thread of the engine"])
def test_a_backward_inside_of_a_call_is_told_by_the_frames_of_its_thread(on: str, is_interrupted: bool):
    """On a GPU the engine runs it on threads of its own. A KeyboardInterrupt leaves a call that is not told to end."""
    calls, found = OpenCalls(), []
    x = torch.ones(3, requires_grad=True)

    def note(_gradient: torch.Tensor) -> None:
        if on == "the thread of the call":
            found.append(calls.have_backward())
            return
        thread = threading.Thread(target=lambda: found.append(calls.have_backward()))
        thread.start()
        thread.join()

    def backward() -> None:
        y = x.sin()
        y.register_hook(note)
        torch.autograd.grad(y.sum(), x)

    def call() -> None:
        calls.begin(sys._getframe())
        backward()

    call()
    if not is_interrupted:
        calls.end()
    backward()
    assert found == [True, False]
