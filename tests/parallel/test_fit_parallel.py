"""fit in two processes: the same losses and gradients, whatever plan each rank takes, and no rank waits for ever."""

import pytest
from processes import Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

moving = pytest.mark.parametrize("move", [False, True], ids=["staying", "moving"])
DIFFERENT = [0.2, 1.0]  # budgets: one rank computes again, and the other one has room for all
HANGS_S = 20  # where ranks that do not agree would wait for each other for ever


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
    assert last["phases"].count("survey") > first["phases"].count("survey")


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


# ---- pipelines ----


@moving
@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_pipelines(processes: Processes, schedule: str, move: bool):
    processes.run("fit_pipelines:schedule_step", schedule=schedule, move=move)


def test_a_rank_with_two_stages(processes: Processes):
    """Each of them is fitted by itself."""
    processes.run("fit_pipelines:schedule_step", schedule="ScheduleInterleaved1F1B", move=True)


def test_a_pipeline_that_goes_through_each_graph_twice(processes: Processes):
    processes.run("fit_pipelines:schedule_step", schedule="ScheduleDualPipeV", move=False)


def test_stages_follow_different_plans(processes: Processes):
    processes.run("fit_pipelines:schedule_step", schedule="Schedule1F1B", move=False, budgets=[0.0, 1.0])


def test_stages_are_sharded(processes: Processes):
    processes.run("fit_pipelines:schedule_step", schedule="ScheduleGPipe", move=True, parallelism="fsdp2")


@moving
def test_the_last_micro_batch_of_a_pipeline_is_smaller(processes: Processes, move: bool):
    processes.run("fit_pipelines:uneven_loop", move=move)


def test_each_micro_batch_of_a_pipeline_follows_its_own_plan(processes: Processes):
    """All micro-batches of a step are planned together, where their backwards come after all forwards."""
    processes.run(
        "fit_pipelines:schedule_step", schedule="ScheduleGPipe", move=False, budgets=[0.5, 0.5], follows_plan=True
    )


# ---- blocks that communicate ----


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


# ---- what looks different than it is ----


def test_a_model_that_repeats_no_module_under_ddp(processes: Processes):
    """The block is the model in DDP. Called in a backward, DDP itself would prepare for one in the midst of it."""
    processes.run("fit_parallel:ddp_of_one_block", move=False)


def test_gradients_are_counted_as_the_rank_holds_them(processes: Processes):
    for told in processes.run("fit_parallel:reckoned_gradients"):
        assert told["reckoned"] == told["held"]
