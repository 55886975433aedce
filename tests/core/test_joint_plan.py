"""The joint plan: what each block keeps, moves and computes again, beside all possible choices and a step's bounds."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchoffload._core import core
from torchoffload._fit.block.graph import BlockPlan
from torchoffload._fit.plan.step import (
    BlockCall,
    BlockKind,
    Output,
    Step,
    StepPlan,
    Way,
    least_plan,
    plan_step,
    plan_steps,
    times_of,
)
from torchoffload._fit.survey.kinds import hull

MIB = 1 << 20
AGAIN = BlockPlan(operators=())


def kind(*, forward_s: float = 1.0, backward_s: float = 2.0, input_mib: int = 1) -> BlockKind:
    """Keeps its input alone, or one output of two, or both."""
    outputs = (Output((4 * MIB,), 0.25), Output((8 * MIB,), 0.75))
    ways = (
        Way(1.0, (), input_mib * MIB, AGAIN),
        Way(0.4, (0,), input_mib * MIB, AGAIN),
        Way(0.0, (0, 1), input_mib * MIB),
    )
    return BlockKind(forward_s, backward_s, outputs, ways)


def step(count: int = 4, **more: object) -> Step:
    chosen = {
        "kinds": (kind(),),
        "calls": tuple(BlockCall(0, 100 * MIB, 120 * MIB) for _ in range(count)),
        "head_s": 0.5, "loss_s": 0.5, "loss_bytes": 110 * MIB, "may_move": False, "least_moved_bytes": 1,
    }  # fmt: skip
    return Step(**(chosen | more))  # type: ignore[arg-type]


STOCK_S = 0.5 + 4 * 1.0 + 0.5 + 4 * 2.0


def test_with_room_for_all_nothing_is_moved_or_computed_again():
    plan = plan_step(step(may_move=True, out_bytes_per_s=1e9, in_bytes_per_s=1e9), 1 << 40)
    assert plan is not None
    assert (plan.step_s, plan.recompute_s, plan.moved_bytes, plan.window_bytes) == (pytest.approx(STOCK_S), 0, 0, 0)
    assert [call.way for call in plan.calls] == [2] * 4
    assert plan.kept_bytes == 4 * 13 * MIB


def test_without_room_all_but_the_last_block_are_computed_again():
    """What the last block keeps is there at the loss, but beside no other block's backward."""
    plan = plan_step(step(), 123 * MIB)
    assert plan is not None
    assert [call.way for call in plan.calls] == [0, 0, 0, 1]
    assert plan.step_s == pytest.approx(STOCK_S + 3 * 1.0 + 0.4)
    assert plan.kept_bytes == (3 + 5) * MIB
    assert plan.peak_bytes == 123 * MIB  # the last block's backward, beside the inputs of the three before it


def test_what_does_not_fit_has_no_plan():
    least = least_plan(step())
    assert plan_step(step(), least.peak_bytes) is not None
    assert plan_step(step(), least.peak_bytes - 1) is None
    assert plan_step(step(other_bytes=200 * MIB), 199 * MIB) is None


def test_the_last_blocks_backward_needs_no_room_for_its_own():
    """What a block keeps is there in its backward in any plan."""
    for memory in range(123, 180):
        plan = plan_step(step(), memory * MIB)
        assert plan is not None
        kept = [kept_bytes(step(), call) for call in plan.calls]
        assert max(120 * MIB + sum(kept[:number]) for number in range(4)) <= memory * MIB
        assert 110 * MIB + sum(kept) <= memory * MIB
        assert plan.peak_bytes <= memory * MIB


def kept_bytes(of: Step, call: object) -> int:
    kind_of = of.kinds[0]
    return kind_of.kept_bytes(kind_of.ways[call.way]) - sum(  # type: ignore[attr-defined]
        kind_of.outputs[number].nbytes
        for number in call.moved  # type: ignore[attr-defined]
    )


