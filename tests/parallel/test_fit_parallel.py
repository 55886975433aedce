"""fit in two processes: the same losses and gradients, whatever plan each rank takes, and no rank waits for ever."""

import pytest
from processes import Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

moving = pytest.mark.parametrize("move", [False, True], ids=["staying", "moving"])
DIFFERENT = [0.2, 1.0]  # budgets: one rank computes again, and the other one has room for all


# ---- data parallelism ----


@moving
def test_ddp(processes: Processes, move: bool):
    processes.run("fit_parallel:ddp", move=move)


@pytest.mark.parametrize("fits", ["module", "before"])
def test_ddp_of_a_fitted_module(processes: Processes, fits: str):
    processes.run("fit_parallel:ddp", move=True, fits=fits)


def test_ddp_with_a_static_graph(processes: Processes):
    processes.run("fit_parallel:ddp", move=False, static_graph=True)


@moving
def test_ddp_accumulates_over_micro_batches(processes: Processes, move: bool):
    processes.run("fit_parallel:ddp", move=move, sizes="three")


@moving
def test_the_last_micro_batch_is_smaller(processes: Processes, move: bool):
    processes.run("fit_parallel:ddp", move=move, sizes="uneven")


def test_ddp_joins_where_ranks_have_different_numbers_of_batches(processes: Processes):
    processes.run("fit_parallel:ddp_join", move=False)


@moving
@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "no-reshard"])
def test_fsdp2(processes: Processes, reshard: bool, move: bool):
    processes.run("fit_parallel:fsdp2", move=move, reshard_after_forward=reshard)


@pytest.mark.parametrize("options", [{"fits": "before"}, {"mixed": True}, {"sizes": "uneven"}], ids=str)
def test_fsdp2_with_options(processes: Processes, options: dict):
    processes.run("fit_parallel:fsdp2", move=True, **options)


def test_fsdp1(processes: Processes):
    processes.run("fit_parallel:fsdp1", move=True)


# ---- ranks that differ ----


@moving
@pytest.mark.parametrize("parallelism", ["ddp", "fsdp2"])
def test_ranks_follow_different_plans(processes: Processes, parallelism: str, move: bool):
    processes.run(f"fit_parallel:{parallelism}", move=move, budgets=DIFFERENT)


@pytest.mark.parametrize("parallelism", ["ddp", "fsdp2"])
def test_ranks_change_their_plans_at_any_time(processes: Processes, parallelism: str):
    processes.run(f"fit_parallel:{parallelism}", move=True, sizes="uneven steps", restless=1)


@pytest.mark.parametrize("parallelism", ["ddp", "fsdp2"])
def test_the_survey_of_one_rank_takes_longer(processes: Processes, parallelism: str):
    first, last = processes.run(f"fit_parallel:{parallelism}", move=False, differs_on=1)
    surveyed = [rank["phases"].count("survey") for rank in (first, last)]
    # On two H100s both took three steps, since the first one took another step, too.
    assert surveyed[1] >= surveyed[0] if processes.backend == "nccl" else surveyed[1] > surveyed[0]


def test_one_rank_is_surveyed_anew(processes: Processes):
    first, last = processes.run("fit_parallel:fsdp2", move=False, sizes="grows", budgets=[0.0, 0.9])
    assert first["phases"].count("survey") == first["phases"].index("trials")
    assert last["phases"].count("survey") > last["phases"].index("trials")


def test_batches_of_ranks_differ_in_size(processes: Processes):
    processes.run("fit_parallel:fsdp2", move=False, sizes="by rank")


@pytest.mark.parametrize(("parallelism", "fits"), [("ddp", "after"), ("fsdp2", "after"), ("fsdp2", "before")])
def test_one_rank_has_too_little_memory(processes: Processes, parallelism: str, fits: str):
    """Its call of the model raises; the others wait in a collective meanwhile, and the loop calls it again."""
    first, last = processes.run("fit_parallel:too_little", parallelism=parallelism, fits=fits)
    assert first["raised"] == []
    assert len(last["raised"]) == 1
    assert "is too little" in last["raised"][0]


# ---- what looks different than it is ----


def test_a_model_that_repeats_no_module_under_ddp(processes: Processes):
    """The block is the model in DDP. Called in a backward, DDP itself would prepare for one in the midst of it."""
    processes.run("fit_parallel:ddp_of_one_block", move=False)


def test_gradients_are_counted_as_the_rank_holds_them(processes: Processes):
    for told in processes.run("fit_parallel:reckoned_gradients"):
        assert told["reckoned"] == told["held"]
