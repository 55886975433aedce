"""The soak, short: `make soak` runs it for 10,000 steps."""

import json
import os
import subprocess
import sys

import pytest

from places import SUPPORT

SOAK = SUPPORT / "soak.py"
KINDS = {"after", "inside", "twice", "dropped", "raising", "failing", "micro-batch", "nested"}


def soaked(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SOAK), *arguments], capture_output=True, text=True, timeout=240)


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
