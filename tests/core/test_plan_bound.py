"""What a plan may hold: never more than the first step of such a tape held, of which nothing was known."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

testing = pytest.importorskip("torchoffload._C_testing", reason="it is reached through the test build alone").testing

MIB = 1 << 20
NOTHING_SET = (None, None, None)


def assert_within(planned: dict[str, Any], first: dict[str, Any]) -> None:
    assert planned["held_forward_bytes"] <= first["held_forward_bytes"]
    assert planned["held_forward_late_bytes"] <= first["held_forward_late_bytes"]
    assert planned["held_backward_bytes"] <= max(first["held_forward_bytes"], first["held_backward_bytes"])


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_no_plan_holds_more_than_the_first_step_did(data):
    """Any sizes, operators that save several records, any times and link, and any order in which they are asked for."""
    count = data.draw(st.integers(1, 40))
    nbytes = [data.draw(st.integers(1, 1 << data.draw(st.integers(1, 34)))) for _ in range(count)]
    joins = [data.draw(st.booleans()) for _ in range(count)]
    last_save = [data.draw(st.integers(0, 2 * count)) for _ in range(count)]
    times = None
    if data.draw(st.booleans()):
        seconds = st.floats(1e-6, 1e-1)
        ready = list(itertools.accumulate(data.draw(seconds) for _ in range(count)))
        needed = [ready[-1] + data.draw(seconds) * count if data.draw(st.integers(0, 9)) else -1 for _ in range(count)]
        rate = data.draw(st.floats(1e6, 1e11))
        times = testing.StepTimes(list(zip(ready, needed, strict=True)), ready[-1] + count, rate, rate, 2e-5)
    keeps_end = data.draw(st.booleans())
    _, planned = testing.plan_step(nbytes, last_save, times, NOTHING_SET, keeps_end, joins)
    assert_within(planned, testing.first_step(nbytes, last_save, times, NOTHING_SET, joins))


def in_reverse(nbytes: list[int], layer_s: float, rate: float) -> Any:
    count = len(nbytes)
    records = [(number * layer_s, (3 * count - 2 * number) * layer_s) for number in range(count)]
    return testing.StepTimes(records, 4 * count * layer_s, rate, rate, 0.0)


def test_where_all_returns_soon_no_more_stays_than_the_first_step_held():
    """On a slow link every record comes back too late. The first step held a window, and so do all later ones."""
    nbytes = [64 * MIB] * 40
    times = in_reverse(nbytes, layer_s=1e-4, rate=1e9)
    plan, planned = testing.plan_step(nbytes, list(range(40)), times)
    first = testing.first_step(nbytes, list(range(40)), times)
    assert_within(planned, first)
    assert plan["kept"] == ["none"] * 35 + ["needed_soon"] * 5, "the window of four, and the record that was made last"
    assert planned["step_s"] < first["step_s"]


def test_what_one_operator_saved_was_there_at_once_and_may_stay():
    """A compiled region saves all of it as its forward ends: until then nothing could leave."""
    nbytes = [64 * MIB] * 40
    times = in_reverse(nbytes, layer_s=1e-4, rate=1e9)
    plan, _ = testing.plan_step(nbytes, list(range(40)), times, NOTHING_SET, True, [False] + [True] * 39)
    assert set(plan["kept"]) == {"needed_soon"}


def test_before_a_large_record_the_windows_make_room_for_it():
    """Logits of 30 of the others' size: the first step had four of those in flight when they came."""
    nbytes = [MIB] * 40 + [30 * MIB]
    _, planned = testing.plan_step(nbytes, list(range(41)), None)
    first = testing.first_step(nbytes, list(range(41)), None)
    assert first["held_forward_bytes"] == 34 * MIB
    assert_within(planned, first)


def test_windows_that_were_set_are_no_larger_for_the_first_step():
    nbytes = [64 * MIB] * 40
    plan, _ = testing.plan_step(nbytes, list(range(40)), None, (16 * 64 * MIB, None, 16 * 64 * MIB))
    assert plan["kept"].count("tape_end") == 16, "both windows were set, and are used"
