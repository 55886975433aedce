"""fit of the stages of pipelines: several micro-batches wait for their backward at once."""

import pytest
from processes import Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

moving = pytest.mark.parametrize("move", [False, True], ids=["staying", "moving"])


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
