"""The disk tier with many directories: made, used and trimmed by several threads at once, and given up when idle."""

import os
from pathlib import Path

import pytest

from own_process import assert_prints_right
from places import SUPPORT

PROGRAMS = SUPPORT / "directory_programs.py"

pytestmark = pytest.mark.skipif(
    os.environ.get("TORCHOFFLOAD_TESTING") != "1", reason="faults are injected into the test build alone"
)


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
    assert_prints_right(PROGRAMS, name, tmp_path)
