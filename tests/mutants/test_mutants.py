"""Leave out each wait and each check of the engine in turn: its scenario has to notice, in the way that it names."""

import pathlib

import pytest

pytest.importorskip("torchoffload._C_testing", reason="mutants are in the test build alone")

import checks  # noqa: F401  (each names its scenarios)
import generic  # noqa: F401
import graph_tokens  # noqa: F401
import identity  # noqa: F401
import replaying  # noqa: F401
import spilling  # noqa: F401
import tasks  # noqa: F401
import waits  # noqa: F401
from scenario import SCENARIOS, outcome_of

from simulated import mutant_names


@pytest.mark.parametrize("name", mutant_names())
def test_mutant(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert name in SCENARIOS, f"{name} has no scenario"
    played = SCENARIOS[name]

    def new_directory() -> pathlib.Path:
        return tmp_path_factory.mktemp("spill")

    for order in played.orders:
        assert outcome_of(played, new_directory(), order) == played.right, f"with nothing left out, {order}"
        outcome = outcome_of(played, new_directory(), order, mutant_name=name)
        assert outcome != played.right, f"{name} survived, {order}"
        assert outcome == played.wrong, f"{name} was noticed, but not as its scenario says, {order}"
        assert outcome_of(played, new_directory(), order) == played.right, f"after the mutant, {order}"


def test_no_scenario_is_of_a_mutant_that_is_gone() -> None:
    assert set(SCENARIOS) <= set(mutant_names())
