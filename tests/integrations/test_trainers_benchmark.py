"""benchmarks/trainers.py as a user runs it, only smaller: each trainer has its row, and every bit is the same."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from places import BENCHMARKS
from trainings import need

need("transformers", "accelerate", "peft", "trl", "datasets", "lightning")

SCRIPT = BENCHMARKS / "trainers.py"
TRAINERS = ["transformers", "peft", "trl", "lightning", "accelerate", "loop"]
SHAPE = "A:hidden=64,intermediate=256,layers=2,tokens=64,heads=8,kv_heads=4,vocabulary=512"
TIERS = ["disk", pytest.param("host", marks=pytest.mark.cuda)]


def benchmark(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=280)


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
def test_each_trainer_has_a_row(tier: str, tmp_path: Path):
    result = tmp_path / "result.json"
    batch = 64 if tier == "host" else 4  # larger tensors, since the smaller ones stay
    options = ["--workload", f"{SHAPE},batch={batch}", "--steps", "3", "--json", str(result)]
    done = benchmark("--tier", tier, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in TRAINERS:
        assert re.search(rf"^{name} +identical +", done.stdout, re.MULTILINE), done.stdout
    measured = json.loads(result.read_text())["trainers"]
    assert list(measured) == TRAINERS
    for compared in measured.values():
        assert compared["offloaded"]["moved_bytes"] > 0
        assert compared["plain"]["moved_bytes"] == 0
        assert len(compared["plain"]["losses"]) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--workload", "E"], "no workload 'E'"), (["--steps", "0"], "--steps is at least 1")],
)
def test_wrong_options_are_refused(options: list[str], message: str):
    done = benchmark(*options)
    assert done.returncode == 1
    assert message in done.stderr