def best_of_all(of: Step, memory_bytes: int) -> float | None:
    """The least time of all choices of ways, with nothing moved."""
    kind_of, best = of.kinds[0], None
    for ways in itertools.product(kind_of.ways, repeat=len(of.calls)):
        kept, fits = 0, True
        for call, way in zip(of.calls, ways, strict=True):
            fits &= call.backward_bytes + kept <= memory_bytes
            kept += kind_of.kept_bytes(way)
            fits &= call.forward_bytes + kept <= memory_bytes
        fits &= of.loss_bytes + kept <= memory_bytes
        if fits:
            taken = sum(way.recompute_s for way in ways)
            best = taken if best is None else min(best, taken)
    return best


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    times=st.lists(st.integers(1, 20), min_size=3, max_size=3),
    count=st.integers(1, 5),
    room=st.integers(0, 60),
)
def test_near_the_best_of_all_choices(sizes: list[int], times: list[int], count: int, room: int):
    """The plans that are looked at have one price for all blocks: at most one step of one block away from the best."""
    outputs = tuple(Output((size * MIB,), 0.1) for size in sizes)
    left = sorted(times[: len(sizes) + 1], reverse=True)
    ways = [Way(float(left[number]), tuple(range(number)), MIB, AGAIN) for number in range(len(left))]
    ways = hull([*ways[:-1], dataclasses.replace(ways[-1], recompute_s=0.0, plan=None)], outputs)
    of = step(count, kinds=(BlockKind(1.0, 2.0, outputs, tuple(ways)),))
    memory = least_plan(of).peak_bytes + room * MIB
    plan, best = plan_step(of, memory), best_of_all(of, memory)
    assert plan is not None
    assert best is not None
    largest_step = max(a.recompute_s - b.recompute_s for a, b in itertools.pairwise(ways)) if len(ways) > 1 else 0
    assert best - 1e-9 <= plan.recompute_s <= best + largest_step + 1e-9


def moving(rate: float, **more: object) -> Step:
    return step(may_move=True, out_bytes_per_s=rate, in_bytes_per_s=rate, **more)


def test_over_a_fast_link_things_move_and_nothing_is_computed_again():
    plan = plan_step(moving(1e12), 160 * MIB)
    assert plan is not None
    assert plan.step_s == pytest.approx(STOCK_S, rel=1e-3)
    assert plan.moved_bytes > 0
    assert plan.recompute_s == 0


def test_over_a_slow_link_nothing_moves():
    plan = plan_step(moving(1.0), 140 * MIB)
    assert plan is not None
    assert plan.moved_bytes == 0
    assert plan.recompute_s > 0


def test_moving_is_never_worse_than_not_to_move():
    for memory in range(123, 180, 3):
        still, both = plan_step(step(), memory * MIB), plan_step(moving(40e6), memory * MIB)
        assert still is not None
        assert both is not None
        assert both.step_s <= still.step_s + 1e-9


def test_more_memory_never_takes_longer():
    before: StepPlan | None = None
    for memory in range(120, 200, 2):
        plan = plan_step(moving(20e6), memory * MIB)
        assert before is None or (plan is not None and plan.step_s <= before.step_s + 1e-9)
        assert plan is None or plan.peak_bytes <= memory * MIB
        before = plan


def test_what_is_small_does_not_move():
    plan = plan_step(moving(1e12, least_moved_bytes=5 * MIB), 160 * MIB)
    assert plan is not None
    outputs = kind().outputs
    assert all(outputs[number].nbytes >= 5 * MIB for call in plan.calls for number in call.moved)


def test_what_the_tier_has_no_room_for_does_not_move():
    plan = plan_step(moving(1e12, tier_bytes=9 * MIB), 160 * MIB)
    assert plan is not None
    assert plan.moved_bytes <= 9 * MIB


def test_all_or_nothing_of_a_plain_block_moves():
    for memory in range(125, 175, 5):
        plan = plan_step(moving(1e12), memory * MIB)
        assert plan is not None
        for call in plan.calls:
            if call.way == 2:
                assert call.moved in {(), (0, 1)}


def test_two_kinds_have_one_price():
    """Of two kinds the one whose bytes save more time keeps first."""
    cheap = kind()
    dear = dataclasses.replace(
        cheap, ways=tuple(dataclasses.replace(w, recompute_s=9 * w.recompute_s) for w in cheap.ways)
    )
    calls = tuple(BlockCall(number % 2, 100 * MIB, 120 * MIB) for number in range(4))
    plan = plan_step(step(kinds=(cheap, dear), calls=calls), 136 * MIB)
    assert plan is not None
    assert min(call.way for call in plan.calls[1::2]) >= max(call.way for call in plan.calls[::2])


def test_a_kind_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="no such kind"):
        plan_step(step(calls=(BlockCall(1, 0, 0),)), MIB)
    with pytest.raises(ValueError, match="no way to run"):
        plan_step(step(kinds=(BlockKind(1.0, 2.0, (), ()),)), MIB)
    with pytest.raises(ValueError, match="no such output"):
        plan_step(step(kinds=(BlockKind(1.0, 2.0, (), (Way(0.0, (3,), 0),)),)), MIB)
    for rate in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="link"):
            core.joint_plans([moving(rate)], MIB)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(seconds: float):
    """Such times have no order, so that any plan might be taken for the best one."""
    first = kind()
    of_kind = [
        dataclasses.replace(first, forward_s=seconds),
        dataclasses.replace(first, backward_s=seconds),
        dataclasses.replace(first, outputs=(Output((MIB,), seconds), *first.outputs[1:])),
        dataclasses.replace(first, ways=(dataclasses.replace(first.ways[0], recompute_s=seconds), *first.ways[1:])),
    ]
    of_step = [{"kinds": (each,)} for each in of_kind]
    of_step += [{name: seconds} for name in ("head_s", "loss_s", "end_s", "latency_s")]
    for more in of_step:
        for ask in (lambda of: plan_step(of, 123 * MIB), least_plan):
            with pytest.raises(ValueError, match="times of a step must be finite and not negative"):
                ask(step(**more))


