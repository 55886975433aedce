"""What becomes of engines, stores and threads of directories, budgets and threads that are left."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from places import SUPPORT

PROGRAMS = SUPPORT / "lifetime_programs.py"

pytestmark = pytest.mark.skipif(
    os.environ.get("TORCHOFFLOAD_TESTING") != "1", reason="engines are counted by the test build alone"
)

# The C library fills what is freed with a pattern, at once, so that a use of it is an end and no luck.
FREED_MEMORY_IS_FILLED = {"GLIBC_TUNABLES": "glibc.malloc.perturb=165:glibc.malloc.tcache_count=0"}


@pytest.mark.parametrize(
    "name",
    [
        "deleted_directories_leave_nothing",
        "deleted_directories_of_spilled_slots_leave_nothing",
        "sixteen_directories_are_remembered",
        "sixteen_directories_of_spilled_slots_are_remembered",
        "a_context_keeps_what_was_learned_in_its_directory",
        "a_graph_keeps_the_engine_of_its_directory",
        "a_graph_keeps_the_engine_of_its_spilled_slots",
        "a_pending_copy_keeps_its_engine",
        "budgets_share_an_engine",
        "an_engine_is_there_for_the_call_that_uses_it",
        "an_engine_is_there_for_the_call_around_another_one",
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
