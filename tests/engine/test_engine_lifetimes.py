"""What becomes of engines, stores and threads of directories, budgets and threads that are left."""

import os
from pathlib import Path

import pytest

from own_process import assert_prints_right
from places import SUPPORT

PROGRAMS = SUPPORT / "lifetime_programs.py"

pytestmark = pytest.mark.skipif(
    os.environ.get("TORCHOFFLOAD_TESTING") != "1", reason="engines are counted by the test build alone"
)


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
    assert_prints_right(PROGRAMS, name, tmp_path)
