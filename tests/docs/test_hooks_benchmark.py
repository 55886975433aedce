"""benchmarks/hooks.py and hooks_in_step.py as a user runs them, only smaller."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import torchoffload
from places import BENCHMARKS
from refusals import refusal

SITE = Path(torchoffload.__file__).parent.parent
SMALL = ["--count", "20", "100", "--rounds", "1", "--repeats", "1", "--tensor-bytes", "64"]
CLASSES = ["parameter", "small", "known", "moved"]
DEVICES = ["disk", pytest.param("cuda", marks=pytest.mark.cuda)]


def benchmark(*options: str, script: str = "hooks.py") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=dict(os.environ))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_each_class_and_count_has_a_row_beside_another_build(device: str, tmp_path: Path):
    result = tmp_path / "result.json"
    disk = ["--disk-dir", str(tmp_path)] if device == "disk" else []
    done = benchmark("--device", device, *SMALL, *disk, "--against", str(SITE), "--json", str(result))
    assert done.returncode == 0, done.stderr
    for kind in CLASSES:
        for count in (20, 100):
            row = re.search(rf"^{kind} +{count} +(.*)$", done.stdout, re.MULTILINE)
            assert row, f"no row {kind} {count} in:\n{done.stdout}"
            assert len(row[1].split()) == 2 * len(["stock", "+empty", "+ours", "+other", "ratio"])
    kept = json.loads(result.read_text())
    assert {name: len(processes) for name, processes in kept["processes"].items()} == {"torchoffload": 1, "against": 1}
    assert [row["class"] for row in kept["medians_us"]["torchoffload"]] == [kind for kind in CLASSES for _ in range(2)]
    assert kept["processes"]["against"][0]["hardware"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--count", "0"], "--count, --rounds and --repeats are at least 1"),
        (["--tensor-bytes", "3"], "--tensor-bytes at least 4"),
        (["--against", "missing"], "there is no torchoffload in missing"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_measured(options: list[str], message: str):
    status, errors = refusal("hooks.py", *options)
    assert status == 1
    assert message in errors


SHAPE = "hidden=128,intermediate=256,layers=2,batch=1,tokens=128,heads=4,kv_heads=2,vocabulary=256"
needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("device", DEVICES)
def test_a_whole_step_has_a_row_for_each_kind_of_hooks(device: str, tmp_path: Path):
    result = tmp_path / "result.json"
    options = ["--tier", "disk" if device == "disk" else "host", "--min-offload-size", "16384"]
    options += ["--workload", f"A:{SHAPE}", "--repeats", "2", "--warm-up", "1", "--json", str(result)]
    done = benchmark(*options, script="hooks_in_step.py")
    assert done.returncode == 0, done.stderr
    rows = {row["hooks"]: row for row in json.loads(result.read_text())["rows"]}
    assert list(rows) == ["empty", "torchoffload", "torchoffload, learn=False"]
    for name, row in rows.items():
        assert re.search(rf"^{name} ", done.stdout, re.MULTILINE), done.stdout
        assert row["handles"] == rows["torchoffload"]["handles"] > 0
    every = rows["torchoffload, learn=False"]
    assert every["records_offloaded"] > 0
    assert every["handles"] == every["records_offloaded"] + every["records_deduplicated"] + every["kept"]


@needs_transformers
@pytest.mark.parametrize(
    ("options", "message"),
    [(["--repeats", "0"], "are at least 1"), (["--tier", "disk", "--workload", "E"], "no workload 'E'")],
)
def test_a_whole_step_refuses_wrong_options(options: list[str], message: str):
    status, errors = refusal("hooks_in_step.py", *options)
    assert status == 1
    assert message in errors
