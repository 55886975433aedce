"""Pipelines with offloading: the same losses, gradients and weights under each schedule, and no weight ever moves."""

import pytest
from processes import Processes

SCHEDULES = [
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("around", ["step", "stage", "modules"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(processes: Processes, schedule: str, around: str):
    processes.run("pipelines:schedule_step", schedule=schedule, around=around)


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant", "selective"])
@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_schedules_with_checkpointing(processes: Processes, schedule: str, checkpointing: str):
    processes.run("pipelines:schedule_step", schedule=schedule, around="stage", checkpointing=checkpointing)


def test_a_reentrant_checkpoint_recomputes_in_the_context_around_the_step(processes: Processes):
    """What its backward recomputes is used at once, and stays."""
    processes.run(
        "pipelines:schedule_step",
        schedule="Schedule1F1B", around="step", checkpointing="reentrant", kept_reason="in_backward",
        min_moved_fraction=0.03,
    )  # fmt: skip


@pytest.mark.parametrize("parallelism", ["fsdp2", "ddp"])
@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_schedules_of_data_parallel_stages(processes: Processes, schedule: str, parallelism: str):
    processes.run("pipelines:schedule_step", schedule=schedule, around="step", parallelism=parallelism)


@pytest.mark.parametrize("around", ["step", "stage"])
@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleavedZeroBubble"])
def test_schedules_with_learning(processes: Processes, schedule: str, around: str):
    options = [{"learn": True, "offload_window_bytes": None}] * 2
    processes.run(
        "pipelines:schedule_step",
        schedule=schedule, around=around, steps=6, options_by_rank=options, min_moved_fraction=0.1,
    )  # fmt: skip


@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleZBVZeroBubble"])
def test_options_differ_by_rank(processes: Processes, schedule: str):
    """Later stages hold fewer micro-batches, and may move less."""
    options = [{"offload_window_bytes": 0}, {"min_offload_size": 5000, "max_fwd_stash_size": 3}]
    processes.run(
        "pipelines:schedule_step", schedule=schedule, around="step", options_by_rank=options, min_moved_fraction=0.3
    )


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_one_rank_offloads_nothing(processes: Processes, schedule: str):
    first, last = processes.run("pipelines:first_rank_alone", schedule=schedule)
    assert first["bytes_offloaded"] > 0
    assert last["bytes_offloaded"] == 0


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("contexts", ["one", "one-each"])
def test_loops_of_1f1b(processes: Processes, contexts: str, checkpointing: str | None):
    processes.run("pipelines:loop_1f1b", one_context=contexts == "one", checkpointing=checkpointing)