def test_times_of_zero_are_times():
    nothing = BlockKind(0.0, 0.0, (Output((4 * MIB,), 0.0),), (Way(0.0, (), MIB, AGAIN), Way(0.0, (0,), MIB)))
    of = step(kinds=(nothing,), head_s=0.0, loss_s=0.0, may_move=True, out_bytes_per_s=1e9, in_bytes_per_s=1e9)
    for memory in (120, 125, 1 << 20):
        plan = plan_step(of, memory * MIB)
        assert plan is None or plan.peak_bytes <= memory * MIB
    assert least_plan(of).step_s >= 0


@pytest.mark.parametrize("nbytes", [1 << 61, 1 << 62, 1 << 63, (1 << 64) - 1])
def test_bytes_that_cannot_be_added_up_are_refused(nbytes: int):
    first = kind()
    of_step: list[dict[str, object]] = [
        {"kinds": (dataclasses.replace(first, outputs=(Output((nbytes,), 0.1), *first.outputs[1:])),)},
        {"kinds": (dataclasses.replace(first, outputs=(Output((nbytes // 2,) * 3, 0.1), *first.outputs[1:])),)},
        {"kinds": (dataclasses.replace(first, ways=(Way(0.0, (), nbytes),)),)},
        {"calls": (BlockCall(0, nbytes, 0),)},
        {"calls": (BlockCall(0, 0, nbytes),)},
        {"loss_bytes": nbytes},
    ]
    for more in of_step:
        with pytest.raises(ValueError, match="too many to be added up"):
            plan_step(step(**more), 1 << 60)


@pytest.mark.parametrize("nbytes", [0, 1, 1 << 40])
def test_bytes_of_any_size_have_a_plan(nbytes: int):
    outputs = (Output((nbytes,), 0.1), Output((), 0.2))
    of = moving(1e9, kinds=(BlockKind(1.0, 2.0, outputs, (Way(1.0, (), nbytes, AGAIN), Way(0.0, (0, 1), nbytes))),))
    assert plan_step(of, 1 << 60) is not None
    least = least_plan(of)
    assert plan_step(of, least.peak_bytes) is not None


def test_the_least_memory_is_the_least():
    for rate in (1e12, 1e7):
        for of in (step(), moving(rate), moving(rate, least_moved_bytes=2 * MIB), moving(rate, loss_bytes=150 * MIB)):
            least = least_plan(of)
            assert plan_step(of, least.peak_bytes) is not None
            assert plan_step(of, int(least.peak_bytes * 0.998)) is None


def test_a_plan_is_timed_in_a_step_of_other_times_and_refused_in_another_step():
    first = step(calls=(BlockCall(0, 100 * MIB, 120 * MIB),) * 3)
    plan = plan_step(first, 1 << 40)
    assert plan is not None
    twice = plan.timed_as(first.with_times(pace=2.0))
    assert twice.step_s == pytest.approx(2 * plan.step_s)
    assert twice.calls == plan.calls
    other = step(calls=(BlockCall(0, 100 * MIB, 120 * MIB),) * 2)
    with pytest.raises(ValueError, match="another number of calls"):
        plan.timed_as(other)
    for wrong in ({"way": 99}, {"moved": (99,)}):
        calls = (dataclasses.replace(plan.calls[0], **wrong), *plan.calls[1:])
        with pytest.raises(ValueError, match="does not exist"):
            dataclasses.replace(plan, calls=calls).timed_as(first)


def test_steps_are_planned_at_once_as_one_after_the_other():
    of = [moving(rate, leaves_room=leaves_room) for rate in (7e6, 2e7, 1e9) for leaves_room in (False, True)]
    of.append(step(other_bytes=1 << 40))  # has no plan
    assert plan_steps(of, 140 * MIB) == [plan_step(each, 140 * MIB) for each in of[:-1]]
    assert plan_steps([], 140 * MIB) == []
    with pytest.raises(ValueError, match="rates of the link"):
        plan_steps([of[0], moving(0.0)], 140 * MIB)


def test_the_times_of_plans_are_those_in_steps_of_other_times():
    of = moving(7e6)
    plans = plan_steps([of, moving(2e7), step()], 135 * MIB)
    factors = [(1.0, 1.0, 1.0), (0.7, 2.5, 0.85), (1.3, 0.4, 0.5)]
    others = [of.with_times(pace=pace, again=again, rate=rate) for pace, again, rate in factors]
    assert times_of(of, plans, factors) == [[plan.timed_as(other).step_s for plan in plans] for other in others]
