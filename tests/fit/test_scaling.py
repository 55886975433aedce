"""Plans for calls that are smaller than the one that was surveyed, and what trials tell of each other."""

from typing import Any

import pytest
import torch

import torchoffload
from devices import Device
from fitted_models import Model
from gradients import Run, execute
from planned_blocks import BLOCKS, WIDTH
from torchoffload._fit.block.graph import BlockPlan
from torchoffload._fit.plan.scaling import OtherSizes, scaled
from torchoffload._fit.plan.step import BlockCall, BlockKind, Output, Step, Way, plan_step
from torchoffload._fit.plan.trials import Trial

MIB = 1 << 20
AGAIN = BlockPlan(operators=())
OUTPUTS = (Output((4 * MIB, 4 * MIB), 0.5),)
BLOCK = BlockKind(1.0, 2.0, OUTPUTS, (Way(0.5, (), MIB, AGAIN), Way(0.0, (0,), MIB)))
STEP = Step(
    kinds=(BLOCK,),
    calls=(BlockCall(0, 40 * MIB, 60 * MIB),) * 4,
    loss_bytes=40 * MIB,
    fixed={"weights": 20 * MIB},
    may_move=False,
)


def settled(memory_bytes: int) -> Trial:
    plan = plan_step(STEP, memory_bytes)
    assert plan is not None
    return Trial(STEP, plan)


def test_what_is_fixed_does_not_shrink():
    half = scaled(STEP, 0.5)
    assert half.calls[0] == BlockCall(0, 30 * MIB, 40 * MIB)
    assert half.loss_bytes == 30 * MIB
    assert half.kinds[0].outputs[0].sizes == (2 * MIB, 2 * MIB)
    assert [way.input_bytes for way in half.kinds[0].ways] == [MIB // 2] * 2
    assert [way.recompute_s for way in half.kinds[0].ways] == [0.25, 0.0]


def test_the_smaller_a_call_the_less_is_computed_again():
    largest = settled(64 * MIB)
    others = OtherSizes(largest, 64 * MIB)
    assert largest.again_count == 3
    assert others.trial_for(1.0) is largest

    def planned(share: float) -> Trial:
        found = others.trial_for(share)
        assert found is not None
        return found

    counts = [planned(share).again_count for share in (0.95, 0.8, 0.6, 0.4, 0.2)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 0
    assert planned(0.4) is planned(0.39), "sizes that are nearly the same share a plan"
    for percent in range(10, 100, 5):
        assert planned(percent / 100).peak_bytes <= 64 * MIB


def test_a_step_that_is_a_little_larger_has_a_plan_if_one_fits_and_else_is_surveyed():
    others = OtherSizes(settled(80 * MIB), 80 * MIB)
    larger = others.trial_for(1.1)
    assert larger is not None
    assert larger.peak_bytes <= 80 * MIB
    assert others.trial_for(1.3) is None
    assert OtherSizes(settled(64 * MIB), 62 * MIB).trial_for(1.1) is None


def test_where_nothing_is_planned_a_larger_step_is_surveyed_once_it_may_not_have_room():
    plain = settled(1 << 40)
    assert plain.is_plain
    others = OtherSizes(plain, 200 * MIB)
    assert others.trial_for(1.5) is plain
    assert others.trial_for(3.0) is None


def test_a_plan_that_no_other_one_may_take_the_place_of_is_followed_by_all_smaller_calls():
    largest = settled(64 * MIB)
    others = OtherSizes(largest, 0)
    assert others.trial_for(0.1) is largest
    assert others.trial_for(1.1) is None


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
        for step in range(23):
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
