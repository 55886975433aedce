"""When ``compress="auto"`` codes: where the link binds a step that takes less time so. On the simulated device."""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchoffload
from coded_copies import codes_held_up
from devices import Device
from timed_steps import COPY_S, LEAST_MEMORY, RECORD_BYTES, forward, scope_with_a_link, step

pytest.importorskip("torchoffload._C_testing", reason="the simulated device is in the test build alone")

from torchoffload import _C_testing

testing = _C_testing.testing
pytestmark = pytest.mark.devices("simulated-late", "simulated-early", "simulated-seeded")


@pytest.fixture(autouse=True)
def nothing_is_known() -> Iterator[None]:
    gc.collect()
    torchoffload.trim()
    torchoffload.reset_stats()
    testing.forget_learned()
    yield
    testing.forget_learned()


@contextlib.contextmanager
def coding_that_takes(piece_s: float) -> Iterator[None]:
    testing.set_coding_time(0, piece_s)
    try:
        yield
    finally:
        testing.set_coding_time(0, 0.0)


def coded_records(device: Device, layers: int, steps: int, **options: Any) -> list[int]:
    """How many records each step coded."""
    counts = []
    for _ in range(steps):
        torchoffload.reset_stats()
        step(device, layers, learn=True, **(LEAST_MEMORY | options))
        counts.append(torchoffload.stats().records_coded)
    return counts


def test_auto_codes_from_the_fourth_step_where_the_link_binds(device_under_test: Device):
    with scope_with_a_link(device_under_test):
        counts = coded_records(device_under_test, 8, 6, compress="auto")
        staging_bytes = torchoffload.stats().staging_bytes
        counts += coded_records(device_under_test, 8, 1, compress="auto")
        assert torchoffload.stats().staging_bytes == staging_bytes > 0, "it stays where only a step is compared"
        counts += coded_records(device_under_test, 8, 5, compress="auto")
        assert [count > 0 for count in counts] == [False] * 3 + [True] * 3 + [False] + [True] * 5
        assert torchoffload.stats().codes_given_up == {}


def test_auto_ends_raw_where_the_step_takes_longer_coded(device_under_test: Device):
    """The kernels that code are held up, as by a kernel of the program that leaves them no processor."""
    with scope_with_a_link(device_under_test), coding_that_takes(COPY_S / 8):
        counts = coded_records(device_under_test, 8, 12, compress="auto")
        assert [count > 0 for count in counts] == [False] * 3 + [True] * 3 + [False] * 6
        assert torchoffload.stats().staging_bytes == 0, "it is given up with the code"
        ((raw_s, coded_s),) = torchoffload.stats().codes_given_up["cpu"]
        assert coded_s > raw_s > 8 * COPY_S
        said = f"took {1000 * coded_s:.1f} ms coded and {1000 * raw_s:.1f} ms as they were"
        assert said in torchoffload.report()
        testing.forget_learned()
        assert torchoffload.stats().codes_given_up == {}
        assert coded_records(device_under_test, 8, 4, compress="auto")[-1] > 0


def test_true_codes_though_the_step_takes_longer(device_under_test: Device):
    with scope_with_a_link(device_under_test), coding_that_takes(COPY_S / 8):
        assert all(count > 0 for count in coded_records(device_under_test, 8, 12, compress=True))


def test_a_step_that_goes_raw_again_is_planned_by_times_of_raw_copies(device_under_test: Device):
    """As many records are kept as where nothing was ever coded."""
    kept = {}
    for compress in (False, "auto"):
        with scope_with_a_link(device_under_test), coding_that_takes(COPY_S / 8):
            testing.forget_learned()
            for _ in range(12):
                torchoffload.reset_stats()
                with device_under_test.context(learn=True, compress=compress):
                    loss = forward(device_under_test, 40)
                loss.backward()
                del loss
            kept[compress] = (torchoffload.stats().records_offloaded, torchoffload.stats().records_kept)
    assert kept["auto"] == kept[False]


def test_steps_that_overlap_are_coded_without_a_trial(device_under_test: Device):
    """Where two graphs are alive at once the time of neither is its own."""
    with scope_with_a_link(device_under_test), coding_that_takes(COPY_S / 8):
        for _ in range(10):
            torchoffload.reset_stats()
            losses = []
            for _ in range(2):
                with device_under_test.context(learn=True, compress="auto", **LEAST_MEMORY):
                    losses.append(forward(device_under_test, 8))
            for loss in losses:
                loss.backward()
            del loss, losses
        assert torchoffload.stats().records_coded > 0
        assert torchoffload.stats().codes_given_up == {}


def test_coding_that_is_ready_late_is_tried_then(device_under_test: Device):
    with scope_with_a_link(device_under_test), coding_that_takes(COPY_S / 8):
        with codes_held_up():
            assert coded_records(device_under_test, 8, 20, compress="auto") == [0] * 20
        counts = coded_records(device_under_test, 8, 6, compress="auto")
        assert [count > 0 for count in counts] == [True] * 3 + [False] * 3


def test_auto_does_not_code_where_computing_hides_the_copies(device_under_test: Device):
    with scope_with_a_link(device_under_test):
        testing.set_link(0, 100 * RECORD_BYTES / COPY_S)
        windows = {"offload_window_bytes": 4 * RECORD_BYTES, "reload_window_bytes": 4 * RECORD_BYTES}
        assert coded_records(device_under_test, 8, 8, compress="auto", **windows) == [0] * 8
        assert torchoffload.stats().staging_bytes == 0


def test_auto_leaves_out_what_did_not_get_smaller(device_under_test: Device):
    """The layers' inputs are powers of two, each one number: no exceptions. Random bits are all exceptions."""

    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, noise):
            ctx.save_for_backward(noise)
            testing.advance(0, 1e-5)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            ctx.saved_tensors  # noqa: B018
            return gradient, None

    def one(compress: str) -> int:
        torchoffload.reset_stats()
        with device_under_test.context(learn=True, compress=compress, **LEAST_MEMORY):
            x = torch.ones(64, 64, requires_grad=True)
            for _ in range(4):
                x = Save.apply(x, torch.randint(-(2**31), 2**31 - 1, (64, 64), dtype=torch.int32))
                x = Save.apply(x, torch.full((64, 64), 1.5))
            loss = x.sum()
        loss.backward()
        del loss, x
        return torchoffload.stats().records_coded

    with scope_with_a_link(device_under_test):
        counts = [one("auto") for _ in range(6)]
    assert counts[:4] == [0, 0, 0, 8]
    assert counts[-1] == 4
