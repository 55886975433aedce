"""How far the plans for blocks and steps are from the best ones, which an integer or a linear program finds.

The corners of a block are the best choices there are. The plan of a step is the best of a search: it may take 3 %
longer than the best plan of all. Where only a bound is known, a part of a plan's distance from it is the bound's own.
"""

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

pytest.importorskip("scipy", reason="it is in requirements-dev.txt")
pytest.importorskip("torchoffload._C_testing", reason="it is reached through the test build alone")

from moving_bound import bound_with_moving
from plan_oracle import (
    best_of_block,
    best_without_moving,
    kept_of,
    moved_of,
    pages,
    seconds,
    windows_of,
)
from random_steps import AGAIN, MIB, llama_record, llama_step, random_groups, random_step
from torchoffload._core import core
from torchoffload._fit.block.graph import OperatorGroup, block_frontier, group_operators
from torchoffload._fit.plan.step import (
    BlockCall,
    BlockKind,
    CallPlan,
    Output,
    Step,
    StepPlan,
    Way,
    least_plan,
    plan_step,
    survey_plan,
)

NEAR = 0.03  # how much longer than the best plan's a plan's step may take, as a part of it


# ---- one block ----


def assert_best_choices(groups: Sequence[OperatorGroup], draws: Sequence[int], seed: int = 0) -> int:
    """The corners are the best choices for their bytes, and no choice is below the lines between them.

    Returns the number of corners.
    """
    corners = [
        (sum(pages(groups[number].nbytes) for number in kept), ns)
        for _, ns, kept, _ in core.block_frontier(groups, draws)
    ]
    if not corners:
        assert best_of_block(groups, draws) is None
        return 0
    assert best_of_block(groups, draws, page=1) == pytest.approx(corners[0][0], abs=1e-3), "the least bytes"
    assert best_of_block(groups, draws, ns=1) == pytest.approx(corners[-1][1], abs=1e-3), "the least time"
    for kept, ns in corners:
        assert best_of_block(groups, draws, ns=1, most_pages=kept) == pytest.approx(ns, abs=1e-3)
    for (fewer, slow), (more, fast) in itertools.pairwise(corners):
        of_ns, of_page = more - fewer, slow - fast
        assert of_ns > 0
        assert of_page > 0
        best = best_of_block(groups, draws, ns=of_ns, page=of_page)
        assert best == pytest.approx(of_ns * slow + of_page * fewer, rel=1e-7), "below the line"
    chosen = random.Random(seed)
    for _ in range(2):
        budget = chosen.randint(corners[0][0], corners[-1][0])
        best = best_of_block(groups, draws, ns=1, most_pages=budget)
        assert best is not None
        assert best >= on_the_hull(corners, budget) - 1e-3
    return len(corners)


def on_the_hull(corners: Sequence[tuple[int, int]], kept: int) -> float:
    """The time on the line between the corners on either side."""
    for (fewer, slow), (more, fast) in itertools.pairwise(corners):
        if kept <= more:
            return slow - (slow - fast) * (kept - fewer) / (more - fewer)
    return corners[-1][1]


@pytest.mark.parametrize("first", [0, 10, 20])
def test_the_corners_of_random_blocks_are_the_best_choices(first: int):
    counts = [assert_best_choices(*random_groups(seed), seed) for seed in range(first, first + 10)]
    assert max(counts) >= 8
    assert counts.count(0) <= 2, "most can be computed again"


def test_the_corners_of_a_recorded_block_are_the_best_choices():
    made = llama_record()
    grouped = group_operators(made)
    assert grouped is not None
    assert assert_best_choices(grouped, []) >= 5
    corners = [(corner.kept_bytes, corner.recompute_ns) for corner in block_frontier(made)]
    assert corners == [(nbytes, ns) for nbytes, ns, _, _ in core.block_frontier(grouped, [])]


# ---- steps ----


def budgets(step: Step, parts: Sequence[float]) -> Iterator[int]:
    """So much of the memory between the least and what a step takes that keeps all, in whole MiB."""
    all_kept = plan_step(step, 1 << 60)
    assert all_kept is not None
    least_bytes = least_plan(step).peak_bytes
    for part in parts:
        yield least_bytes + int((all_kept.peak_bytes - least_bytes) * part) // MIB * MIB


