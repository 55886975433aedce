"""benchmarks/hooks.py as a user runs it, only smaller."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchoffload

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "hooks.py"
SITE = Path(torchoffload.__file__).parent.parent
SMALL = ["--count", "20", "100", "--rounds", "1", "--repeats", "1", "--tensor-bytes", "64"]
CLASSES = ["parameter", "small", "known", "moved"]
DEVICES = ["disk", pytest.param("cuda", marks=pytest.mark.cuda)]


def benchmark(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=240, env=dict(os.environ)
    )


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
    done = benchmark(*options)
    assert done.returncode == 1
    assert message in done.stderr
