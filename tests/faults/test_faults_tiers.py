"""Processes whose slots go on to a disk: forks, ends with work under way, kills, and two of them at one directory."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from places import SUPPORT

PROGRAMS = SUPPORT / "tier_programs.py"

pytestmark = pytest.mark.skipif(
    os.environ.get("TORCHOFFLOAD_TESTING") != "1", reason="the store is bound in the test build alone"
)


def command(name: str, directory: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(PROGRAMS), name, str(directory), *arguments]


def ending_of(name: str, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(name, directory, *arguments), capture_output=True, text=True, timeout=120)
    assert not os.listdir(directory), "a file was left behind"
    return done


@pytest.mark.parametrize("name", ["fork_with_transfers_under_way", "fork_in_a_step", "two_processes_at_one_directory"])
def test_it_is_right_in_the_end(name: str, tmp_path: Path):
    done = ending_of(name, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("right\n")


@pytest.mark.parametrize(("how", "code"), [("end", 0), ("exit", 0), ("kill", -signal.SIGKILL)])
def test_an_end_with_a_write_under_way_is_quiet_and_leaves_no_file(tmp_path: Path, how: str, code: int):
    done = ending_of("ends", tmp_path, how)
    assert done.returncode == code, done.stderr
    assert done.stderr == ""


def test_killed_while_writing_it_leaves_no_file(tmp_path: Path):
    with subprocess.Popen(command("writes", tmp_path), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    assert os.listdir(tmp_path) == []
