"""Plans for calls that are smaller than the one that was surveyed, and what trials tell of each other."""

from typing import Any

import pytest
import torch

import torchoffload
from devices import Device
from fitted_models import Model
from gradients import Run, execute
from planned_blocks import BLOCKS, WIDTH
from torchoffload._fit.graph import BlockPlan
from torchoffload._fit.scaling import SmallerCalls, scaled
from torchoffload._fit.step import Call, Kind, Output, Step, Way, plan_step
from torchoffload._fit.trials import Candidates, Trial

MIB = 1 << 20
AGAIN = BlockPlan(operators=())
OUTPUTS = (Output((4 * MIB, 4 * MIB), 0.5),)
BLOCK = Kind(1.0, 2.0, OUTPUTS, (Way(0.5, (), MIB, AGAIN), Way(0.0, (0,), MIB)))
STEP = Step(
    kinds=(BLOCK,),
    calls=(Call(0, 40 * MIB, 60 * MIB),) * 4,
    loss_bytes=40 * MIB,
    fixed={"weights": 20 * MIB},
    may_move=False,
)


def settled(memory_bytes: int) -> Trial:
    plan = plan_step(STEP, memory_bytes)
    assert plan is not None
    return Trial(STEP, plan)


def test_what_the_link_carries_is_the_same_part_of_less():
    output = Output((4 * MIB,), 0.5, link_share=0.75)
    kind = Kind(1.0, 2.0, (output,), (Way(0.0, (0,), MIB),), input_link_share=0.5)
    half = scaled(Step(kinds=(kind,), calls=()), 0.5).kinds[0]
    assert (half.outputs[0].link_share, half.input_link_share) == (0.75, 0.5)


