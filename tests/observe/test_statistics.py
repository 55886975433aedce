"""stats(): exact numbers for programs that can be counted by hand."""

import pytest
import torch

import torchoffload
from devices import Device
from functions import Save
from gradients import settled_stats


@pytest.fixture
def scope(device_under_test: Device):
    settled_stats()  # a thread of autograd may still be dropping the graph of the test before
    torchoffload.reset_stats()
    with device_under_test.scope() as simulation:
        yield simulation


def leaf(device: Device, *shape: int) -> torch.Tensor:
    return torch.ones(shape, device=device.torch_device, requires_grad=True)


def test_a_known_program_is_counted_exactly(device_under_test: Device, scope):
    x, weight = leaf(device_under_test, 32, 32), torch.nn.Parameter(leaf(device_under_test, 32, 32).detach())
    with device_under_test.context(offload_window_bytes=0, reload_window_bytes=0, min_offload_size=1024):
        a = x.exp()  # a: moved, 4096
        y = a.sin()  # a again: deduplicated
        z = y @ weight  # y: moved, 4096; weight: kept
        w = Save.apply(z, lambda *unpacked: None, z[:2].clone(), a.t())  # 256 bytes: kept; a: deduplicated
        loss = w.sum()
    stats = torchoffload.stats()
    assert (stats.handles, stats.live_handles) == (6, 6)
    assert (stats.records_offloaded, stats.bytes_offloaded) == (2, 8192)
    assert (stats.records_deduplicated, stats.bytes_deduplicated) == (2, 8192)
    assert stats.records_kept == {"parameter": 1, "small": 1}
    assert stats.bytes_kept == {"parameter": 4096, "small": 256}
    assert (stats.records_reloaded, stats.bytes_reloaded) == (0, 0)
    assert (stats.live_records, stats.live_slots, stats.slot_bytes, stats.peak_slot_bytes) == (2, 2, 8192, 8192)
    assert stats.budget_bytes_used == 8192

    loss.backward()
    stats = settled_stats()
    # Save reads a, and its record holds it until sin and exp have had it too.
    assert (stats.records_reloaded, stats.bytes_reloaded) == (2, 8192)
    assert (stats.live_handles, stats.live_records, stats.live_slots, stats.live_tapes) == (0, 0, 0, 0)
    assert (stats.slot_bytes, stats.peak_slot_bytes, stats.budget_bytes_used) == (0, 8192, 0)
    assert stats.peak_reload_window_bytes == 0


def test_there_is_a_row_for_each_tape(device_under_test: Device, scope):
    x = leaf(device_under_test, 32, 32)
    for count in (1, 2, 3):
        with device_under_test.context():
            y = x
            for _ in range(count):
                y = y.exp()
        y.sum().backward()
    stats = settled_stats()
    assert [row.records_offloaded for row in stats.tapes] == [1, 2, 3]
    assert [row.bytes_offloaded for row in stats.tapes] == [4096, 8192, 12288]
    assert sum(row.bytes_reloaded for row in stats.tapes) == stats.bytes_reloaded
    assert stats.bytes_offloaded == 6 * 4096


def test_one_entry_over_steps_has_a_tape_for_each_forward(device_under_test: Device, scope):
    x = leaf(device_under_test, 32, 32)
    with device_under_test.context():
        for _ in range(3):
            x.exp().exp().sum().backward()
    stats = settled_stats()
    assert len(stats.tapes) == 3
    assert stats.live_tapes == 0


def test_a_tape_that_is_alive_has_its_row(device_under_test: Device, scope):
    x = leaf(device_under_test, 32, 32)
    with device_under_test.context():
        y = x.exp()
    stats = torchoffload.stats()
    assert [row.bytes_offloaded for row in stats.tapes] == [4096]
    assert stats.live_tapes == 1
    del y
    assert settled_stats().live_tapes == 0


def test_the_rows_are_the_latest_sixty_four(device_under_test: Device, scope):
    x = leaf(device_under_test, 8)
    for _ in range(70):
        with device_under_test.context():
            y = x.exp()
        del y
    stats = settled_stats()
    assert len(stats.tapes) == 64
    assert stats.records_offloaded == 70


def test_reset_sets_totals_to_zero_and_keeps_what_is_alive(device_under_test: Device, scope):
    x = leaf(device_under_test, 32, 32)
    with device_under_test.context():
        y = x.exp()
    torchoffload.reset_stats()
    stats = torchoffload.stats()
    assert (stats.bytes_offloaded, stats.handles, stats.records_kept) == (0, 0, {})
    assert (stats.live_records, stats.live_slots, stats.slot_bytes, stats.peak_slot_bytes) == (1, 1, 4096, 4096)
    y.sum().backward()
    # The seeded device has a window: the source may still be there.
    assert settled_stats().bytes_reloaded in ({0, 4096} if device_under_test.name == "simulated-seeded" else {4096})


def test_every_reason_has_its_name(device_under_test: Device, scope):
    x, parameter = leaf(device_under_test, 32, 32), torch.nn.Parameter(leaf(device_under_test, 32, 32).detach())
    marked = leaf(device_under_test, 32, 32).detach()
    torchoffload.never_offload(marked)
    sparse = torch.eye(32, device=device_under_test.torch_device).to_sparse()
    with device_under_test.context(min_offload_size=1024):
        y = x * parameter * marked
        z = torch.sparse.mm(sparse, y).sum() + x[:2].sin().sum() + x[:2].clone().sin().sum()
        (gradient,) = torch.autograd.grad(x.sin().exp().sum(), x, create_graph=True)
    kept = torchoffload.stats().records_kept
    assert kept.keys() >= {"parameter", "marked", "layout", "small", "in_backward"}
    del y, z, gradient


def test_an_unused_context_counts_nothing(device_under_test: Device, scope):
    for _ in range(3):
        with device_under_test.context():
            pass
    stats = torchoffload.stats()
    assert (stats.handles, stats.bytes_offloaded, stats.live_tapes, len(stats.tapes)) == (0, 0, 0, 0)


@pytest.mark.devices("simulated-late", "simulated-early", "simulated-seeded", "cuda")  # a disk may be faster than we
def test_a_full_window_is_counted(device_under_test: Device, scope):
    x = leaf(device_under_test, 32, 32)
    with device_under_test.context(offload_window_bytes=2 * 4096):
        y = x
        for _ in range(6):
            y = y.exp()
    stats = torchoffload.stats()
    assert stats.window_waits >= 1
    assert 4096 <= stats.peak_offload_window_bytes <= 3 * 4096
    del y


def test_the_report_names_what_was_kept(device_under_test: Device, scope):
    x, parameter = leaf(device_under_test, 32, 32), torch.nn.Parameter(leaf(device_under_test, 32, 32).detach())
    with device_under_test.context():
        y = (x @ parameter).exp()
    y.sum().backward()
    report = torchoffload.report()
    assert "parameter" in report
    assert len(report.splitlines()) <= 40
