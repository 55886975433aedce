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
    step = dataclasses.replace(step_of([0, 1], late=(0,), between_bytes=100), between=((1,),))
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


def test_calls_between_that_wait_for_their_backward_count_in_that_of_late_calls():
    step = dataclasses.replace(step_of([0, 1, 0], late=(1, 2), between_bytes=100), between=((0,),))
    plan = plan_step(step, 10_000)
    stays = KEPT + 10
    large = dataclasses.replace(step, calls=(*step.calls[:2], BlockCall(0, 50, 300)))
    assert all(each.room_between(plan) == plan.peak_bytes - 100 - 3 * stays for each in (step, large))
    waits = dataclasses.replace(large, between_waits=True)
    assert waits.room_beside_late(plan) == plan.peak_bytes - (300 + stays), "the first late call is there, too"
    assert waits.room_between(plan) == plan.peak_bytes - (300 + 2 * stays)


def windows_for(step: Step, *, peak_bytes: int = 1 << 40) -> list[tuple[int, ...]]:
    """The windows of each call, and of those between, under a plan that moves all it can in windows of 1000 bytes."""
    plan = survey_plan(step)
    calls = tuple(dataclasses.replace(each, offload_bytes=1000, reload_bytes=1000) for each in plan.calls)
    plan = dataclasses.replace(plan, calls=calls, loss_window_bytes=1000, peak_bytes=peak_bytes)
    blocks = [nn.Identity() for _ in calls]
    windows = windows_of(Trial(step, plan), blocks)
    first = [tuple(windows[block][0]) for block in blocks]
    counts = dict.fromkeys(range(len(blocks)), 0)
    for number in (number for together in step.between for number in together):
        counts[number] += 1
        first.append(tuple(windows[blocks[number]][counts[number]]))
    return first


@pytest.mark.parametrize(("late", "wanted"), [((1, 2), 0), ((0, 1), 1000), ((1,), 10), ((0, 2), 0), ((), 1000)])
def test_the_window_at_the_loss_has_no_more_than_the_first_backward_lets_go(late: tuple[int, ...], wanted: int):
    step = dataclasses.replace(step_of([0, 0, 0], late=late), may_move=True)
    assert windows_for(step)[-1][1] == wanted


def test_a_backward_may_begin_between_calls_that_follow_each_other_in_forward():
    step = dataclasses.replace(step_of([0, 0, 0], late=(2,)), may_move=True)
    together, apart = (dataclasses.replace(step, between=between) for between in (((0, 1),), ((0,), (1,))))
    assert [after for _, after, _ in windows_for(together)[3:]] == [1000, 0]
    assert [after for _, after, _ in windows_for(apart)[3:]] == [0, 0]


def test_the_forward_of_a_late_call_runs_beside_all_that_was_called_before():
    step = dataclasses.replace(step_of([0, 0], late=(1,)), may_move=False)
    assert [offload for offload, _, _ in windows_for(step)] == [1000, 1000]
    assert [offload for offload, _, _ in windows_for(step, peak_bytes=50 + 2 * 10 + 7)] == [17, 7]


def test_late_calls_reload_ahead_what_there_is_room_for_if_no_other_call_moves():
    moving = dataclasses.replace(step_of([0, 0], late=(0,)), may_move=True)
    still = dataclasses.replace(moving, may_move=False)
    for step, wanted in ((moving, 1000), (still, 5)):
        stays = sum(step.stays_bytes(survey_plan(step), number) for number in range(2))
        window = 1000  # at the loss
        assert windows_for(step, peak_bytes=70 + stays + window + 5)[0][2] == wanted


def test_late_calls_reload_ahead_what_there_is_room_for_beside_calls_that_wait():
    step = dataclasses.replace(step_of([0, 0], late=(1,), between_bytes=100), between=((0,),), may_move=True)
    assert windows_for(step, peak_bytes=100 + 5)[1][2] == 1000
    assert windows_for(dataclasses.replace(step, between_waits=True), peak_bytes=100 + 5)[1][2] == 5
