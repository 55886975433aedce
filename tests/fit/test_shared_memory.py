"""What fitted models take beside each other, and what a survey takes behind the first backward."""

import gc
import itertools

import pytest
import torch
from torch import nn

import torchoffload
from planned_blocks import BLOCKS, WIDTH
from torchoffload._devices import meter_for
from torchoffload._fit.block import blocks
from torchoffload._fit.plan.budget import Budget
from torchoffload._fit.plan.step import least_plan

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
        with torchoffload.fit(second, 1 << 50, move=False) as other:
            train(second, 4)
            one.replan(memory_bytes)
            train(first, 20)
            assert one.plan is not None
            shared_bytes = points[0].memory_bytes + (middle - points[0].memory_bytes) // 2
            assert one.plan.predicted_peak_bytes <= shared_bytes
            assert "shared by 2 fitted models" in one.report()
            assert other.phase != "survey"
        one.replan(memory_bytes)
        train(first, 20)
        assert "shared" not in one.report()
        # The memory that plans may take. Whether a plan takes it depends on the times of tiny steps.
        assert one._driver.budget.room_bytes(one._driver.step) > shared_bytes


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


def test_a_model_that_is_left_over_loses_its_share_and_a_note_names_it():
    """As one of a notebook's cell that ran before, whose handle or optimizer keeps it alive."""
    first, second = model_of_blocks(2), model_of_blocks(3)
    with torchoffload.fit(first, 1 << 50, move=False) as one, torchoffload.fit(second, 1 << 50, move=False) as other:
        for _ in range(6):
            train(first, 1)
            train(second, 1)
        train(second, 10)
        assert "shared by 2 fitted models" in other.report()
        train(second, 40)
        assert other.phase == "settled"
        assert "shared by" not in other.report()
        assert other.report().count("Sequential, which was fitted before, takes no more steps") == 1
        train(first, 2)
        train(second, 2)
        assert "shared by 2 fitted models" in other.report(), "it is trained again, and has its share again"
        train(second, 16)
        assert (one.phase, other.phase) == ("settled", "settled")


def test_models_that_take_turns_keep_their_shares():
    budget, other = Budget(100, 0.1, DEVICE, MODEL), Budget(100, 0.1, DEVICE, MODEL)
    budget.share(None, meter_for(DEVICE))
    for _ in range(4):
        for _ in range(31):
            budget.note_step()
        assert not budget.has_other_sharers
        other.note_step()
    for _ in range(32):
        budget.note_step()
    assert budget.has_other_sharers
    assert budget.left_over == [type(MODEL).__name__]
    budget.share(None, meter_for(DEVICE))
    assert budget.sharer_count == 1
    assert not budget.has_other_sharers
    other.end()
    assert not budget.has_other_sharers, "what had no share leaves none"
    budget.end()


def test_budgets_of_other_devices_and_of_removed_models_do_not_count():
    budget, elsewhere = Budget(100, 0.1, DEVICE, MODEL), Budget(100, 0.1, OTHER_DEVICE, MODEL)
    before = Budget(100, 0.1, DEVICE, MODEL)
    budget.share(None, meter_for(DEVICE))
    assert budget.sharer_count == 2
    before.end()
    budget.share(None, meter_for(DEVICE))
    assert budget.sharer_count == 1
    del elsewhere


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
