"""The counters of what is alive: right while it is, zero after every end, and told by report() on demand."""

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchoffload
from devices import Device
from functions import Fails
from gradients import Live, settled

NBYTES = 32 * 32 * 4


@pytest.fixture(autouse=True)
def nothing_of_earlier_tests_is_about_to_go() -> None:
    gc.collect()


def alive() -> dict[str, int]:
    stats = torchoffload.stats()
    names = ("live_handles", "live_records", "live_slots", "live_tapes", "slot_bytes", "budget_bytes_used")
    return {name: getattr(stats, name) for name in names}


def leaf(device: Device) -> torch.Tensor:
    return torch.linspace(-1, 1, 1024, device=device.torch_device).reshape(32, 32).requires_grad_()


def after_backward(device: Device, x: torch.Tensor) -> None:
    with device.context():
        y = x.sigmoid().exp()
    y.sum().backward()


def after_a_dropped_graph(device: Device, x: torch.Tensor) -> None:
    with device.context():
        y = x.sigmoid().exp()
    del y


def after_a_retained_graph_is_dropped(device: Device, x: torch.Tensor) -> None:
    with device.context():
        y = x.sigmoid().exp().sum()
    y.backward(retain_graph=True)
    del y


def after_an_exception_in_forward(device: Device, x: torch.Tensor) -> None:
    with contextlib.suppress(ValueError), device.context():
        Fails.apply(x.sigmoid().exp(), "forward", [True])


def after_an_exception_in_backward(device: Device, x: torch.Tensor) -> None:
    with device.context():
        y = Fails.apply(x.sigmoid().exp(), "backward", [True]).exp().sum()
    with pytest.raises(ValueError, match="planted"):
        y.backward()
    del y


def after_a_part_of_a_graph(device: Device, x: torch.Tensor) -> None:
    with device.context():
        y = x.sigmoid()
        z = y.exp().exp()
    torch.autograd.grad(z.sum(), y)
    del y, z


def after_a_thread(device: Device, x: torch.Tensor) -> None:
    if device.is_simulated:
        after_backward(device, x)  # a thread that was not there when the simulation began is on no device
        return
    thread = threading.Thread(target=after_a_dropped_graph, args=(device, x))
    thread.start()
    thread.join()


ENDS = [
    after_backward,
    after_a_dropped_graph,
    after_a_retained_graph_is_dropped,
    after_an_exception_in_forward,
    after_an_exception_in_backward,
    after_a_part_of_a_graph,
    after_a_thread,
]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_every_counter_is_back_where_it_was(device_under_test: Device, end: Callable[..., Any]):
    with device_under_test.scope():
        before, live = alive(), Live.now()
        moved = torchoffload.stats().records_offloaded
        for _ in range(3):
            end(device_under_test, leaf(device_under_test))
        assert settled(live) == live
        assert alive() == before
        assert torchoffload.stats().records_offloaded > moved


def test_the_counters_are_right_while_a_graph_is_alive(device_under_test: Device):
    with device_under_test.scope():
        before = alive()
        x = leaf(device_under_test)
        with device_under_test.context(budget_bytes=1 << 20):
            y = x.sigmoid().exp()  # each saves its own result
            z = y.sin()  # the argument: y once more
        now = {name: count - before[name] for name, count in alive().items()}
        sizes = (now.pop("slot_bytes"), now.pop("budget_bytes_used"))
        assert now == {"live_handles": 3, "live_records": 2, "live_slots": 2, "live_tapes": 1}
        assert sizes == (2 * NBYTES, 2 * NBYTES)
        del y, z
        settled(Live(before["live_handles"], before["live_records"], before["live_slots"]))
        assert alive() == before


def test_the_report_says_what_is_alive(device_under_test: Device):
    with device_under_test.scope():
        settled(Live(0, 0, 0))
        torchoffload.reset_stats()
        x = leaf(device_under_test)
        with device_under_test.context():
            y = x.sigmoid().exp()
        line = next(line for line in torchoffload.report().splitlines() if line.split()[0] == "alive")
        assert line.split(maxsplit=1)[1] == "2 of 2 handles, 2 records, 2 slots, 1 tapes"
        del y
        settled(Live(0, 0, 0))
        line = next(line for line in torchoffload.report().splitlines() if line.split()[0] == "alive")
        assert line.split(maxsplit=1)[1] == "0 of 2 handles, 0 records, 0 slots, 0 tapes"


@pytest.mark.devices("disk", "cuda")
def test_contexts_cost_neither_threads_nor_descriptors(device_under_test: Device):
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    for step in range(60):
        after_backward(device_under_test, leaf(device_under_test))
        if step == 10:
            early = held()
    deadline = time.monotonic() + 10
    while held() != early and time.monotonic() < deadline:
        time.sleep(0.01)  # the system lists a thread that has been joined for a moment longer
    assert held() == early
