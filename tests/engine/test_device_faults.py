"""A device that fails: whichever call at the seam throws, nothing is left behind, and the next step is right.

On the simulated device, also as one of PyTorch's, where each call of a program is made to fail in turn.
"""

import gc
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchoffload
from autograd_threads import await_autograd
from devices import Device, make_device
from places import environment_with_support

pytest.importorskip("torchoffload._C_testing", reason="the simulated device is in the test build alone")

from simulated import Simulation
from torchoffload import _C_testing

testing = _C_testing.testing

ROWS = 16
NBYTES = ROWS * ROWS * 4
NEVER = 10**9
SIMULATED = ("simulated-late", "simulated-early", "simulated-seeded")


def context(**options: Any) -> torchoffload.OffloadActivations:
    chosen: dict[str, Any] = {
        "min_offload_size": 0,
        "offload_window_bytes": 0,
        "reload_window_bytes": 0,
        "learn": False,
    }
    return torchoffload.OffloadActivations(**(chosen | options))


def chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(5):
        x = x.sin()
    return x.sum()


Step = Callable[[Simulation, torch.Tensor], torch.Tensor]


def forward_and_backward(**options: Any) -> Step:
    def step(simulation: Simulation, x: torch.Tensor) -> torch.Tensor:
        with context(**options):
            y = chain(x)
        (gradient,) = torch.autograd.grad(y, x)
        return gradient

    return step


def a_graph_dropped_in_flight(simulation: Simulation, x: torch.Tensor) -> torch.Tensor:
    with context(offload_window_bytes=1 << 20):
        chain(x)
    return forward_and_backward(offload_window_bytes=1 << 20)(simulation, x)


def a_graph_dropped_with_reloads_in_flight(simulation: Simulation, x: torch.Tensor) -> torch.Tensor:
    with context(reload_window_bytes=3 * NBYTES):
        first, last = chain(x), chain(x)
    (gradient,) = torch.autograd.grad(last, x)
    del first
    return gradient


def saves_on_two_streams(simulation: Simulation, x: torch.Tensor) -> torch.Tensor:
    main, side = simulation.current_stream(), simulation.new_stream()
    with context():
        h = x * 2
        y = h.sin()
        side.wait_stream(main)
        with simulation.stream(side):
            y = (y + h.cos()).sum()
        main.wait_stream(side)
    (gradient,) = torch.autograd.grad(y, x)
    return gradient


def a_retained_graph_read_twice(simulation: Simulation, x: torch.Tensor) -> torch.Tensor:
    with context(reload_window_bytes=NBYTES):
        y = chain(x)
    torch.autograd.grad(y, x, retain_graph=True)
    (gradient,) = torch.autograd.grad(y, x)
    return gradient


STEPS: dict[str, Step] = {
    "windows of nothing": forward_and_backward(),
    "windows of some records": forward_and_backward(offload_window_bytes=2 * NBYTES, reload_window_bytes=2 * NBYTES),
    "copies on the compute_stream": forward_and_backward(use_streams=False),
    "a graph dropped in flight": a_graph_dropped_in_flight,
    "a graph dropped with reloads in flight": a_graph_dropped_with_reloads_in_flight,
    "saves on two streams": saves_on_two_streams,
    "a retained graph": a_retained_graph_read_twice,
}


def leaf(device: Device) -> torch.Tensor:
    values = torch.linspace(-1, 1, ROWS * ROWS, device=device.torch_device)
    return values.reshape(ROWS, ROWS).requires_grad_()


def let_go(device: Device) -> None:
    """Threads of autograd and cycles drop all that they hold of a backward."""
    gc.collect()
    if device.name == "privateuseone":
        await_autograd(device.name)


def left_behind() -> dict[str, int]:
    stats = torchoffload.stats()
    return {
        name: getattr(stats, name)
        for name in ("live_handles", "live_records", "live_slots", "live_tapes", "budget_bytes_used")
    }


def run_with_faults(device: Device, step: Step, simulation: Simulation, x: torch.Tensor, after: int, times: int) -> int:
    """The step, whose calls at the seam fail; what comes out of it is dropped. Returns how many calls there were."""
    testing.fail_seam_calls(after, times)
    try:
        step(simulation, x)
    except RuntimeError as error:
        if "simulated fault" not in str(error):
            raise
    finally:
        count = int(testing.clear_seam_faults())
    let_go(device)
    return count


def check_every_call(device: Device, step: Step, times: int) -> None:
    before = left_behind()
    with device.scope() as simulation:
        x = leaf(device)
        expected = step(simulation, x)
        call_count = run_with_faults(device, step, simulation, x, NEVER, 1)
        assert call_count > 0
        # A device that fails for good takes a leaked chunk each time: every fifth call, unless all are asked for.
        stride = 5 if times == NEVER and not os.environ.get("TORCHOFFLOAD_TEST_LONG") else 1
        for after in range(0, call_count, stride):
            run_with_faults(device, step, simulation, x, after, times)
            assert torch.equal(step(simulation, x), expected), f"the step after a fault in call {after}"
            let_go(device)
            if times == 1:
                assert left_behind() == before, f"after a fault in call {after}"
            simulation.check()


@pytest.mark.devices(*SIMULATED, "privateuseone")
@pytest.mark.parametrize("name", STEPS)
def test_a_call_that_fails_once_leaves_nothing_behind(device_under_test: Device, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_every_call(device_under_test, STEPS[name], times=1)


@pytest.mark.slow
@pytest.mark.devices("simulated-late", "privateuseone")
@pytest.mark.parametrize("name", STEPS)
def test_a_device_that_fails_for_good_hands_no_memory_on_too_early(device_under_test: Device, name: str) -> None:
    """From some call on each one fails.

    The memory that an enqueued copy still touches is leaked, and with it its chunk of pinned memory. So this runs in a
    process of its own: see the end of the file.
    """
    program = [sys.executable, __file__, device_under_test.name, name]
    done = subprocess.run(program, env=environment_with_support(), capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stdout + done.stderr


@pytest.mark.devices("simulated-late", "privateuseone")
def test_a_release_while_the_device_fails_gives_slot_and_budget_back(device_under_test: Device) -> None:
    before = left_behind()
    with device_under_test.scope() as simulation:
        x = leaf(device_under_test)
        with context(offload_window_bytes=1 << 20):
            y = chain(x * 2)
        assert left_behind()["live_slots"] > before["live_slots"]
        testing.fail_seam_calls(0, NEVER)
        try:
            del y
        finally:
            testing.clear_seam_faults()
        assert left_behind() == before
        held_bytes = simulation.allocated_bytes()
        with context():  # a hook event: what could not be waited for is tried again
            x.sin()
        gc.collect()
        assert simulation.allocated_bytes() < held_bytes


if __name__ == "__main__":
    torch.set_num_threads(1)
    device_name, step_name = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        check_every_call(make_device(device_name, Path(directory), step_name), STEPS[step_name], times=NEVER)
    print("right", flush=True)
