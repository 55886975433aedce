"""benchmarks/disk.py as a user runs it, only smaller, on the spill file of CPU tensors; and beyond_memory.py."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from places import BENCHMARKS
from refusals import refusal


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "disk.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=dict(os.environ))


def test_rates_to_a_disk_stand_beside_its_own(tmp_path: Path):
    path = tmp_path / "disk.json"
    options = ["--device", "cpu", "--gib", "0.125", "--rounds", "1", "--workload", "none", "--json", str(path)]
    done = run("--directory", str(tmp_path), *options)
    assert done.returncode == 0, done.stderr
    rates = json.loads(path.read_text())["rates"]
    (measured,) = rates["rounds"]
    assert measured["ours"]["out_bytes"] >= measured["ours"]["in_bytes"] > 0
    assert all(measured[who][f"{way}_bytes_per_s"] > 0 for who in ("disk", "ours") for way in ("out", "in"))
    assert re.search(r"^ours / disk: [\d.]+ out, [\d.]+ in$", done.stdout, re.MULTILINE)
    assert os.listdir(tmp_path) == ["disk.json"]


def test_the_step_beside_a_disk_needs_a_gpu():
    status, errors = refusal("disk.py", "--device", "cpu", "--gib", "0.125", "--workload", "D")
    assert status == 2
    assert "needs a GPU" in errors


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_comparison_of_what_fits_on_a_gpu_needs_one():
    status, errors = refusal("beyond_memory.py")
    assert status == 2
    assert "a GPU is needed" in errors


def test_what_fits_on_a_gpu_is_compared_with_sensible_numbers():
    status, errors = refusal("beyond_memory.py", "--steps", "0")
    assert status == 2
    assert "at least 1" in errors
