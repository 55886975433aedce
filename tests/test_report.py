"""report(): one screen, in units, that says what to change when nothing moved."""

import dataclasses

import pytest
import torch

import torchoffload
from torchoffload import _report, _stats


def made(**counts):
    """Statistics with these counts, and zeros."""
    zeros = {field.name: 0 for field in dataclasses.fields(_stats.OffloadStats)}
    return _stats.OffloadStats(**(zeros | {"records_kept": {}, "bytes_kept": {}, "tapes": ()} | counts))


def test_a_report_fits_a_screen_and_says_what_moved(tmp_path):
    context = torchoffload.OffloadActivations(tier="disk", disk_dir=tmp_path, min_offload_size=0)
    torchoffload.reset_stats()
    for _ in range(20):
        with context:
            loss = torch.ones(64, 64, requires_grad=True).exp().sum()
        loss.backward()
    lines = torchoffload.report().splitlines()
    assert len(lines) <= 30
    assert max(len(line) for line in lines) <= 120
    assert "NOTHING MOVED" not in torchoffload.report()


def test_a_report_names_units_and_reasons():
    text = _report.format_stats(
        made(
            records_offloaded=3,
            bytes_offloaded=3 * 2**30 // 2,
            records_kept={"small": 7, "parameter": 2, "marked": 0},
            bytes_kept={"small": 2048, "parameter": 5 * 2**20, "marked": 0},
        )
    )
    assert "1.5 GiB in 3 records" in text
    assert text.index("kept: parameter") < text.index("kept: small")  # the largest first
    assert "2.0 KiB in 7 records; smaller than min_offload_size" in text
    assert "marked" not in text


def test_a_report_on_nothing_says_how_to_begin():
    assert "Enter OffloadActivations around forward" in _report.format_stats(made())


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("parameter", "Only parameters and buffers were saved"),
        ("small", "Set min_offload_size lower"),
        ("device", 'tier="disk"'),
        ("layout", "no plain storage"),
        ("marked", "never_offload"),
        ("in_backward", "enter it around forward"),
        ("host_full", "Raise host_budget_bytes"),
        ("resized", "resizes these storages"),
        ("write_failed", "set disk_dir"),
    ],
)
def test_a_report_says_what_to_change_when_nothing_moved(reason, advice):
    kept = {"records_kept": {reason: 1, "parameter": 3}, "bytes_kept": {reason: 10, "parameter": 1000}}
    last_line = _report.format_stats(made(**kept)).splitlines()[-1]
    assert f"NOTHING MOVED, mostly because of {reason!r}" in last_line
    assert advice in last_line


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB"), (5 << 40, "5.0 TiB")]
)
def test_bytes_are_told_in_units(count, text):
    assert _report.human_bytes(count) == text


def test_a_report_on_demand_names_what_holds_a_graph(tmp_path):
    context = torchoffload.OffloadActivations(tier="disk", disk_dir=tmp_path, min_offload_size=0)
    torchoffload.reset_stats()
    with context:
        kept_in_a_list = [torch.ones(61, 67, requires_grad=True).exp() for _ in range(3)]
        context_row = torchoffload.report().splitlines()[-1]
    assert context_row.endswith("  alive")
    assert "with a history" not in torchoffload.report()
    assert "3 x float32 (61, 67) of ExpBackward0" in torchoffload.report(holders=True)
    kept_in_a_list.clear()
    text = torchoffload.report(holders=True)
    assert "(61, 67)" not in text
    assert not text.splitlines()[-1].endswith("  alive")


def test_tensors_that_cannot_be_asked_for_their_history_hold_up_no_report():
    base = torch.ones(4, requires_grad=True).clone()
    first, _ = base.split(2)  # one of several views: it must not be written to
    with torch.no_grad():
        first.zero_()
    with pytest.raises(RuntimeError):
        _ = first.grad_fn
    assert "with a history" in torchoffload.report(holders=True)
