"""What another thread does while a call at the seam waits without the GIL: each call of a program in turn, each deed.

A stream whose queue is full blocks the call that enqueues one more command. Here every call is such a one: the other
thread's deed runs from beginning to end in the middle of it.
"""

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torchoffload

pytest.importorskip("torchoffload._C_testing", reason="the simulated device is in the test build alone")

from simulated import MODES, Simulation, simulated_device
from torchoffload import _C_testing

testing = _C_testing.testing

ROWS = 16
NBYTES = ROWS * ROWS * 4
BRANCHES = 3


def in_a_thread(work: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the other thread hangs"
    if errors:
        raise errors[0]


@contextlib.contextmanager
def in_the_middle(of_call: int, work: Callable[[], None]) -> Iterator[list[str]]:
    """`work` runs on another thread inside this thread's call of that number; gives the names of its calls."""
    this_thread = threading.get_ident()
    calls: list[str] = []

    def hook(name: str) -> None:
        if threading.get_ident() != this_thread:
            return
        calls.append(name)
        if len(calls) == of_call + 1:
            in_a_thread(work)

    testing.set_seam_hook(hook)
    try:
        yield calls
    finally:
        testing.set_seam_hook(None)


class Program:
    """Branches whose middle is saved by two operators: this thread's backward goes by the first, the other's by the
    second, since autograd itself lets only one thread into a node. Outputs may be used, or dropped, by both.
    """

    def __init__(self, simulation: Simulation, **options: Any) -> None:
        chosen: dict[str, Any] = {"min_offload_size": 0, "learn": False}
        self.simulation = simulation
        self.options = chosen | options
        self.context = torchoffload.OffloadActivations(**self.options)
        self.leaves = [self.leaf(number) for number in range(BRANCHES)]
        self.expected = [
            [torch.autograd.grad(output.sum(), leaf, retain_graph=True)[0] for output in self.branch(leaf)]
            for leaf in self.leaves
        ]
        self.outputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @staticmethod
    def leaf(number: int) -> torch.Tensor:
        return torch.linspace(-1, 1 + number, ROWS * ROWS).reshape(ROWS, ROWS).requires_grad_()

    @staticmethod
    def branch(leaf: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        middle = leaf * 2
        return middle.sin() * leaf, middle.cos()

    def forward(self) -> None:
        with self.context:
            for number, leaf in enumerate(self.leaves):
                self.outputs[number] = self.branch(leaf)

    def backward(self) -> None:
        for number in range(BRANCHES):
            if number in self.outputs:
                self.check(number, 0, self.outputs[number], retain_graph=True)
        for number in range(BRANCHES):
            if outputs := self.outputs.pop(number, None):
                self.check(number, 0, outputs, retain_graph=False)

    def check(self, number: int, which: int, outputs: tuple[torch.Tensor, torch.Tensor], retain_graph: bool) -> None:
        (found,) = torch.autograd.grad(outputs[which].sum(), self.leaves[number], retain_graph=retain_graph)
        assert torch.equal(found, self.expected[number][which])

    # What another thread does.

    def backward_of_all(self) -> None:
        for number, outputs in sorted(self.outputs.items(), reverse=True):
            self.check(number, 1, outputs, retain_graph=True)

    def backward_on_another_stream(self) -> None:
        main, side = self.simulation.current_stream(), self.simulation.new_stream()
        side.wait_stream(main)
        with self.simulation.stream(side):
            self.backward_of_all()
        main.wait_stream(side)

    def read_outside_of_backward(self) -> None:
        for number, outputs in self.outputs.items():
            assert torch.equal(outputs[1].grad_fn._saved_self, self.leaves[number].detach() * 2)

    def drop_all(self) -> None:
        self.outputs.clear()

    def save_the_same_again(self) -> None:
        """What this thread saves joins no record of the other's tape."""
        with self.context:
            outputs = [leaf.sin() for leaf in self.leaves]
        for leaf, output in zip(self.leaves, outputs, strict=True):
            (found,) = torch.autograd.grad(output.sum(), leaf)
            assert torch.equal(found, leaf.detach().cos())

    def a_step_of_its_own(self) -> None:
        other = Program(self.simulation, **self.options)
        other.forward()
        other.backward()

    def trim(self) -> None:
        torchoffload.trim()

    def make_context_and_end_it(self) -> None:
        with torchoffload.OffloadActivations(**self.options):
            self.leaf(9).exp()


DEEDS = {
    "backward of all": Program.backward_of_all,
    "backward on another stream": Program.backward_on_another_stream,
    "reads outside of backward": Program.read_outside_of_backward,
    "the last handles dropped": Program.drop_all,
    "the same saved again": Program.save_the_same_again,
    "a step of its own": Program.a_step_of_its_own,
    "a context of its own": Program.make_context_and_end_it,
    "trim": Program.trim,
}

OPTIONS: dict[str, dict[str, Any]] = {
    "windows of nothing": {"offload_window_bytes": 0, "reload_window_bytes": 0},
    "windows of some records": {"offload_window_bytes": 2 * NBYTES, "reload_window_bytes": 2 * NBYTES},
    "windows that hold all": {"offload_window_bytes": 1 << 20, "reload_window_bytes": 1 << 20},
    "copies on the compute_stream": {"offload_window_bytes": 0, "reload_window_bytes": 0, "use_streams": False},
}


def left_behind() -> dict[str, int]:
    stats = torchoffload.stats()
    names = ("live_handles", "live_records", "live_slots", "live_tapes", "budget_bytes_used")
    return {name: getattr(stats, name) for name in names}


@contextlib.contextmanager
def times_taken() -> Iterator[None]:
    """Each wait and each copy is timed, which makes two calls more at the seam."""
    testing.set_link(0, 1e9)
    try:
        with torchoffload.profile():
            yield
    finally:
        testing.set_link(0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("is_timed", [False, True], ids=["", "timed"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("deed", DEEDS)
def test_another_thread_comes_between(deed: str, options: str, is_timed: bool) -> None:
    before = left_behind()
    of_call, is_over = 0, False
    while not is_over:
        with simulated_device(mode=MODES[of_call % len(MODES)], seed=of_call) as simulation:
            program = Program(simulation, **OPTIONS[options])
            with (
                times_taken() if is_timed else contextlib.nullcontext(),
                in_the_middle(of_call, lambda: DEEDS[deed](program)) as calls,
            ):
                program.forward()
                program.backward()
            is_over = len(calls) <= of_call
            del program
            gc.collect()
            assert left_behind() == before, f"in the middle of call {of_call}, {calls[of_call : of_call + 1]}"
            simulation.check()
        of_call += 1
    assert of_call > 3 * BRANCHES


def test_what_may_block_is_called_without_the_gil() -> None:
    """Or no other Python thread would run until the device has gone on, which may be waiting for what one launches."""
    with simulated_device() as simulation:
        testing.watch_gil_at_seam()
        try:
            for options in OPTIONS.values():
                program = Program(simulation, **options)
                program.forward()
                program.backward()
                program.forward()
                program.drop_all()
        finally:
            with_gil, without_gil = testing.seam_calls_by_gil()
    assert with_gil == {"note_use"}, "which enqueues nothing"
    assert without_gil == {"record", "wait", "copy_out", "allocate", "copy_in"}


def test_the_times_of_a_step_are_taken_without_the_gil() -> None:
    with simulated_device() as simulation:
        testing.set_link(0, 1e9)
        testing.watch_gil_at_seam()
        try:
            with torchoffload.profile():
                program = Program(simulation, offload_window_bytes=0, reload_window_bytes=0)
                program.forward()
                program.backward()
        finally:
            with_gil, without_gil = testing.seam_calls_by_gil()
            testing.set_link(0, 0.0)
    assert with_gil == {"note_use"}
    assert "record_timed" in without_gil


@pytest.mark.parametrize("mode", MODES)
def test_a_source_is_resized_between_its_check_and_its_copy(mode: str):
    """The address is the one that was checked; that the memory is given back under a copy is the program's own race."""
    with simulated_device(mode=mode) as simulation:
        context = torchoffload.OffloadActivations(min_offload_size=0, learn=False)
        x = torch.linspace(-1.0, 1.0, ROWS * ROWS).requires_grad_()
        (expected,) = torch.autograd.grad((x * 2).sin().sum(), x)
        with context:
            doubled = x * 2
            values, storage = doubled.detach().clone(), doubled.untyped_storage()
            y = doubled.sin()
            with (
                in_the_middle(0, lambda: storage.resize_(0)) as calls,
                contextlib.suppress(RuntimeError),
            ):
                torch.ones(1, requires_grad=True).sin()  # the copy is enqueued, and fails the simulation's own check
        assert "copy_out" in calls[1:]
        storage.resize_(NBYTES)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(doubled):
            doubled.copy_(values)
        simulation.clear_races()
        (gradient,) = torch.autograd.grad(y.sum(), x)
        simulation.clear_races()
        assert torch.equal(gradient, expected)
