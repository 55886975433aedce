"""What fitted models take beside each other, and what a survey takes behind the first backward."""

import gc
import itertools
import warnings

import pytest
import torch
from torch import nn

import torchoffload
from planned_blocks import BLOCKS, WIDTH
from torchoffload._fit import blocks
from torchoffload._fit.budget import Budget
from torchoffload._fit.meter import meter_for
from torchoffload._fit.step import least_plan

DEVICE = torch.device("cpu")
OTHER_DEVICE = torch.device("meta")
MODEL = nn.Identity()


def model_of_blocks(count: int = 4) -> nn.Module:
    return nn.Sequential(*(BLOCKS["transformer"]() for _ in range(count)))


def train(model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(4, 8, WIDTH, requires_grad=True)).square().mean().backward()


def test_models_on_one_device_divide_what_there_is_beyond_the_least():
    first, second = model_of_blocks(), model_of_blocks(6)
    with torchoffload.fit(first, 1 << 50, move=False) as one:
        train(first, 20)
        points = one.frontier()
        middle = (points[0].memory_bytes + points[-1].memory_bytes) // 2
        memory_bytes = int(middle / 0.96) + 1
        one.replan(memory_bytes)
        assert "shared" not in one.report()
        alone = one.plan
        with torchoffload.fit(second, 1 << 50, move=False) as other:
            train(second, 4)
            one.replan(memory_bytes)
            train(first, 20)
            assert one.plan is not None
            assert one.plan.predicted_peak_bytes <= points[0].memory_bytes + (middle - points[0].memory_bytes) // 2
            assert "shared by 2 fitted models" in one.report()
            assert other.phase != "survey"
        one.replan(memory_bytes)
        train(first, 20)
        assert one.plan is not None
        assert one.plan.predicted_peak_bytes > points[0].memory_bytes + (middle - points[0].memory_bytes) // 2
        assert alone is None or one.plan.predicted_peak_bytes >= alone.predicted_peak_bytes


def test_a_survey_goes_on_in_the_least_memory_until_the_other_models_is_done():
    """Else what the plan of one keeps would be in the memory that the other one is said to take at least."""
    first, second = model_of_blocks(2), model_of_blocks(3)
    with torchoffload.fit(first, 1 << 50, move=False) as one, torchoffload.fit(second, 1 << 50, move=False) as other:
        train(first, 8)
        assert one.phase != "survey", "one that is not called is not waited for"
    with torchoffload.fit(first, 1 << 50, move=False) as one, torchoffload.fit(second, 1 << 50, move=False) as other:
        train(second, 1)
        train(first, 6)
        assert (one.phase, other.phase) == ("survey", "survey")
        train(second, 6)
        train(first, 2)
        assert one.phase != "survey"
        assert other.phase != "survey"


def test_a_model_that_takes_a_step_for_five_of_the_others_is_waited_for():
    """As a generator is, whose critic is trained more often."""
    first, second = model_of_blocks(2), model_of_blocks(3)
    with torchoffload.fit(first, 1 << 50, move=False) as one, torchoffload.fit(second, 1 << 50, move=False) as other:
        phases = []
        for _ in range(4):
            train(second, 1)
            phases.append((one.phase, other.phase))
            train(first, 5)
        assert phases[:2] == [("survey", "survey")] * 2
        assert "survey" not in phases[3]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_model_that_takes_no_more_steps_is_not_waited_for(steps: int):
    first, second = model_of_blocks(2), model_of_blocks(3)
    with torchoffload.fit(first, 1 << 50, move=False) as one, torchoffload.fit(second, 1 << 50, move=False) as other:
        train(second, steps)
        train(first, 11)
        assert other.phase == "survey"
        assert one.phase != "survey"


def test_a_model_whose_calls_have_no_backward_takes_no_steps():
    first, second = model_of_blocks(2), model_of_blocks(3)
    with torchoffload.fit(first, 1 << 50, move=False) as one, torchoffload.fit(second, 1 << 50, move=False):
        for _ in range(11):
            second(torch.randn(4, 8, WIDTH, requires_grad=True))
            train(first, 1)
        assert one.phase != "survey"


@pytest.mark.parametrize("removes", [False, True])
def test_a_model_that_is_gone_is_not_waited_for(removes: bool):
    """Its handle may live on."""
    first, second = model_of_blocks(2), model_of_blocks(3)
    other = torchoffload.fit(second, 1 << 50, move=False)
    with torchoffload.fit(first, 1 << 50, move=False) as one:
        train(second, 1)
        if removes:
            other.remove()
        else:
            del second
            gc.collect()
        train(first, 3)
        assert one.phase != "survey"
        assert "shared by" not in one.report()
    assert other.plan is None