def planned(step: Step, memory_bytes: int) -> StepPlan:
    """The plan, once it is certain that it fits and takes as long as it says."""
    plan = plan_step(step, memory_bytes)
    assert plan is not None
    spare = (plan.forward_spare_bytes, plan.backward_spare_bytes)
    windows = windows_of(step, plan.calls, plan.window_bytes, memory_bytes, spare)
    assert windows is not None
    own = [(call.offload_bytes, call.reload_bytes) for call in plan.calls]
    assert own == list(zip(windows.offload, windows.reload, strict=True))
    assert (plan.loss_window_bytes, plan.peak_bytes) == (windows.at_loss, windows.peak_bytes)
    assert plan.peak_bytes <= memory_bytes
    assert plan.step_s == pytest.approx(seconds(step, plan.calls, windows), rel=1e-7)  # asks are 1 ns apart
    return plan


def distance(step: Step, memory_bytes: int, best_s: float | None) -> float:
    """How much longer the plan's step takes than this, as a part of it. Nothing is better than the best."""
    assert best_s is not None
    found = planned(step, memory_bytes).step_s / best_s - 1
    if found < -1e-6:
        pytest.fail("the plan beats what no plan can beat: the oracle and the core do not follow the same rules")
    return found


def small_kind(saved_ms: Sequence[float], mib: int) -> BlockKind:
    """Takes 5 ms and 10 ms. Each output that is kept saves so much more time."""
    count = len(saved_ms)
    outputs = tuple(Output((mib * MIB,), 5e-3 * (number + 1) / count) for number in range(count))
    ways = [Way(1e-3 * sum(saved_ms[kept:]), tuple(range(kept)), 0, AGAIN) for kept in range(count)]
    return BlockKind(5e-3, 10e-3, outputs, (*ways, Way(0.0, tuple(range(count)), 0)))


# ---- steps in which nothing moves ----


@pytest.mark.parametrize("number", range(40))
def test_a_step_that_moves_nothing_is_near_the_best(number: int):
    step = random_step(number, may_move=False)
    for memory in budgets(step, (0, 0.05, 0.2, 0.5, 0.8)):
        assert distance(step, memory, best_without_moving(step, memory)) <= NEAR


def test_the_step_of_a_llama_that_moves_nothing_is_a_hundredth_from_the_best():
    step = llama_step(rate=None)
    for memory in budgets(step, (0, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 0.95)):
        assert distance(step, memory, best_without_moving(step, memory)) <= 0.01


def test_where_nothing_moves_there_is_a_plan_if_any_choice_fits():
    for number in range(20):
        step = random_step(number, may_move=False)
        least_bytes = least_plan(step).peak_bytes
        for memory in (least_bytes - 64 * MIB, least_bytes - MIB, least_bytes, least_bytes + MIB):
            assert (plan_step(step, memory) is None) == (best_without_moving(step, memory) is None)


def test_a_call_before_which_nothing_may_be_kept_does_not_hold_back_those_behind_it():
    """In the second call's backward there is no room for anything that the first call keeps."""
    calls = tuple(BlockCall(0, 1000 * MIB, nbytes * MIB) for nbytes in (1000, 1500, 1000, 1000))
    step = Step(kinds=(small_kind((2, 1.9), 64),), calls=calls, may_move=False)
    best_s = best_without_moving(step, 1500 * MIB)
    assert best_s == pytest.approx(4 * 15e-3 + 3.9e-3)
    assert distance(step, 1500 * MIB, best_s) <= NEAR


def test_a_block_too_large_to_be_kept_does_not_hold_back_the_others():
    """What the first block may keep saves the most time a byte, but is larger than the room that there is."""
    calls = tuple(BlockCall(kind, 1000 * MIB, 1000 * MIB) for kind in (0, 1, 1))
    kinds = (small_kind((5,), 600), small_kind((4.9,), 590))
    step = Step(kinds=kinds, calls=calls, loss_bytes=1000 * MIB, may_move=False)
    best_s = best_without_moving(step, 1599 * MIB)
    assert best_s == pytest.approx(3 * 15e-3 + 5e-3 + 4.9e-3)
    assert distance(step, 1599 * MIB, best_s) <= NEAR


