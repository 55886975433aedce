"""The copies of the values that a compiled graph moves: when each ends, and how long the graph waits for them."""

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torchoffload._fit.machine.link import LinkRates

__all__ = ["MovedValue", "backward_wait_s", "forward_wait_s", "release_places"]

# A copy may take so many times as long as the link's rate says, before the graph waits for it.
_SLACK = 1.1


@dataclass(frozen=True)
class MovedValue:
    """A value that moves.

    Attributes
    ----------
    nbytes : int
        Its size.
    made : int
        The place of the operator that makes it among those of forward.
    asked : int
        The place of the first operator of backward that reads it.
    """

    nbytes: int
    made: int
    asked: int


def release_places(
    moved: Sequence[MovedValue], stops: Sequence[int], forward_s: Sequence[float], link: LinkRates, part: float
) -> list[int | None]:
    """Return the place at which forward waits for the copy of each value; None: at its end.

    Parameters
    ----------
    moved : sequence of MovedValue
        The values, in the order in which they are made.
    stops : sequence of int
        The places at which forward may wait, in order.
    forward_s : sequence of float
        How long each operator of forward takes, in seconds.
    link : LinkRates
        The rates of the link.
    part : float
        The part of the time until the end of a copy that has to be over: 1, and forward does not wait in vain. With
        less, it waits, and holds less memory.
    """
    ends = list(itertools.accumulate(forward_s))
    stop_ends = [ends[place] for place in stops]
    found: list[int | None] = []
    free_s = 0.0
    for each in moved:
        made_s = ends[each.made]
        free_s = max(made_s, free_s) + _SLACK * (link.latency_s + each.nbytes / link.out_bytes_per_s)
        first = bisect.bisect_right(stops, each.made)
        number = bisect.bisect_left(stop_ends, made_s + part * (free_s - made_s), lo=first)
        found.append(stops[number] if number < len(stops) else None)
    return found


def forward_wait_s(
    moved: Sequence[MovedValue], releases: Sequence[int | None], forward_s: Sequence[float], link: LinkRates
) -> float:
    """Return how long forward waits for copies, if it waits for each at the place of its release."""
    ends = list(itertools.accumulate(forward_s))
    last = len(ends)
    events = [(each.made, 0, number) for number, each in enumerate(moved)]
    events += [(last if place is None else place, 1, number) for number, place in enumerate(releases)]
    waited_s = free_s = 0.0
    copied_s = [0.0] * len(moved)
    for place, is_release, number in sorted(events):
        now_s = (ends[place] if place < last else ends[-1]) + waited_s
        if is_release:
            waited_s += max(0.0, copied_s[number] - now_s)
        else:
            free_s = max(now_s, free_s) + link.latency_s + moved[number].nbytes / link.out_bytes_per_s
            copied_s[number] = free_s
    return waited_s


def backward_wait_s(
    moved: Sequence[MovedValue], backward_s: Sequence[float], link: LinkRates, window_bytes: int
) -> float:
    """Return how long backward waits for values, if they are reloaded ahead in a window, the one made last first.

    Reloads begin as backward asks for its first value. So it waits for all of that copy, however late it asks.
    """
    begins = [0.0, *itertools.accumulate(backward_s)]
    waiting = list(range(len(moved)))  # to be reloaded; the next one is the last
    is_asked = [False] * len(moved)
    copied_s: dict[int, float] = {}
    waited_s = free_s = 0.0
    ahead_bytes = 0

    def reload(number: int, now_s: float) -> None:
        nonlocal free_s
        free_s = max(now_s, free_s) + link.latency_s + moved[number].nbytes / link.in_bytes_per_s
        copied_s[number] = free_s

    def reload_ahead(now_s: float) -> None:
        nonlocal ahead_bytes
        while waiting:
            number = waiting[-1]
            if not is_asked[number]:
                if ahead_bytes + moved[number].nbytes > window_bytes:
                    return
                ahead_bytes += moved[number].nbytes
                reload(number, now_s)
            waiting.pop()

    for place, negative in sorted((each.asked, -number) for number, each in enumerate(moved)):
        number, now_s = -negative, begins[place] + waited_s
        is_asked[number] = True
        if number in copied_s:
            ahead_bytes -= moved[number].nbytes
        else:
            reload(number, now_s)
        reload_ahead(now_s)  # behind the ask, and before the wait, which the host does not take part in
        waited_s += max(0.0, copied_s[number] - now_s)
    return waited_s
