"""Learner: which tapes are known, and what is kept of one that goes as a known one."""

from typing import Any

import pytest

testing = pytest.importorskip("torchoffload._C_testing", reason="it is reached through the test build alone").testing

MIB = 1 << 20
NOTHING_KNOWN = (None, None, None)


def walk(
    learner: Any, nbytes: list[int], options: Any = NOTHING_KNOWN, dtypes: list[int] | None = None
) -> tuple[Any, list[str]]:
    """A tape's records. Of which structure it is, their dtypes tell."""
    trace = learner.begin(options)
    records = zip(nbytes, dtypes or [0] * len(nbytes), strict=True)
    return trace, [learner.next(trace, size, dtype) for size, dtype in records]


def see(
    learner: Any,
    nbytes: list[int],
    *,
    is_next: bool = True,
    options: Any = NOTHING_KNOWN,
    dtypes: list[int] | None = None,
) -> int:
    trace, _ = walk(learner, nbytes, options, dtypes)
    shape = learner.learn(trace, list(range(len(nbytes))))
    learner.backward_began(shape, is_next)
    return shape


def test_the_end_of_a_known_tape_stays():
    learner = testing.Learner()
    see(learner, [MIB] * 10)
    assert walk(learner, [MIB] * 10)[1] == ["none"] * 6 + ["tape_end"] * 4


def test_a_tape_that_goes_another_way_is_on_its_own_at_once():
    learner = testing.Learner()
    see(learner, [MIB] * 10)
    trace, kept = walk(learner, [MIB] * 14, dtypes=[0] * 8 + [1] + [0] * 5)
    assert kept == ["none"] * 6 + ["tape_end"] * 2 + ["none"] * 6
    assert learner.windows(trace) is None
    learner.learn(trace, list(range(14)))
    assert learner.shape_count() == 2


def test_several_shapes_are_known_at_a_time():
    learner = testing.Learner()
    for size in (1, 2, 3):
        see(learner, [size * MIB] * 10)
    for size in (2, 1, 3):
        assert walk(learner, [size * MIB] * 10)[1].count("tape_end") == 4


def test_of_two_shapes_that_begin_alike_the_later_seen_is_followed_while_it_fits():
    learner = testing.Learner()
    see(learner, [MIB] * 8)
    see(learner, [MIB] * 6 + [2 * MIB] * 6)
    assert walk(learner, [MIB] * 8)[1] == ["none"] * 6 + ["tape_end"] * 2, "the end of the longer one lies further on"
    assert walk(learner, [MIB] * 6 + [2 * MIB] * 6)[1] == ["none"] * 8 + ["tape_end"] * 4


def test_no_end_is_kept_where_another_tape_came_in_between():
    learner = testing.Learner()
    see(learner, [MIB] * 10, is_next=False)
    assert walk(learner, [MIB] * 10)[1] == ["none"] * 10
    see(learner, [MIB] * 10, is_next=True)
    assert walk(learner, [MIB] * 10)[1].count("tape_end") == 4
    see(learner, [MIB] * 10, is_next=False)
    assert walk(learner, [MIB] * 10)[1] == ["none"] * 10


def test_other_windows_make_another_shape():
    learner = testing.Learner()
    see(learner, [MIB] * 10, options=(None, None, 2 * MIB))
    assert walk(learner, [MIB] * 10)[1] == ["none"] * 10
    assert walk(learner, [MIB] * 10, (None, None, 2 * MIB))[1].count("tape_end") == 2


def test_what_is_learned_is_bounded():
    learner = testing.Learner()
    for dtype in range(testing.shape_limit + 4):
        see(learner, [MIB] * 10, dtypes=[dtype] * 10)
    assert learner.shape_count() == learner.structure_count() == testing.shape_limit
    assert walk(learner, [MIB] * 10, dtypes=[0] * 10)[1] == ["none"] * 10, "the oldest was forgotten"
    assert "tape_end" in walk(learner, [MIB] * 10, dtypes=[testing.shape_limit] * 10)[1]


def test_lengths_of_one_structure_are_known_however_many():
    learner = testing.Learner()
    for size in range(1, testing.shape_limit + 5):
        see(learner, [size * MIB] * 10)
    assert learner.shape_count() == testing.shape_limit
    assert learner.structure_count() == 1
    trace, kept = walk(learner, [99 * MIB] * 10)
    assert kept == ["none"] * 6 + ["tape_end"] * 4
    assert learner.windows(trace) == (4 * 99 * MIB, 4 * 99 * MIB)


def test_a_known_shape_comes_before_another_length():
    learner = testing.Learner()
    see(learner, [MIB] * 10)
    see(learner, [2 * MIB] * 3 + [MIB] * 7)
    assert walk(learner, [2 * MIB] * 3 + [MIB] * 7)[1] == ["none"] * 2 + ["tape_end"] + ["none"] + ["tape_end"] * 6