# ---- steps in which something moves ----


def choices_of(kind: BlockKind) -> Iterator[CallPlan]:
    """All that one call may do."""
    for number, way in enumerate(kind.ways):
        yield CallPlan(number, (), False)
        for count in (len(way.kept),) if way.is_plain else range(len(way.kept) + 1):
            for moved in itertools.combinations(way.kept, count):
                yield CallPlan(number, moved, True)


def computing_s(step: Step, plans: Sequence[CallPlan]) -> float:
    """How long a step computes under these plans; it takes that long, or longer if it waits."""
    calls = ((step.kinds[call.kind], plan) for call, plan in zip(step.calls, plans, strict=True))
    of_calls = (kind.forward_s + kind.backward_s + kind.ways[plan.way].recompute_s for kind, plan in calls)
    return step.head_s + step.loss_s + sum(of_calls)


def best_of_all(step: Step, memory_bytes: int) -> float:
    """The least time of all plans, with each window that makes a difference.

    Plans that compute for longer than the best one takes are left out.
    """
    best_s = float("inf")
    all_plans = itertools.product(*(list(choices_of(step.kinds[call.kind])) for call in step.calls))
    for least_s, plans in sorted(((computing_s(step, each), each) for each in all_plans), key=lambda pair: pair[0]):
        if least_s >= best_s:
            return best_s
        if windows_of(step, plans, 0, memory_bytes) is None:  # and so with any other window
            continue
        calls = zip(step.calls, plans, strict=True)
        moved = [each.nbytes for call, plan in calls for each in moved_of(step, step.kinds[call.kind], plan)]
        # What is on its way are records that follow each other, so a window between two sums of such is as the lower.
        sums = {sum(moved[begin:end]) for begin, end in itertools.combinations(range(len(moved) + 1), 2)}
        for window in (0, *sorted(sums)):
            windows = windows_of(step, plans, window, memory_bytes)
            assert windows is not None
            step_s = seconds(step, plans, windows)
            assert step_s >= least_s - 1e-9
            best_s = min(best_s, step_s)
    return best_s


@pytest.mark.parametrize("number", range(40))
def test_a_small_step_is_near_the_best_of_all_plans(number: int):
    step = random_step(number, may_move=True, most_calls=3, most_outputs=2)
    for memory in budgets(step, (0.1, 0.5)):
        best_s = best_of_all(step, memory)
        assert distance(step, memory, best_s) <= NEAR
        assert best_s / bound_with_moving(step, memory) - 1 >= -1e-6, "the bound is above a plan"


def test_the_bound_is_not_far_below_the_best_of_all_plans_of_a_small_step():
    """With a few calls it is far below them, since it may take parts of ways and of outputs."""
    distances = []
    for number in range(16):
        step = random_step(number, may_move=True, most_calls=3, most_outputs=2)
        distances += [best_of_all(step, each) / bound_with_moving(step, each) - 1 for each in budgets(step, (0.1, 0.5))]
    assert sum(distances) / len(distances) <= 0.1


def least_of_all(step: Step) -> int:
    """The least peak: each call keeps the least that it may, and there are no windows."""
    plans = []
    for call in step.calls:
        kind = step.kinds[call.kind]
        kept = {plan: kept_of(step, kind, plan) for plan in choices_of(kind)}
        plans.append(min(kept, key=kept.__getitem__))
    windows = windows_of(step, plans, 0, 1 << 60)
    assert windows is not None
    return windows.peak_bytes


def test_where_things_move_there_is_a_plan_if_any_fits():
    for number in range(20):
        step = random_step(number, may_move=True)
        least_bytes = least_of_all(step)
        assert plan_step(step, least_bytes - 1) is None
        for beyond in range(0, 1000, 200):
            assert plan_step(step, least_bytes + beyond * MIB) is not None


