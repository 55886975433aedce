"""report(): one screen, in units, that says what to change when nothing moved."""

import dataclasses
import re

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torchoffload
from torchoffload._observe import report as _report
from torchoffload._observe import stats as _stats


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


def test_a_report_tells_what_went_on_to_a_disk():
    text = _report.format_stats(
        made(bytes_spilled=3 << 30, bytes_fetched=1 << 30, disk_waits=7, disk_wait_s=0.25, records_offloaded=1)
    )
    assert re.search(r"on to the disk +3.0 GiB written, 1.0 GiB read back; 7 waits for it, 0.250 s", text)
    assert "on to the disk" not in _report.format_stats(made(records_offloaded=1))


def test_a_report_on_nothing_says_how_to_begin(monkeypatch):
    monkeypatch.delenv("TORCHOFFLOAD_DISABLE", raising=False)
    text = _report.format_stats(made())
    assert "Enter OffloadActivations around forward" in text
    assert "TORCHOFFLOAD_DISABLE" not in text


def test_a_report_says_that_the_environment_turns_all_off(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHOFFLOAD_DISABLE", "1")
    torchoffload.reset_stats()
    with torchoffload.OffloadActivations(tier="disk", disk_dir=tmp_path, min_offload_size=0):
        torch.ones(64, 64, requires_grad=True).exp().sum().backward()
    last_line = torchoffload.report().splitlines()[-1]
    assert last_line.startswith("NOTHING MOVED. TORCHOFFLOAD_DISABLE=1 is set in the environment")
    assert "unset it" in last_line


class Checkpointed(torch.nn.Module):
    """A model that computes its blocks again in backward, the old way."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in "ab")

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def test_blocks_in_reentrant_checkpoints_are_advised_only_inputs_which_moves_them(tmp_path):
    model = Checkpointed()
    given = {"tier": "disk", "disk_dir": tmp_path, "min_offload_size": 0, "learn": False, "offload_window_bytes": 0}

    def step(**more):
        torchoffload.reset_stats()
        with torchoffload.offload_modules(model, "layers.*", **given, **more):
            model(torch.ones(32, 64, requires_grad=True)).sum().backward()
            return torchoffload.report()

    last_line = step().splitlines()[-1]
    assert last_line.startswith("NOTHING MOVED.")
    assert "If torch.utils.checkpoint calls these modules, add only_inputs=True" in last_line
    assert "NOTHING MOVED" not in step(only_inputs=True)
    assert torchoffload.stats().bytes_offloaded == 2 * 32 * 64 * 4


class KeptOnCtx(torch.autograd.Function):
    """Keeps its tensors as attributes of ctx, out of sight of all saved-tensor hooks."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.kept = {"x": x.exp(), "parts": [x.exp(), torch.eye(3).to_sparse()]}
        ctx.weight = weight
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient, None


def test_a_report_on_demand_tells_what_custom_functions_keep_on_ctx():
    weight = torch.nn.Parameter(torch.ones(1000))
    y = KeptOnCtx.apply(torch.ones(61, 67, requires_grad=True), weight)
    assert "on ctx" not in torchoffload.report()
    text = torchoffload.report(holders=True)
    assert re.search(r"on ctx +31\.9 KiB in attributes of ctx, which no hooks see", text)
    assert "31.9 KiB of KeptOnCtx" in text
    del y
    assert "on ctx" not in torchoffload.report(holders=True)


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("parameter", "Only parameters and buffers were saved"),
        ("small", "Set min_offload_size lower"),
        ("device", 'tier="disk"'),
        ("layout", "no plain storage"),
        ("marked", "never_offload"),
        ("in_backward", "enter the context around forward and around the checkpoint"),
        ("tier_full", "Raise budget_bytes"),
        ("resized", "resizes these storages"),
        ("write_failed", "set disk_dir"),
        ("lives_on", "let go of them before backward"),
        ("needed_soon", "larger batches"),
        ("tape_end", "a smaller reload_window_bytes"),
        ("tape_end", "report(holders=True) before backward tells what custom Functions keep on ctx"),
        ("small_copy", "learn=False"),
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


def tape(**counts):
    """One tape's row."""
    zeros = {field.name: 0 for field in dataclasses.fields(_stats.TapeStats)}
    return _stats.TapeStats(**(zeros | {"records_kept": {}, "bytes_kept": {}} | counts))


def test_what_is_freed_at_the_loss_is_the_latest_tape_that_closed():
    text = _report.format_stats(made(tapes=(tape(bytes_away=2 << 20), tape(bytes_away=3 << 20), tape()), live_tapes=1))
    assert "freed at the loss          3.0 MiB less device memory than without us" in text


def test_pinned_memory_is_told_as_held_and_used():
    text = _report.format_stats(made(pinned_bytes=4 << 20, peak_pinned_bytes=5 << 20, pinned_bytes_used=3 << 20))
    assert "4.0 MiB now, 5.0 MiB at most; 3.0 MiB of it in use" in text


def test_a_report_on_demand_tells_the_saved_tensors_that_are_alive(tmp_path):
    context = torchoffload.OffloadActivations(tier="disk", disk_dir=tmp_path, min_offload_size=1024)
    with context:
        kept_alive = [torch.ones(61, 67, requires_grad=True).exp() for _ in range(3)]
        kept_alive.append(torch.ones(7, requires_grad=True).exp())
    assert "saved tensors alive" not in torchoffload.report()
    text = torchoffload.report(holders=True)
    assert re.search(r"saved tensors alive +4 of 2 kinds, the oldest \d+\.\d s old", text)
    assert re.search(r" 3 x float32 \(61, 67\), 16\.0 KiB each, \d+\.\d to \d+\.\d s old", text)
    assert re.search(r" 1 x float32 \(7,\), 28 B each", text)
    kept_alive.clear()
    assert "saved tensors alive" not in torchoffload.report(holders=True)


def test_what_cannot_be_asked_for_its_shape_is_told_without_one(tmp_path):
    with torchoffload.OffloadActivations(tier="disk", disk_dir=tmp_path, min_offload_size=0):
        sparse = torch.eye(32).to_sparse()
        product = torch.sparse.mm(sparse, torch.ones(32, 32, requires_grad=True))
    assert "1 x float32 without plain storage" in torchoffload.report(holders=True)
    del product


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


def test_what_one_operator_saved_at_once_is_advised_to_be_compiled_in_blocks():
    gib = 2**30
    whole = tape(bytes_kept={"needed_soon": 12 * gib, "tape_end": gib, "parameter": 40 * gib}, bytes_at_once=12 * gib)
    text = _report.format_stats(made(tapes=(whole,), records_offloaded=20, bytes_offloaded=40 * gib))
    assert "12.0 GiB of the latest tape stay on the device" in text
    assert "`for layer in model.model.layers: layer.compile()`" in text
    assert max(len(line) for line in text.splitlines()) <= 120


@pytest.mark.parametrize(
    "counts",
    [
        {"bytes_kept": {"needed_soon": 2 << 30}, "bytes_offloaded": 20 << 30, "bytes_at_once": 20 << 30},
        {"bytes_kept": {"needed_soon": 20 << 30}, "bytes_at_once": 2 << 30},
        {"bytes_kept": {"tape_end": 20 << 30}, "bytes_at_once": 20 << 30},
        {},
    ],
    ids=["most of it moved", "saved block by block", "all of it fits the window", "nothing was saved"],
)
def test_where_that_is_not_so_no_such_advice_is_given(counts):
    assert "layer.compile()" not in _report.format_stats(made(tapes=(tape(**counts),), records_offloaded=1))
