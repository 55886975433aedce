"""Plans for steps in which the backward of some calls comes behind the step's first backward."""

import dataclasses

import pytest
from torch import nn

from torchoffload._fit.model.turns import windows_of
from torchoffload._fit.plan.step import BlockCall, BlockKind, Output, Step, Way, plan_step, survey_plan
from torchoffload._fit.plan.trials import Trial

KEPT = 100  # bytes that a call keeps if it computes nothing again


def kind(forward_s: float) -> BlockKind:
    outputs = (Output((KEPT,), forward_s, (0,)),)
    return BlockKind(forward_s, 2 * forward_s, outputs, (Way(forward_s, (), 10), Way(0.0, (0,), 10)))


def step_of(numbers: list[int], late: tuple[int, ...], *, between_bytes: int = 0) -> Step:
    """Calls of kinds of these numbers, each of which takes another time."""
    calls = tuple(BlockCall(number, 50, 60) for number in numbers)
    kinds = tuple(kind(1.0 + number) for number in range(max(numbers) + 1))
    return Step(kinds=kinds, calls=calls, loss_bytes=70, late=late, between_bytes=between_bytes, may_move=False)


def test_the_core_is_given_the_calls_in_the_reversed_order_of_their_backwards():
    step = step_of([0, 1, 2, 3, 4], late=(1, 3))
    assert step.backward_order == [1, 3, 0, 2, 4]
    assert [each.kind for each in step.as_one_backward.calls] == [1, 3, 0, 2, 4]
    assert step_of([0, 1, 2], late=(0, 1)).as_one_backward.calls == step_of([0, 1, 2], late=()).calls


@pytest.mark.parametrize("memory_bytes", range(100, 700, 50))
def test_a_plan_has_the_calls_in_the_order_of_forward(memory_bytes: int):
    step = step_of([0, 1, 2, 3, 4], late=(1, 3))
    plan = plan_step(step, memory_bytes)
    expected = plan_step(dataclasses.replace(step.as_one_backward, late=()), memory_bytes)
    assert (plan is None) == (expected is None)
    if plan is not None and expected is not None:
        assert [plan.calls[number] for number in step.backward_order] == list(expected.calls)
        assert plan.timed_as(step).step_s == pytest.approx(plan.step_s)


def test_what_a_late_call_keeps_is_there_while_the_others_have_their_backward():
    """Though they were called before it."""
    step = step_of([0, 1, 1, 1], late=(1, 2, 3))
    plan = survey_plan(step)
    keeps = dataclasses.replace(plan, calls=(plan.calls[0], *(dataclasses.replace(plan.calls[1], way=1),) * 3))
    assert sum(step.stays_bytes(keeps, number) for number in step.late) == 3 * (KEPT + 10)
    room = 60 + 3 * (KEPT + 10)  # of the first call's backward, beside all that the late ones keep
    assert all(call.way == 1 for call in plan_step(step, room + KEPT + 20).calls[1:])
    assert not all(call.way == 1 for call in plan_step(step, room - 1).calls[1:])


def test_a_forward_beside_calls_that_are_not_late_counts_with_what_they_keep():
    step = step_of([0, 1, 0], late=(1,))
    large = dataclasses.replace(step, calls=(step.calls[0], BlockCall(1, 500, 60), step.calls[2]))
    assert large.as_one_backward.calls[2].forward_bytes == 500
    last = dataclasses.replace(large, calls=large.calls[:2])
    assert last.as_one_backward.loss_bytes == 500


def test_calls_between_the_backwards_repeat_plans_if_that_fits():
    step = dataclasses.replace(step_of([0, 1], late=(0,), between_bytes=100), between=(1,))
    plan = plan_step(step, 10_000)
    assert all(call.way == 1 for call in plan.calls)
    stays = 2 * (KEPT + 10)
    assert step.room_between(dataclasses.replace(plan, peak_bytes=100 + stays)) == 0
    assert step.room_between(dataclasses.replace(plan, peak_bytes=100 + stays - 1)) == -1


def test_nothing_is_reloaded_ahead_across_a_late_call():
    """Its own backward comes later, beside forwards that no plan counts."""
    step = dataclasses.replace(step_of([0, 0, 1, 0, 0], late=(2,)), may_move=True)
    plan = survey_plan(step)
    ahead = dataclasses.replace(
        plan, calls=tuple(dataclasses.replace(each, reload_bytes=1 << 30) for each in plan.calls)
    )
    blocks = [nn.Identity() for _ in plan.calls]
    windows = windows_of(Trial(step, ahead), blocks)
    moved = step.kinds[0].moved_bytes(plan.calls[0])
    assert moved > 0
    assert [windows[block][0].reload_bytes for block in blocks] == [0, moved, 1 << 30, 0, moved]