def test_what_cannot_move_has_room_before_what_could():
    """Each call has to keep 32 MiB, and could keep 64 MiB more."""
    kind = BlockKind(5e-3, 10e-3, (Output((32 * MIB,), 5e-3, may_move=False),), (Way(1e-3, (0,), 64 * MIB, AGAIN),))
    calls = (BlockCall(0, 1000 * MIB, 1000 * MIB),) * 4
    step = Step(kinds=(kind,), calls=calls, loss_bytes=1000 * MIB, out_bytes_per_s=55e9, in_bytes_per_s=55e9)
    assert least_of_all(step) == 1128 * MIB
    for memory in range(1128, 1400, 32):
        assert distance(step, memory * MIB, best_of_all(step, memory * MIB)) <= NEAR


RATES = (12e9, 25e9, 55e9)  # bytes a second


@pytest.mark.parametrize("rate", RATES)
def test_the_step_of_a_llama_that_moves_is_near_the_bound(rate: float):
    step = llama_step(rate=rate)
    for memory in budgets(step, (0.05, 0.1, 0.2, 0.3, 0.5, 0.7)):
        assert distance(step, memory, bound_with_moving(step, memory)) <= NEAR


@pytest.mark.parametrize(("part", "mean", "worst"), [(0.2, 0.03, 0.1), (0.4, 0.03, 0.1), (0.7, 0.01, 0.04)])
def test_random_steps_that_move_are_not_far_from_the_bound(part: float, mean: float, worst: float):
    """With less memory the bound is further from all plans, since windows have no room for whole records."""
    distances = []
    for number in range(20):
        step = random_step(number, may_move=True)
        distances += [distance(step, memory, bound_with_moving(step, memory)) for memory in budgets(step, (part,))]
    assert max(distances) <= worst
    assert sum(distances) / len(distances) <= mean


# In ms, in three amounts of memory: the steps of the plans that a search finds which simulates each plan to its end.
OF_A_WHOLE_SEARCH = (
    (193.716048, 191.987063, 189.636447),
    (86.984934, 81.604256, 78.197910),
    (84.459457, 76.337820, 74.766157),
    (69.701573, 61.367770, 59.461357),
    (110.413026, 102.743093, 98.032752),
    (287.316324, 279.522554, 276.082816),
    (259.384414, 241.713201, 238.295305),
    (218.020754, 213.623222, 212.353317),
    (146.586330, 131.432068, 129.261589),
    (78.439373, 73.165715, 70.505965),
    (206.190392, 186.119768, 182.969618),
    (165.740985, 160.097609, 158.280929),
)


def test_plans_that_are_left_out_by_a_bound_would_not_have_been_taken():
    for number, wanted_ms in enumerate(OF_A_WHOLE_SEARCH):
        step = random_step(number, may_move=True)
        least_bytes, all_kept = survey_plan(step).peak_bytes, plan_step(step, 1 << 60)
        assert all_kept is not None
        for part, step_ms in zip((0.1, 0.4, 0.7), wanted_ms, strict=True):
            memory = least_bytes + int((all_kept.peak_bytes - least_bytes) * part) // MIB * MIB
            assert planned(step, memory).step_s * 1e3 == pytest.approx(step_ms, abs=2e-6)


def test_a_window_may_be_a_record_and_a_part_of_another():
    """With a window of one record each copy is waited for; 8 MiB more and none is."""
    outputs = (Output((8 * MIB,), 3e-3), Output((32 * MIB,), 6e-3))
    step = Step(
        kinds=(BlockKind(6e-3, 12e-3, outputs, (Way(0.0, (0, 1), 0),)),),
        calls=(BlockCall(0, 1000 * MIB, 1000 * MIB),) * 3,
        loss_bytes=1500 * MIB, out_bytes_per_s=7e9, in_bytes_per_s=7e9,
    )  # fmt: skip
    best_s = best_of_all(step, 1540 * MIB)
    assert best_s == pytest.approx(3 * 18e-3)
    assert distance(step, 1540 * MIB, best_s) <= NEAR


