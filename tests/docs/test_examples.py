"""The examples, run as a user runs them, only smaller."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from places import EXAMPLES

# Saved tensors of 1 MiB and more: what the disk tier moves by default.
SMALL = ["--steps", "3", "--layers", "2", "--width", "128", "--batch", "8", "--tokens", "256", "--threads", "1"]
LEAST_MEMORY = ["--offload-window-mib", "0", "--reload-window-mib", "0"]
TIERS = ["disk", pytest.param("host", marks=pytest.mark.cuda)]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

pytestmark = pytest.mark.slow


def _tier(name, directory):
    """The options that choose a tier; skips where its device is missing.

    Windows of nothing: on a busy disk the default ones stay full, and hold about what these small models save.
    """
    if name == "disk":
        return ["--tier", "disk", "--disk-dir", str(directory), *LEAST_MEMORY]
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return ["--tier", "host", *LEAST_MEMORY]


def _run(script, *options, **environment):
    return subprocess.run(
        [sys.executable, str(EXAMPLES / script), *options],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def _row(table, name):
    """The plain and the offloaded number of the table's row ``name``."""
    row = re.search(rf"^{name} +([\d.]+)(?: \w+)? +([\d.]+)", table, re.MULTILINE)
    assert row, f"no row {name!r} in:\n{table}"
    return float(row[1]), float(row[2])


def _assert_same_and_smaller(child, picture):
    assert child.returncode == 0, child.stderr + child.stdout
    assert "identical" in child.stdout
    assert "NOT THE SAME" not in child.stdout
    plain_ms, offloaded_ms = _row(child.stdout, "step time")
    assert plain_ms > 0
    assert offloaded_ms > 0
    plain_mib, offloaded_mib = _row(child.stdout, "peak memory")
    assert offloaded_mib < plain_mib
    plain_loss, offloaded_loss = _row(child.stdout, "last loss")
    assert plain_loss == offloaded_loss
    assert picture.read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.parametrize("tier", TIERS)
def test_the_gpt_ends_the_same_with_less_memory_and_draws_its_picture(tier, tmp_path):
    picture = tmp_path / "pictures" / "memory.png"
    child = _run("train_gpt.py", *SMALL, *_tier(tier, tmp_path), "--out", str(picture), "--report")
    _assert_same_and_smaller(child, picture)
    assert re.search(r"offloaded +[\d.]+ [MG]iB in [1-9]", child.stdout), child.stdout  # the report: something moved


def test_one_flipped_bit_is_not_the_same(tmp_path):
    child = _run("train_gpt.py", *SMALL, "--tier", "disk", "--out", str(tmp_path / "memory.png"), "--perturb")
    assert child.returncode == 1, child.stderr
    assert "NOT THE SAME: 1 of" in child.stdout
    assert "identical" not in child.stdout


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("tier", TIERS)
def test_the_llama_ends_the_same_with_less_memory(tier, tmp_path):
    picture = tmp_path / "memory.png"
    child = _run("train_llama.py", *SMALL, *_tier(tier, tmp_path), "--out", str(picture))
    _assert_same_and_smaller(child, picture)


def test_the_llama_without_transformers_says_what_to_install(tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError('planted')\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    child = _run("train_llama.py", *SMALL, "--tier", "disk", PYTHONPATH=path)
    assert child.returncode == 1
    assert "pip install '.[examples]'" in child.stderr


def test_a_failing_run_ends_the_example_with_its_name_and_status(tmp_path):
    missing = tmp_path / "missing"
    child = _run("train_gpt.py", *SMALL, "--tier", "disk", "--disk-dir", str(missing))
    assert child.returncode == 1
    assert "the offloaded run failed with exit status 1" in child.stderr
    assert str(missing) in child.stderr
