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
ENOUGH_TO_SETTLE = ["--steps", "20"]  # fit surveys 2 or 3 steps, and tries at most 5 plans for 3 steps each
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
    """The numbers of the plain, the offloaded and the fitted run in the table's row ``name``; None if not settled."""
    beside = r"([\d.]+)(?: \w+, \d+% of plain)?"
    row = re.search(rf"^{name} +([\d.]+)(?: \w+)? +{beside} +(?:{beside}|not settled)$", table, re.MULTILINE)
    assert row, f"no row {name!r} in:\n{table}"
    return [None if number is None else float(number) for number in row.groups()]


def _assert_same_and_smaller(child, picture, tier):
    assert child.returncode == 0, child.stderr + child.stdout
    assert "identical" in child.stdout
    assert "NOT THE SAME" not in child.stdout
    plain_ms, offloaded_ms, fitted_ms = _row(child.stdout, "step time")
    assert plain_ms > 0
    assert offloaded_ms > 0
    plain_mib, offloaded_mib, fitted_mib = _row(child.stdout, "peak memory")
    assert offloaded_mib < plain_mib
    assert fitted_mib > 0
    assert len(set(_row(child.stdout, "last loss"))) == 1
    given = re.search(r"^fit +given (\d+) MiB", child.stdout, re.MULTILINE)
    assert given, child.stdout
    if tier == "disk":  # on CUDA the smallest models have less to choose from than the allocator rounds up
        assert fitted_ms > 0
        reckoned = re.search(r", reckons with (\d+) MiB; it settled after \d+ steps", child.stdout)
        assert reckoned, child.stdout
        assert int(reckoned[1]) <= int(given[1]) < plain_mib
    assert picture.read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.parametrize("tier", TIERS)
def test_the_gpt_ends_the_same_with_less_memory_and_draws_its_picture(tier, tmp_path):
    picture = tmp_path / "pictures" / "memory.png"
    options = [*SMALL, *ENOUGH_TO_SETTLE, *_tier(tier, tmp_path), "--out", str(picture), "--report"]
    child = _run("train_gpt.py", *options)
    _assert_same_and_smaller(child, picture, tier)
    assert re.search(r"offloaded +[\d.]+ [MG]iB in [1-9]", child.stdout), child.stdout  # the report: something moved
    assert "torchoffload.fit: GPT, " in child.stdout  # the report of fit


def _assert_one_bit_is_told(child, run):
    assert child.returncode == 1, child.stderr
    assert re.search(rf"NOT THE SAME: 1 of \d+ differ in the {run} run, the first is bytes.weight$", child.stdout, re.M)
    assert "identical" not in child.stdout


def test_one_flipped_bit_of_the_offloaded_run_is_not_the_same_also_where_fit_has_not_settled(tmp_path):
    options = [*SMALL, "--tier", "disk", "--out", str(tmp_path / "memory.png"), "--perturb", "offloaded"]
    child = _run("train_gpt.py", *options)
    _assert_one_bit_is_told(child, "offloaded")
    assert _row(child.stdout, "step time")[2] is None
    assert "no plan was settled on in 3 steps, the phase is 'trials': give more --steps" in child.stdout


def test_one_flipped_bit_of_a_fitted_run_with_too_little_memory_is_not_the_same(tmp_path):
    options = [*SMALL, "--tier", "disk", "--out", str(tmp_path / "memory.png"), "--perturb", "fit"]
    child = _run("train_gpt.py", *options, "--fit-memory-mib", "8")
    _assert_one_bit_is_told(child, "fit")
    assert "given 8 MiB, which is too little for this step; it ran in the least memory" in child.stdout
    assert "8.0 MiB is too little" in child.stderr


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("tier", TIERS)
def test_the_llama_ends_the_same_with_less_memory(tier, tmp_path):
    picture = tmp_path / "memory.png"
    child = _run("train_llama.py", *SMALL, *ENOUGH_TO_SETTLE, *_tier(tier, tmp_path), "--out", str(picture))
    _assert_same_and_smaller(child, picture, tier)


def test_the_llama_without_transformers_says_what_to_install(tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError('planted')\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    child = _run("train_llama.py", *SMALL, "--tier", "disk", PYTHONPATH=path)
    assert child.returncode == 1
    assert "this example needs transformers: pip install transformers" in child.stderr


def test_a_failing_run_ends_the_example_with_its_name_and_status(tmp_path):
    missing = tmp_path / "missing"
    child = _run("train_gpt.py", *SMALL, "--tier", "disk", "--disk-dir", str(missing))
    assert child.returncode == 1
    assert "the offloaded run failed with exit status 1" in child.stderr
    assert str(missing) in child.stderr