def test_a_block_that_stays_may_stand_between_blocks_that_move():
    """The link takes longer to move a block than the block takes; it has two blocks' time if each other block moves."""
    step = Step(
        kinds=(small_kind((4.9,), 64),), calls=(BlockCall(0, 1000 * MIB, 1000 * MIB),) * 4, loss_bytes=1000 * MIB,
        out_bytes_per_s=8e9, in_bytes_per_s=8e9,
    )  # fmt: skip
    best_s = best_of_all(step, 1192 * MIB)
    assert best_s == pytest.approx(4 * 15e-3)
    assert distance(step, 1192 * MIB, best_s) <= NEAR


# ---- windows ----


def loss_step(loss_mib: int) -> Step:
    """Four blocks that have room for what moves, and a loss that takes so much more than they do."""
    return Step(
        kinds=(small_kind((4.9,), 64),), calls=(BlockCall(0, 1000 * MIB, 1000 * MIB),) * 4,
        loss_bytes=(1000 + loss_mib) * MIB, out_bytes_per_s=16e9, in_bytes_per_s=16e9,
    )  # fmt: skip


def test_a_loss_that_takes_much_does_not_make_the_windows_of_blocks_small():
    """At the loss there is room for nothing; before and behind it there is room for whole blocks."""
    step = loss_step(1000)
    plan = planned(step, 2000 * MIB)
    assert plan.loss_window_bytes == 0
    assert min(call.offload_bytes for call in plan.calls) >= 64 * MIB
    assert plan.moved_bytes == 4 * 64 * MIB
    assert plan.recompute_s == 0
    wait_s = 64 * MIB / 16e9  # of the last block's bytes, out before the loss and back behind it
    assert plan.step_s == pytest.approx(4 * 15e-3 + 2 * wait_s, rel=0.01)
    assert distance(step, 2000 * MIB, best_of_all(step, 2000 * MIB)) <= NEAR


def in_blocks(step: Step, plan: StepPlan) -> int:
    """The most that calls of blocks take with their windows, beside what is kept."""
    calls = zip(step.calls, plan.calls, strict=True)
    return max(
        max(call.forward_bytes + own.offload_bytes, call.backward_bytes + own.reload_bytes) for call, own in calls
    )


def test_windows_are_no_larger_than_is_of_use():
    """The loss leaves room for eight times what suffices to keep the link busy."""
    step = Step(
        kinds=(small_kind((4.9,), 64),), calls=(BlockCall(0, 1000 * MIB, 1000 * MIB),) * 16, loss_bytes=3000 * MIB,
        out_bytes_per_s=20e9, in_bytes_per_s=20e9,
    )  # fmt: skip
    plan = planned(step, 3000 * MIB)
    assert plan.moved_bytes == 16 * 64 * MIB
    assert plan.window_bytes >= 64 * MIB
    assert in_blocks(step, plan) <= 1256 * MIB


@pytest.mark.parametrize("loss_mib", [300, 500, 1000])
def test_a_plan_that_leaves_room_takes_less_memory_in_blocks_and_hardly_longer(loss_mib: int):
    step = loss_step(loss_mib)
    leaving = dataclasses.replace(step, leaves_room=True)
    for memory in range(1000 + loss_mib, 1900, 100):
        plan, other = planned(step, memory * MIB), planned(leaving, memory * MIB)
        assert other.step_s <= plan.step_s * 1.031
        assert in_blocks(step, other) + other.kept_bytes <= in_blocks(step, plan) + plan.kept_bytes


def test_a_plan_that_was_made_for_other_times_has_the_times_of_the_step():
    step = llama_step(rate=25e9)
    slow = dataclasses.replace(step, out_bytes_per_s=step.out_bytes_per_s / 2, in_bytes_per_s=step.in_bytes_per_s / 2)
    for memory in budgets(step, (0.05, 0.3, 0.7)):
        plan = plan_step(slow, memory, timed_as=step)
        assert plan is not None
        spare = (plan.forward_spare_bytes, plan.backward_spare_bytes)
        windows = windows_of(slow, plan.calls, plan.window_bytes, memory, spare)
        assert windows is not None
        assert plan.step_s == pytest.approx(seconds(step, plan.calls, windows), rel=1e-9)
        best = plan_step(step, memory)
        assert best is not None
        assert best.step_s <= plan.step_s * (1 + NEAR)
