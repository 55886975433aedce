"""The default budget: what all devices of a process may take of host memory together, whatever they hold already."""

import pytest
import torch

import torchoffload
from devices import Device
from functions import SavesInput
from gradients import Run, assert_same_gradients

pytestmark = pytest.mark.devices("simulated-late", "privateuseone")

MIB = 1 << 20
LENGTH = 150


def chain(run, length):
    x = run.leaf(512, 512)
    with run.offload(offload_window_bytes=0):
        y = x
        for _ in range(length):
            y = SavesInput.apply(y) / 2
        return x, y.sum()


@pytest.fixture(autouse=True)
def _a_small_default_budget(monkeypatch):
    """By so many processes that a share of 2 MiB is left for each, which is less than the arena's first chunk."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    torchoffload.trim()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(torchoffload.host_memory().default_budget_bytes // (2 * MIB)))
    yield
    torchoffload.trim()


def expected_gradient(x: torch.Tensor) -> torch.Tensor:
    """Of a chain of LENGTH // 3, without offloading."""
    y = leaf = x.detach().clone().requires_grad_()
    for _ in range(LENGTH // 3):
        y = SavesInput.apply(y) / 2
    y.sum().backward()
    return leaf.grad


def assert_within_four_fifths(stats: torchoffload.OffloadStats) -> None:
    assert stats.records_offloaded > 2
    assert stats.records_kept["tier_full"] > 0
    assert stats.peak_slot_bytes <= 0.8 * stats.pinned_bytes + 3 * MIB


@pytest.mark.filterwarnings("ignore:torchoffload:UserWarning")
def test_it_does_not_grow_with_the_arena(device_under_test: Device):
    def program(run):
        x, loss = chain(run, LENGTH)
        loss.backward()
        run.check(grad=x.grad)

    assert_within_four_fifths(assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.01))


@pytest.mark.filterwarnings("ignore:torchoffload:UserWarning")
def test_the_devices_of_a_process_share_it(device_under_test: Device):
    torchoffload.reset_stats()
    with device_under_test.scope(devices=2) as simulation:
        run = Run(device_under_test, stock=False, context=None)
        first_x, first = chain(run, LENGTH // 3)
        with simulation.device(1):
            second_x, second = chain(run, LENGTH // 3)
        assert_within_four_fifths(torchoffload.stats())
        with simulation.device(1):
            second.backward()
        first.backward()
        assert first_x.grad.isfinite().any()
        assert torch.equal(first_x.grad, expected_gradient(first_x))
        assert torch.equal(second_x.grad, expected_gradient(second_x))
