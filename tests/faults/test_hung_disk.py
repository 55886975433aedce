"""A disk that does not answer: Ctrl-C ends the wait, standard error says what is waited for, later steps are right."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from places import SUPPORT

pytestmark = pytest.mark.skipif(
    os.environ.get("TORCHOFFLOAD_TESTING") != "1", reason="faults are injected into the test build alone"
)


def ending_of(name: str, tier: str, directory: Path) -> str:
    """What a program that is right in the end wrote to standard error."""
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "hung_disk_programs.py"), name, tier, str(directory)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("right\n")
    return done.stderr


@pytest.mark.parametrize("tier", ["disk", "spill"])
@pytest.mark.parametrize(
    "name", ["ctrl_c_in_backward", "ctrl_c_in_forward", "a_handler_that_raises_nothing", "other_threads_go_on"]
)
def test_ctrl_c(name: str, tier: str, tmp_path: Path):
    assert ending_of(name, tier, tmp_path) == ""


@pytest.mark.parametrize("tier", ["disk", "spill"])
def test_a_long_wait_is_told_once_with_the_file(tier: str, tmp_path: Path):
    told = ending_of("told_after_a_while", tier, tmp_path)
    assert told.count("\n") == 1
    assert told.startswith("torchoffload: waited 1 s for ")
    assert f"the spill file in '{tmp_path}'" in told
    assert "Ctrl-C ends the wait" in told
