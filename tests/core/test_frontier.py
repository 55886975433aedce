"""Frontier: the best choices of what a block keeps and computes again, beside brute force over all choices."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchoffload._core import core

PAGE = 4096
Point = tuple[int, int]  # bytes kept, nanoseconds computed again


@dataclasses.dataclass(frozen=True)
class Group:
    duration_ns: int
    nbytes: int
    inputs: tuple[int, ...] = ()
    may_keep: bool = True
    may_recompute: bool = True
    is_needed: bool = False


def chain(count: int, **options: bool) -> list[Group]:
    """Groups that each read the one before; the last is needed."""
    groups = [Group(10 * (number + 1), PAGE, (number - 1,) if number else (), **options) for number in range(count)]
    return [*groups[:-1], dataclasses.replace(groups[-1], is_needed=True)]


def points(groups: Sequence[Group], draws: Iterable[int] = ()) -> list[Point]:
    return [(nbytes, ns) for nbytes, ns, _, _ in core.block_frontier(groups, list(draws))]


def is_allowed(groups: Sequence[Group], draws: Sequence[int], choices: str) -> bool:
    """`choices`: for each group "k" (kept), "r" (computed again) or "s" (skipped)."""
    for group, choice in zip(groups, choices, strict=True):
        if (choice == "k" and not group.may_keep) or (choice == "r" and not group.may_recompute):
            return False
        if choice == "s" and group.is_needed:
            return False
        if choice == "r" and any(choices[each] == "s" for each in group.inputs):
            return False
    drawn = [choices[group] for group in draws]
    return "s" not in drawn and all(not (a != "r" and b == "r") for a, b in itertools.pairwise(drawn))


def every_point(groups: Sequence[Group], draws: Sequence[int]) -> set[Point]:
    found = set()
    for choices in map("".join, itertools.product("krs", repeat=len(groups))):
        if is_allowed(groups, draws, choices):
            kept = sum(group.nbytes for group, choice in zip(groups, choices, strict=True) if choice == "k")
            again = sum(group.duration_ns for group, choice in zip(groups, choices, strict=True) if choice == "r")
            found.add((kept, again))
    return found


def hull(of: set[Point]) -> list[Point]:
    """The corners of the lower convex hull, from the least bytes to the least time."""
    corners: list[Point] = []
    for point in sorted(of):
        if corners and point[1] >= corners[-1][1]:
            continue
        while len(corners) > 1:
            (x1, y1), (x2, y2) = corners[-2:]
            if (y1 - y2) * (point[0] - x2) > (y2 - point[1]) * (x2 - x1):
                break
            corners.pop()
        corners.append(point)
    return corners


@st.composite
def blocks(draw: st.DrawFn) -> tuple[list[Group], list[int]]:
    count = draw(st.integers(1, 7))
    groups = [
        Group(
            duration_ns=draw(st.integers(0, 9)),
            nbytes=PAGE * draw(st.integers(0, 6)),
            inputs=tuple(
                draw(st.sets(st.integers(0, count - 1).filter(lambda each, own=number: each != own), max_size=2))
            ),
            may_keep=draw(st.integers(0, 3)) > 0,
            may_recompute=draw(st.integers(0, 4)) > 0,
            is_needed=draw(st.booleans()),
        )
        for number in range(count)
    ]
    return groups, draw(st.lists(st.integers(0, count - 1), max_size=3))


@given(blocks())
@settings(max_examples=400, deadline=None)
def test_the_corners_are_those_of_all_choices(block):
    groups, draws = block
    corners = core.block_frontier(groups, draws)
    assert [(nbytes, ns) for nbytes, ns, _, _ in corners] == hull(every_point(groups, draws))
    for nbytes, ns, kept, recomputed in corners:
        choices = "".join(
            "k" if number in kept else "r" if number in recomputed else "s" for number in range(len(groups))
        )
        assert is_allowed(groups, draws, choices)
        assert nbytes == sum(groups[number].nbytes for number in kept)
        assert ns == sum(groups[number].duration_ns for number in recomputed)


def test_what_is_needed_is_kept_or_computed_again():
    assert points(chain(3)) == [(0, 60), (PAGE, 0)]


def test_what_nobody_needs_costs_nothing():
    assert points([Group(10, PAGE), Group(20, PAGE)]) == [(0, 0)]


def test_a_group_in_the_middle_is_kept_so_that_what_is_before_it_need_not_run():
    groups = [Group(1000, PAGE), Group(1, PAGE, (0,)), Group(1, 9 * PAGE, (1,), is_needed=True)]
    assert points(groups) == [(0, 1002), (PAGE, 1), (9 * PAGE, 0)]


def test_what_writes_outside_is_never_computed_again():
    groups = [Group(10, PAGE, may_recompute=False), Group(10, 8 * PAGE, (0,), is_needed=True)]
    assert points(groups) == [(PAGE, 10), (8 * PAGE, 0)]


def test_what_draws_later_is_kept_where_what_draws_earlier_is():
    groups = [Group(30, PAGE, is_needed=True), Group(10, PAGE, is_needed=True)]
    assert points(groups) == [(0, 40), (PAGE, 10), (2 * PAGE, 0)]
    assert points(groups, [0, 1]) == [(0, 40), (2 * PAGE, 0)]  # to compute the second again alone is not allowed


def test_what_draws_is_never_skipped():
    assert points([Group(10, PAGE)], [0]) == [(0, 10), (PAGE, 0)]


def test_there_is_no_corner_where_something_needed_can_be_neither_kept_nor_computed_again():
    assert points([Group(10, PAGE, may_keep=False, may_recompute=False, is_needed=True)]) == []


def test_no_groups_are_one_corner():
    assert points([]) == [(0, 0)]


@pytest.mark.parametrize(
    ("groups", "draws", "text"),
    [
        ([Group(1, 1, (1,))], [], "no group of that number"),
        ([Group(1, 1)], [1], "no group of that number"),
        ([Group(1, 1 << 49)], [], "more bytes than there are addresses"),
        ([Group(1, 1 << 48)] * 2, [], "more bytes than there are addresses"),
        ([Group(1, (1 << 64) - 1)], [], "more bytes than there are addresses"),
        ([Group(1, 1)] * (1 << 12 | 1), [], "too many operators"),
    ],
)
def test_bad_input_is_refused(groups, draws, text):
    with pytest.raises(ValueError, match=text):
        core.block_frontier(groups, draws)


@pytest.mark.parametrize("scale", [1, 10**6, 10**12, 10**16])
def test_times_of_any_size_have_the_same_corners(scale: int):
    """Their products with bytes would be too large for an integer."""
    groups = [Group(30 * scale, 1 << 40, is_needed=True), Group(10 * scale, 1 << 44, (0,), is_needed=True)]
    assert points(groups) == [(0, 40 * scale), (1 << 40, 10 * scale), ((1 << 40) + (1 << 44), 0)]


def test_the_sum_of_times_may_be_too_large_for_an_integer():
    assert points([Group(1 << 63, PAGE, is_needed=True)] * 3)[-1] == (3 * PAGE, 0)


def test_of_a_large_block_so_many_corners_are_found_as_there_is_time_for():
    groups = [Group(1 + number, PAGE * (1 + number % 7), is_needed=True) for number in range(1 << 12)]
    found = points(groups)
    assert 8 < len(found) < 100
    assert found[0] == (0, sum(group.duration_ns for group in groups))
    assert found[-1] == (sum(group.nbytes for group in groups), 0)
    slopes = [(a[1] - b[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(found)]
    assert slopes == sorted(slopes, reverse=True), "no corner of a hull"


def test_the_largest_block_is_no_deeper_than_the_stack():
    groups = chain(1 << 12, may_keep=False)
    assert points(groups) == [(0, sum(group.duration_ns for group in groups))]
