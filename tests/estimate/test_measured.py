"""Estimates beside steps that were measured on an H200: bytes within a few percent, times within 30%."""

import json
import sys
from pathlib import Path

import pytest

import torchoffload
from torchoffload._estimate.cards import find_card
from torchoffload._estimate.dry_step import Setting
from torchoffload._estimate.estimate import tell, traces_of
from torchoffload._estimate.optimizers import find_optimizer

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

pytest.importorskip("transformers")
from measured import MEASURED  # noqa: E402

GIB = float(2**30)
SLOW = {"A", "ConvNeXt", "GPT-2", "T5", "ViT", "Whisper", "mixture"}  # 5 to 15 s each, on a busy machine with two cores
CASES = [pytest.param(each, marks=pytest.mark.slow) if each in SLOW else each for each in MEASURED]


@pytest.mark.parametrize("name", CASES)
def test_an_estimate_is_near_what_was_measured(name: str):
    measured = MEASURED[name]
    made = measured.make()
    blocks = [each for each in made.model.modules() if type(each).__name__ in made.layers]
    options = {"gpu": "H200", "optimizer": "none", "keep_gradients": True, "blocks": blocks, **made.options}
    found = torchoffload.estimate(made.model, *made.args, **options, **made.kwargs)
    if measured.saved_gib is not None:
        assert found.saved_bytes / GIB == pytest.approx(measured.saved_gib, rel=0.02)
    assert found.plain.peak_bytes / GIB == pytest.approx(measured.plain_gib, rel=0.1)
    assert found.plain.step_ms == pytest.approx(measured.plain_ms, rel=0.3)
    assert found.plain.low_ms <= measured.plain_ms <= found.plain.high_ms
    if measured.checkpointed_gib is not None:
        assert found.checkpointed.peak_bytes / GIB == pytest.approx(measured.checkpointed_gib, rel=0.1)
        assert found.checkpointed.step_ms == pytest.approx(measured.checkpointed_ms, rel=0.3)
        assert found.checkpointed.low_ms <= measured.checkpointed_ms <= found.checkpointed.high_ms


@pytest.mark.parametrize(("name", "file"), [("B", "2026-11-23-h200-fit-B"), ("C", "2026-11-24-h200-fit-C")])
def test_steps_under_fit_are_near_what_was_measured(name: str, file: str):
    made = MEASURED[name].make()
    traces = traces_of(made.model, made.args, made.kwargs, Setting(keeps_gradients=True))
    result = json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text())
    rows = [row for row in result["rows"] if row["way"] == "fit"]
    assert len(rows) > 3
    for row in rows:
        memory_bytes = int(row["budget_gib"] * GIB)
        found = tell(traces, find_card("H200"), find_optimizer("none"), memory_bytes, 100 << 30).fit
        assert found.peak_bytes <= memory_bytes
        assert found.low_ms <= row["step_ms"] <= found.high_ms


def test_six_of_the_measured_steps_were_not_tuned_on():
    held_out = {name for name, each in MEASURED.items() if not each.is_tuned_on}
    assert held_out == {"B", "D", "GPT-2", "Whisper", "large head", "mixture"}
