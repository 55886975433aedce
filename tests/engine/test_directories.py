"""The disk tier with many directories: made, used and trimmed by several threads at once, and given up when idle."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from places import SUPPORT

PROGRAMS = SUPPORT / "directory_programs.py"

pytestmark = pytest.mark.skipif(
    os.environ.get("TORCHOFFLOAD_TESTING") != "1", reason="faults are injected into the test build alone"
)

# The C library fills what is freed with a pattern, at once, so that a use of it is an end and no luck.
FREED_MEMORY_IS_FILLED = {"GLIBC_TUNABLES": "glibc.malloc.perturb=165:glibc.malloc.tcache_count=0"}


@pytest.mark.parametrize(
    "name",
    [
        "stores_made_while_trim_waits",
        pytest.param("stores_made_beside_trim", marks=pytest.mark.slow),
        "directories_that_are_left",
        "directories_that_are_deleted",
        "one_directory_over_and_over",
        "a_directory_that_is_in_use_keeps_its_file",
        "a_deleted_directory_is_full",
        pytest.param("threads_with_directories_in_turn", marks=pytest.mark.slow),
    ],
)
def test_it_is_right_in_the_end(name: str, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, str(PROGRAMS), name, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | FREED_MEMORY_IS_FILLED,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("right\n")
