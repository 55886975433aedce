"""fit of blocks that communicate: all ranks of a group compute the same calls again."""

import pytest
from processes import Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

moving = pytest.mark.parametrize("move", [False, True], ids=["staying", "moving"])
DIFFERENT = [0.2, 1.0]  # budgets: one rank computes again, and the other one has room for all
HANGS_S = 20  # where ranks that do not agree would wait for each other for ever


@moving
def test_tensor_parallel(processes: Processes, move: bool):
    processes.run("fit_communicating:tensor_parallel", move=move)


def test_sequence_parallel(processes: Processes):
    processes.run("fit_communicating:tensor_parallel", move=True, sequence=True)


def test_tensor_parallel_with_different_budgets(processes: Processes):
    processes.run("fit_communicating:tensor_parallel", move=False, budgets=DIFFERENT)


@pytest.mark.parametrize("shards", [1, 2])
def test_fsdp2_and_tensor_parallel(processes: Processes, shards: int):
    processes.run("fit_communicating:sharded_tensor_parallel", move=False, shards=shards)


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "no-reshard"])
def test_fsdp2_of_parts_of_blocks(processes: Processes, reshard: bool):
    processes.run("fit_communicating:nested_fsdp2", move=False, reshard_after_forward=reshard, timeout_s=HANGS_S)


def test_collectives_inside_of_operators(processes: Processes):
    """DTensor calls them where operators need what is on other ranks, and the modes of a block do not see them."""
    processes.run("fit_communicating:collectives_inside_of_operators", move=False, budgets=DIFFERENT, timeout_s=HANGS_S)


@pytest.mark.parametrize("way", ["functional", "function", "in place"])
def test_blocks_with_collectives(processes: Processes, way: str):
    processes.run("fit_communicating:synced", way=way, budgets=DIFFERENT, timeout_s=HANGS_S)


def test_collectives_that_come_after_the_survey(processes: Processes):
    """A rank that computed them again would call them more often than one that does not."""
    processes.run("fit_communicating:synced", way="functional", is_late=True, budgets=DIFFERENT, timeout_s=HANGS_S)


@pytest.mark.parametrize("step", [1, 4, 7])
def test_a_block_that_communicates_is_replaced(processes: Processes, step: int):
    """The ranks survey the new one together."""
    processes.run("fit_communicating:replaced", step=step, budgets=DIFFERENT, timeout_s=HANGS_S)
