"""The predicted waits of a compiled graph for the copies of the values that it moves."""

import itertools
import random

import pytest

from torchoffload._compile.copies import MovedValue, backward_wait_s, forward_wait_s, release_places
from torchoffload._fit.machine.link import LinkRates

LINK = LinkRates(100.0, 50.0, 0.0)  # bytes a second


def test_forward_waits_for_nothing_if_it_waits_late_enough():
    """Two values of 2 s each are made behind 1 s and 2 s of eight: their copies end at 3 s and 5 s."""
    forward_s = [1.0] * 8
    moved = [MovedValue(200, 0, 7), MovedValue(200, 1, 6)]
    places = release_places(moved, range(8), forward_s, LINK, 1.0)
    assert places == [3, 5]  # a copy may take a tenth longer
    assert forward_wait_s(moved, places, forward_s, LINK) == 0
    assert forward_wait_s(moved, [0, 1], forward_s, LINK) == pytest.approx(4)
    assert forward_wait_s(moved, [1, 2], forward_s, LINK) == pytest.approx(2)


def test_what_is_still_on_its_way_is_waited_for_at_the_end():
    forward_s = [1.0, 1.0]
    moved = [MovedValue(500, 0, 0)]
    assert release_places(moved, [0, 1], forward_s, LINK, 1.0) == [None]
    assert forward_wait_s(moved, [None], forward_s, LINK) == pytest.approx(4)


def test_with_a_part_of_the_time_forward_waits_earlier():
    forward_s = [1.0] * 8
    moved = [MovedValue(400, 0, 7)]
    places = [release_places(moved, range(8), forward_s, LINK, part)[0] for part in (1.0, 0.5, 0.0)]
    assert places == [5, 3, 1]


def test_backward_waits_for_values_that_the_window_has_no_room_for():
    """Two values of 2 s each are read at the beginning and behind 2 s of eight."""
    backward_s = [1.0] * 8
    moved = [MovedValue(100, 0, 2), MovedValue(100, 1, 0)]
    assert backward_wait_s(moved, backward_s, LINK, 200) == pytest.approx(2)
    assert backward_wait_s(moved, backward_s, LINK, 100) == pytest.approx(2)  # the second one comes meanwhile
    assert backward_wait_s(moved, backward_s, LINK, 0) == pytest.approx(4)


def test_backward_waits_for_the_first_value_that_it_reads_however_late_that_is():
    """Two values of 2 s each are read behind 4 s and 5 s of eight."""
    backward_s = [1.0] * 8
    moved = [MovedValue(100, 0, 5), MovedValue(100, 1, 4)]
    assert backward_wait_s(moved, backward_s, LINK, 200) == pytest.approx(2 + 1)
    assert backward_wait_s(moved, backward_s, LINK, 0) == pytest.approx(2 + 2)


def test_backward_may_read_in_another_order():
    backward_s = [1.0] * 8
    moved = [MovedValue(100, 0, 0), MovedValue(100, 1, 4), MovedValue(100, 2, 4)]
    assert backward_wait_s(moved, backward_s, LINK, 300) == pytest.approx(2)  # the others come meanwhile
    assert backward_wait_s(moved, backward_s, LINK, 0) == pytest.approx(2 + 2 + 2)


def test_a_wider_window_and_a_later_release_are_never_slower():
    drawn = random.Random(0)
    for _ in range(300):
        forward_s, backward_s = ([drawn.random() for _ in range(12)] for _ in range(2))
        asked = sorted((drawn.randrange(12) for _ in range(5)), reverse=True)
        made = sorted(drawn.sample(range(12), 5))
        moved = [MovedValue(drawn.randrange(1, 90), *places) for places in zip(made, asked, strict=True)]
        stops = sorted({*made, *drawn.sample(range(12), 3)})
        released = [release_places(moved, stops, forward_s, LINK, part) for part in (1.0, 0.5, 0.0)]
        for later, earlier in itertools.pairwise(released):
            pairs = zip(later, earlier, strict=True)
            assert all(late is None or (early is not None and early <= late) for late, early in pairs)
        waits = [forward_wait_s(moved, places, forward_s, LINK) for places in released]
        assert waits[0] <= waits[2] + 1e-9
        windows = [backward_wait_s(moved, backward_s, LINK, nbytes) for nbytes in (0, 100, 200, 1000)]
        assert all(wide <= narrow + 1e-9 for narrow, wide in itertools.pairwise(windows))
