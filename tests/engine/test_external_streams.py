"""Streams that the program made itself, and destroys when it likes: no call of ours names one that is gone.

On the simulated device a call that names a destroyed stream is reported as a race is, and fails the test. Of the
streams that PyTorch's interface has none is ever destroyed: there it is a stream that the program uses no more.
"""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchoffload

pytest.importorskip("torchoffload._C_testing", reason="the simulated device is in the test build alone")

from devices import Device
from gradients import Live, settled
from simulated import SimulatedStream, Simulation

ROWS = 16
NBYTES = ROWS * ROWS * 4
AMPLE_BYTES = 1 << 20
SIMULATED = ("simulated-late", "simulated-early", "simulated-seeded")

WINDOWS = [(0, 0), (2 * NBYTES, 2 * NBYTES), (AMPLE_BYTES, AMPLE_BYTES)]


def context(windows: tuple[int, int], **options: Any) -> torchoffload.OffloadActivations:
    chosen: dict[str, Any] = {"min_offload_size": 0, "learn": False}
    chosen["offload_window_bytes"], chosen["reload_window_bytes"] = windows
    return torchoffload.OffloadActivations(**(chosen | options))


def chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(5):
        x = x.sin()
    return x.sum()


def leaf(device: Device) -> torch.Tensor:
    values = torch.linspace(-1, 1, ROWS * ROWS, device=device.torch_device)
    return values.reshape(ROWS, ROWS).requires_grad_()


def stream_of_the_program(device: Device, simulation: Simulation) -> SimulatedStream:
    return simulation.external_stream() if device.is_simulated else simulation.new_stream()


def expected_gradient(device: Device) -> torch.Tensor:
    x = leaf(device)
    (gradient,) = torch.autograd.grad(chain(x), x)
    return gradient


class Stage:
    """A simulation with an external stream, on which a forward has run, and which is destroyed on demand."""

    def __init__(self, device: Device, simulation: Simulation, windows: tuple[int, int], **options: Any) -> None:
        self.device, self.simulation = device, simulation
        self.make_context = lambda: context(windows, **options)
        self.main = simulation.current_stream()
        self.expected = expected_gradient(device)
        self.external = stream_of_the_program(device, simulation)
        with simulation.stream(self.external):
            self.x = leaf(device)
            with self.make_context():
                self.y = chain(self.x)

    def destroy(self) -> None:
        self.main.wait_stream(self.external)
        if self.device.is_simulated:
            self.simulation.destroy(self.external)

    def step(self) -> None:
        """Of another graph, on the main stream."""
        x = leaf(self.device)
        with self.make_context():
            y = chain(x)
        y.backward()
        assert torch.equal(x.grad, self.expected)

    def backward(self, **options: Any) -> None:
        (gradient,) = torch.autograd.grad(self.y, self.x, **options)
        assert torch.equal(gradient, self.expected)


def nothing_more(stage: Stage) -> None:
    stage.destroy()


def another_step(stage: Stage) -> None:
    """Which fills the window that the destroyed stream's copies are in."""
    stage.destroy()
    stage.step()


def backward_on_the_main_stream(stage: Stage) -> None:
    stage.destroy()
    stage.backward()


def backward_on_the_stream_itself(stage: Stage) -> None:
    with stage.simulation.stream(stage.external):
        stage.backward()
    stage.destroy()
    stage.step()


def backward_on_both(stage: Stage) -> None:
    """What was reloaded on the one is given up, or dropped, on the other."""
    with stage.simulation.stream(stage.external):
        stage.backward(retain_graph=True)
    stage.destroy()
    stage.backward()
    stage.step()


def a_part_of_a_backward(stage: Stage) -> None:
    """Reloads ahead, allocated on the stream, that nobody asks for: they are dropped when it is gone."""
    with stage.simulation.stream(stage.external):
        assert stage.y.grad_fn is not None
        last = stage.y.grad_fn.next_functions[0][0]
        last(torch.ones(ROWS, ROWS, device=stage.device.torch_device))
    stage.destroy()
    stage.step()


ENDINGS = [
    nothing_more,
    another_step,
    backward_on_the_main_stream,
    backward_on_the_stream_itself,
    backward_on_both,
    a_part_of_a_backward,
]


@pytest.mark.devices(*SIMULATED, "privateuseone")
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("use_streams", [True, False])
@pytest.mark.parametrize("ending", ENDINGS)
def test_no_call_names_a_stream_that_is_gone(
    device_under_test: Device, ending: Callable[[Stage], None], use_streams: bool, windows: tuple[int, int]
) -> None:
    before = Live.now()
    with device_under_test.scope() as simulation:
        stage = Stage(device_under_test, simulation, windows, use_streams=use_streams)
        ending(stage)
        del stage
        assert settled(before) == before
        assert torchoffload.stats().budget_bytes_used == 0


@pytest.mark.devices("simulated-late")  # alone: the generic backend takes no stream for one that may be destroyed
def test_what_was_saved_on_a_stream_that_is_current_no_more_is_kept(device_under_test: Device) -> None:
    """At the next hook event the stream of the last operator may be gone already."""
    torchoffload.reset_stats()
    with device_under_test.scope() as simulation:
        x, main, external = leaf(device_under_test), simulation.current_stream(), simulation.external_stream()
        external.wait_stream(main)
        with context((0, 0)):
            with simulation.stream(external):
                y = x.sin()
                y = y.exp()
            main.wait_stream(external)
            simulation.destroy(external)
            y = (y * 2).sum()
        y.backward()
        stats = torchoffload.stats()
        assert torch.equal(x.grad, x.detach().cos() * x.detach().sin().exp() * 2)
        del y
        gc.collect()
    assert stats.bytes_kept["external_stream"] == NBYTES
    assert stats.bytes_offloaded == NBYTES


@pytest.mark.devices("simulated-late", "privateuseone")
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_a_save_on_an_external_stream_joins_no_record_of_another(
    device_under_test: Device, windows: tuple[int, int]
) -> None:
    """Its memory, of the main stream, is handed on only after what the external one did with it."""
    with device_under_test.scope() as simulation:
        x, main = leaf(device_under_test), simulation.current_stream()
        external = stream_of_the_program(device_under_test, simulation)
        with context(windows):
            h = x * 2
            y = h.sin()
            external.wait_stream(main)
            with simulation.stream(external):
                z = h.cos()
                z = z.sum()
            del h
            again = (x * 3).sin()  # takes the memory, if it was handed on
        main.wait_stream(external)
        if device_under_test.is_simulated:
            simulation.destroy(external)
        (gradient,) = torch.autograd.grad(y.sum() + z + again.sum(), x)
        values = x.detach()
        assert torch.allclose(gradient, 2 * (values * 2).cos() - 2 * (values * 2).sin() + 3 * (values * 3).cos())
        del y, z, again