def test_what_is_fixed_does_not_shrink():
    half = scaled(STEP, 0.5)
    assert half.calls[0] == Call(0, 30 * MIB, 40 * MIB)
    assert half.loss_bytes == 30 * MIB
    assert half.kinds[0].outputs[0].sizes == (2 * MIB, 2 * MIB)
    assert [way.input_bytes for way in half.kinds[0].ways] == [MIB // 2] * 2
    assert [way.recompute_s for way in half.kinds[0].ways] == [0.25, 0.0]


def test_the_smaller_a_call_the_less_is_computed_again():
    largest = settled(64 * MIB)
    smaller = SmallerCalls(largest, 1000, 64 * MIB)
    assert largest.again_count == 3
    assert smaller.plan_for(1000) is largest
    counts = [smaller.plan_for(size).again_count for size in (950, 800, 600, 400, 200)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 0
    assert smaller.plan_for(400) is smaller.plan_for(390), "sizes that are nearly the same share a plan"
    for size in range(100, 1000, 50):
        assert smaller.plan_for(size).plan.peak_bytes <= 64 * MIB


@pytest.mark.devices("disk", "simulated-late", "cuda")
def test_a_smaller_batch_follows_a_plan_of_its_own(device_under_test: Device):
    """Once the plan of the largest batch is settled, smaller ones come, alone and while another waits for backward."""
    told: list[Any] = []

    def program(run: Run):
        model = run.module(lambda: Model(BLOCKS["transformer"]))
        handle = None
        if not run.stock:
            handle = torchoffload.fit(model, 1 << 50, move=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(24):
            if handle is not None and handle.phase != "survey" and not told:
                told.append("replanned")
                points = handle.frontier()
                handle.replan(int(points[0].memory_bytes / (1 - 0.04)) + 1)
            batch = 8 if step < 16 or step % 2 else 2
            x = run.tensor(batch, 8, WIDTH)
            loss = model(x)
            if step == 22:
                loss = loss + model(run.tensor(8, 8, WIDTH))
            loss.backward()
            run.check(loss=loss.detach(), gradients=[each.grad for each in model.parameters()])
            if handle is not None and step >= 16:
                told.append(handle._driver._followed.again_count)
            optimizer.step()
            optimizer.zero_grad()
        if handle is not None:
            assert handle.phase == "settled"
            handle.remove()

    stock = execute(program, device_under_test, stock=True)
    assert "exception" not in stock
    assert execute(program, device_under_test, stock=False) == stock
    _, *counts = told
    small, large = counts[0], counts[1]
    assert counts[:6] == [small, large] * 3
    assert small <= large
    assert counts[6] == large, "a small call is followed by a large one before its backward"


def test_a_plan_that_waits_for_memory_is_compared_with_one_that_takes_less():
    candidates = Candidates()
    candidates.add(STEP, plan_step(STEP, 90 * MIB))
    trial = candidates.take_next()
    assert trial is not None
    assert not candidates.ends_timed_step()
    assert candidates.ends_timed_step()
    assert not candidates.note_time(13.0, waits_for_memory=True)
    assert candidates.ends_timed_step()
    assert candidates.note_time(12.9, waits_for_memory=False)
    assert candidates.add_better(STEP, 90 * MIB, learns=True) is STEP
    other = candidates.take_next()
    assert other is not None
    assert other.plan.peak_bytes <= 0.94 * 90 * MIB
    time_twice(candidates, 14.0, waits_for_memory=True)
    assert candidates.measured == [trial, other]
    candidates.add_better(STEP, 90 * MIB, learns=False)  # the fastest one waited for memory: one takes still less
    third = candidates.take_next()
    assert third is not None
    assert third.plan.peak_bytes < other.plan.peak_bytes
    time_twice(candidates, 12.0, waits_for_memory=False)
    candidates.add_better(STEP, 90 * MIB, learns=False)
    assert candidates.take_next() is None, "the fastest one has room"


def test_no_plan_that_takes_less_is_looked_for_where_one_had_room_and_was_slower():
    candidates = Candidates()
    candidates.add(STEP, plan_step(STEP, 90 * MIB))
    candidates.take_next()
    time_twice(candidates, 13.0, waits_for_memory=True)
    candidates.add_better(STEP, 90 * MIB, learns=False)
    assert candidates.take_next() is not None
    time_twice(candidates, 14.0, waits_for_memory=False)
    candidates.add_better(STEP, 90 * MIB, learns=False)
    assert candidates.take_next() is None


def test_what_was_learned_is_not_part_of_the_pace():
    candidates = Candidates()
    for memory_bytes in (64 * MIB, 72 * MIB, 80 * MIB):
        candidates.add(STEP, plan_step(STEP, memory_bytes))
    taken = [trial.plan.step_s + 0.4 * trial.again_count for trial in candidates.trials]
    for step_s in taken:
        candidates.take_next()
        time_twice(candidates, step_s, waits_for_memory=False)
    step = candidates.add_better(STEP, 80 * MIB, learns=True)
    assert step is not STEP
    assert candidates.take_pace() == pytest.approx(1.0)
    assert [trial.plan.step_s for trial in candidates.trials[:3]] == pytest.approx(taken)
    assert plan_step(step, 90 * MIB).step_s == pytest.approx(12.0), "nothing is computed again, and takes no longer"
    assert candidates.add_better(step, 80 * MIB, learns=True) is step, "it is learned once"


def test_a_plan_that_takes_less_is_looked_for_until_it_takes_too_little():
    candidates = Candidates()
    candidates.add(STEP, plan_step(STEP, 90 * MIB))
    tried = 0
    while candidates.take_next() is not None:
        time_twice(candidates, 13.0 + tried, waits_for_memory=True)
        candidates.add_better(STEP, 90 * MIB, learns=False)
        tried += 1
    assert tried == 4, "those of 0.94, 0.83 and 0.78 of the memory; with 0.88 the plan is that of 0.94"


def test_predictions_take_the_pace_of_the_plans_that_were_tried():
    candidates = Candidates()
    for memory_bytes in (70 * MIB, 90 * MIB):
        candidates.add(STEP, plan_step(STEP, memory_bytes))
    quick, waiting = candidates.trials
    predicted = [trial.plan.step_s for trial in candidates.trials]
    candidates.take_next()
    time_twice(candidates, 1.25 * predicted[0], waits_for_memory=False)
    candidates.take_next()
    time_twice(candidates, 9.0 * predicted[1], waits_for_memory=True)
    does = quick.does, waiting.does
    assert candidates.take_pace() == pytest.approx(1.25), "a step in which memory was given back tells less"
    assert [trial.plan.step_s for trial in candidates.trials] == pytest.approx([1.25 * each for each in predicted])
    assert (quick.does, waiting.does) == does
    slower = STEP.at_pace(1.25)
    assert quick.step == slower
    assert slower.pace == 1.25
    for memory_bytes in (70 * MIB, 80 * MIB, 90 * MIB):
        before, after = plan_step(STEP, memory_bytes), plan_step(slower, memory_bytes)
        assert after.step_s == pytest.approx(1.25 * before.step_s), "all times change alike, and so do copies"
        assert after.recompute_s == pytest.approx(1.25 * before.recompute_s)
        assert after.calls == before.calls


def test_without_measured_plans_predictions_stay_as_they_are():
    candidates = Candidates()
    candidates.add(STEP, plan_step(STEP, 90 * MIB))
    plan = candidates.trials[0].plan
    assert candidates.take_pace() == 1.0
    assert candidates.trials[0].plan == plan


def time_twice(candidates: Candidates, step_s: float, *, waits_for_memory: bool) -> None:
    """Have the plan that is tried take so long."""
    candidates.ends_timed_step()
    for _ in range(2):
        candidates.ends_timed_step()
        is_last = candidates.note_time(step_s, waits_for_memory=waits_for_memory)
    assert is_last