def test_budgets_of_other_devices_and_of_removed_models_do_not_count():
    budget, elsewhere = Budget(100, 0.1, DEVICE, MODEL), Budget(100, 0.1, OTHER_DEVICE, MODEL)
    before = Budget(100, 0.1, DEVICE, MODEL)
    budget.share(None, meter_for(DEVICE))
    assert budget.sharer_count == 2
    before.end()
    budget.share(None, meter_for(DEVICE))
    assert budget.sharer_count == 1
    del elsewhere


def test_a_budget_that_is_tightened_leaves_more_and_is_exhausted_at_last():
    budget = Budget(100, 0.04, DEVICE, MODEL)
    budget.tighten(130)
    assert budget.usable_bytes == 66
    assert not budget.is_exhausted
    budget.tighten(90)
    assert budget.usable_bytes == 64
    budget.give(200)
    assert budget.usable_bytes == 192
    budget.tighten(400)
    assert budget.is_exhausted


@pytest.mark.parametrize("always", [False, True])
def test_what_the_allocator_reserves_beyond_its_plan_lowers_the_next_one_and_is_no_error(
    always: bool, monkeypatch: pytest.MonkeyPatch
):
    """A step that fits by what it allocates goes on, whatever the pieces are in which that is reserved."""
    model = model_of_blocks()
    with torchoffload.fit(model, 1 << 50, move=False) as handle, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        train(model, 20)
        points = handle.frontier()
        memory_bytes = int((points[0].memory_bytes + points[-1].memory_bytes) / 2 / 0.96) + 1
        driver, most_bytes = handle._driver, 0

        def reserved_bytes() -> int:
            """Of the largest plan, or of all, more than there is."""
            nonlocal most_bytes
            assert driver._followed is not None
            peak_bytes = driver._followed.step.peak_bytes(driver._followed.plan)
            most_bytes = max(most_bytes, peak_bytes)
            return 3 * memory_bytes if always or peak_bytes == most_bytes else peak_bytes

        monkeypatch.setattr(driver.meter, "reserved_bytes", reserved_bytes)
        handle.replan(memory_bytes)
        train(model, 60)
        assert handle.plan is not None
        if always:
            assert handle.phase == "least memory"
            assert any("too little" in str(each.message) for each in warned)
            assert handle.plan.predicted_peak_bytes == points[0].memory_bytes
            assert "leave" in handle.report()
        else:
            assert handle.phase in ("settled", "least memory")
            assert handle.plan.predicted_peak_bytes < most_bytes


def test_what_a_step_reserved_is_seen_where_the_loop_empties_the_cache(monkeypatch: pytest.MonkeyPatch):
    """Some trainers empty it behind each step. What is reserved as the next one begins says nothing then."""
    model = model_of_blocks()
    with torchoffload.fit(model, 1 << 50, move=False) as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(model, 20)
        points = handle.frontier()
        memory_bytes = int((points[0].memory_bytes + points[-1].memory_bytes) / 2 / 0.96) + 1
        driver = handle._driver
        monkeypatch.setattr(
            driver.meter,
            "reserved_bytes",
            lambda: 2 * memory_bytes if torch._C._current_graph_task_id() != -1 else 0,  # in a backward, and then less
        )
        handle.replan(memory_bytes)
        train(model, 60)
        assert handle.phase == "least memory"


def pipelined(model: nn.Module, sequence: str) -> None:
    """Run calls and backwards in an order such as "FFBFBB", each backward that of the earliest call left."""
    losses = []
    for action in sequence:
        if action == "F":
            losses.append(model(torch.randn(4, 8, WIDTH, requires_grad=True)).square().mean())
        else:
            losses.pop(0).backward()


def test_calls_behind_the_first_backward_of_a_step_take_the_least_memory_in_the_survey(monkeypatch):
    """As in 1F1B: what they keep would be in the memory that every plan is said to take."""
    model = model_of_blocks(3)
    counts, begin, count = [], blocks._Observer.begins_again, itertools.count()

    def counting(observer: blocks._Observer) -> None:
        next(count)
        begin(observer)

    monkeypatch.setattr(blocks._Observer, "begins_again", counting)
    with torchoffload.fit(model, 1 << 50, move=False) as handle:
        while handle.phase == "survey" and len(counts) < 10:
            pipelined(model, "FFBFBFBB")
            counts.append(next(count))
        step = handle._driver.step
        assert step is not None
        assert len(step.calls) == 2 * 3, "the calls until the first backward"
        assert least_plan(step).recompute_s > 0
    counts = [after - before - 1 for before, after in itertools.pairwise(counts)]
    assert max(counts) == 4 * 3, counts
