"""The soak, short, which `make soak` runs for 10,000 steps; and what must not grow with what steps make anew.

TORCHOFFLOAD_TEST_LONG gives each kind of churn 20,000 steps.
"""

import json
import os
import subprocess
import sys

import pytest

from churns import CHURNS
from places import SUPPORT

SOAK = SUPPORT / "soak.py"
KINDS = {"after", "inside", "twice", "dropped", "raising", "failing", "micro-batch", "nested"}
STEPS = "20000" if os.environ.get("TORCHOFFLOAD_TEST_LONG") else "1000"


def soaked(*arguments: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SOAK), *arguments], capture_output=True, text=True, timeout=timeout_s)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["disk", "simulated", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_long_run_of_a_varying_model_holds_in_the_end_what_it_held_early(device: str):
    if device == "simulated" and os.environ.get("TORCHOFFLOAD_TESTING") != "1":
        pytest.skip("the simulated device is in the test build alone")
    done = soaked("--device", device, "--steps", "400", "--quiet")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert (result["leaks"], result["differing"]) == ({}, 0)
    assert set(result["kinds"]) == KINDS
    assert result["offloaded_bytes"] > 10 << 20


def test_a_soak_too_short_to_compare_is_refused():
    done = soaked("--steps", "299")
    assert done.returncode == 2
    assert "--steps must be at least 300" in done.stderr


def churns() -> list[object]:
    """Each kind of churn on each device that it is for."""
    return [
        pytest.param(name, device, marks=pytest.mark.cuda if device == "cuda" else ())
        for name, kind in CHURNS.items()
        for device in kind.devices
    ]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("churn", "device"), churns())
def test_what_each_step_makes_anew_leaves_nothing_behind(churn: str, device: str):
    if device == "simulated" and os.environ.get("TORCHOFFLOAD_TESTING") != "1":
        pytest.skip("the simulated device is in the test build alone")
    chosen = ("--churn", churn, "--device", device, "--steps", STEPS, "--quiet")
    if device == "cuda":  # whose driver grows by itself with streams and events
        stock = json.loads(soaked(*chosen, "--stock", timeout_s=500).stdout)
        chosen += ("--stock-growth", str(stock["malloc_growth"]))
    done = soaked(*chosen, timeout_s=1100)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert (result["leaks"], result["differing"]) == ({}, 0)
    assert result["offloaded_bytes"] > int(STEPS) << 8