def test_what_does_not_grow_with_the_length_is_told_apart():
    """Each layer saves a table of fixed size. From the third length on it is expected as it is."""
    learner = testing.Learner()
    for size in (2, 4):
        see(learner, [size * MIB, 3 * MIB] * 10)
    trace, kept = walk(learner, [8 * MIB, 3 * MIB] * 10)
    assert trace.expected_count == 1, "the first record told all others"
    assert sum(why == "tape_end" for why in kept) >= 4


def test_a_length_that_grows_otherwise_is_expected_anew():
    learner = testing.Learner()
    see(learner, [MIB] * 10)
    trace, kept = walk(learner, [2 * MIB] * 5 + [4 * MIB] * 5)
    assert trace.expected_count == 2
    assert kept == ["none"] * 6 + ["tape_end"] * 4


def test_a_tape_whose_sizes_follow_no_rule_is_left_alone_after_a_while():
    learner = testing.Learner()
    see(learner, [MIB] * 40)
    trace, _ = walk(learner, [MIB * (1 + number * 7 % 5) for number in range(40)])
    assert trace.expected_count == testing.expected_limit
    assert learner.windows(trace) is None


def test_a_tape_past_the_limit_is_not_learned():
    learner = testing.Learner()
    trace, _ = walk(learner, [1] * (testing.learned_record_limit + 1))
    assert learner.learn(trace, []) is None


def test_a_tape_with_fewer_records_than_were_told_is_not_learned():
    """A record that is refused with an error was told, and is none of the tape."""
    learner = testing.Learner()
    trace, _ = walk(learner, [MIB] * 10)
    assert learner.learn(trace, list(range(9))) is None
    assert learner.shape_count() == 0


def test_an_empty_tape_is_not_learned():
    learner = testing.Learner()
    assert learner.learn(learner.begin(), []) is None


def test_shapes_that_come_and_go_while_a_tape_is_open():
    learner = testing.Learner()
    see(learner, [MIB] * 10)
    trace = learner.begin()
    kept = [learner.next(trace, MIB) for _ in range(5)]
    for dtype in range(2, testing.shape_limit + 4):
        see(learner, [MIB] * 10, dtypes=[dtype] * 10)
    kept += [learner.next(trace, MIB) for _ in range(5)]
    assert kept == ["none"] * 10, "its shape was forgotten under it"
    assert learner.windows(trace) is None


def test_second_and_fifth_sighting_are_timed_and_then_each_64th():
    learner = testing.Learner()
    timed = []
    for sighting in range(1, 200):
        trace, _ = walk(learner, [MIB] * 10)
        if trace.is_timed:
            timed.append(sighting)
        learner.learn(trace, list(range(10)))
    assert timed == [2, 5, 65, 129, 193]


def test_lengths_that_are_always_new_are_timed_as_one():
    learner = testing.Learner()
    timed = []
    for sighting in range(1, 80):
        trace, _ = walk(learner, [sighting * MIB] * 10)
        if trace.is_timed:
            timed.append(sighting)
        learner.learn(trace, list(range(10)))
    assert timed == [2, 5, 65]


def test_times_of_one_length_serve_all():
    """Computing takes so long that all hides, but for the last record, which is asked for at once."""
    count, rate = 10, 1e9
    copy_s = MIB / rate
    ready = [number * 5 * copy_s for number in range(count)]
    needed = [count * 10 * copy_s - second for second in ready[:-1]] + [ready[-1] + copy_s / 2]
    learner = testing.Learner()
    shape = see(learner, [MIB] * count)
    learner.learn_times(
        shape, testing.StepTimes(list(zip(ready, needed, strict=True)), 20 * count * copy_s, rate, rate)
    )
    assert walk(learner, [MIB] * count)[1][-1] == "needed_soon"
    for size in (2, 3, 5):
        assert walk(learner, [size * MIB] * count)[1] == walk(learner, [MIB] * count)[1]


def test_a_timed_tape_that_goes_another_way_is_not_timed_any_more():
    learner = testing.Learner()
    see(learner, [MIB] * 10)
    assert not walk(learner, [MIB] * 6, dtypes=[0] * 5 + [1])[0].is_timed


def test_times_of_a_forgotten_shape_are_left():
    learner = testing.Learner()
    shape = see(learner, [MIB])
    for size in range(2, testing.shape_limit + 4):
        see(learner, [size * MIB] * 2)
    learner.learn_times(shape, testing.StepTimes([(0.0, 1.0)], 2.0, 1e9, 1e9))
    learner.backward_began(shape, True)
    assert learner.plan_of(shape) is None
