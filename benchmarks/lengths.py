"""Which lengths ``longest.py`` tries, one after the other, and what they add up to: no torch, and no device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Bounds", "Try", "extrapolated", "next_length", "predicted_s", "row_of", "search"]

MOST_TOKENS = 1 << 22
GROWTH = 1.04  # from one length to the next


@dataclass
class Try:
    """One length: whether it went, and what it took.

    ``is_first``: one of the short lengths, from which others are reckoned. ``peaks_gib``: the most memory until the
    loss's backward was over, and in the layers' backward.
    """

    way: str
    tokens: int
    is_first: bool = False
    went: bool = False
    why: str = ""  # it did not
    step_s: float = 0.0
    seconds: float = 0.0  # of all of the try
    peaks_gib: tuple[float, ...] = ()
    peak_gib: float = 0.0
    reserved_gib: float = 0.0
    loss: float | None = None
    gradient_norm: float | None = None
    is_same: bool | None = None  # the loss as in the first way that was tried at this length, and the norm within 1%
    phase: str = ""  # fit's, in the last step
    steps_s: tuple[float, ...] = ()  # fit's, those of the survey too
    needs_gib: float | None = None  # at least, as fit predicts
    at_most: int | None = None  # tokens that fit, by that
    report: str = ""


@dataclass(frozen=True)
class Bounds:
    """What a search keeps to. ``steps``: how many steps a try takes."""

    first: Sequence[int]
    limit_gib: float
    granule: int = 2048
    tries: int = 4
    seconds: float = 60.0
    steps: float = 1.0


def extrapolated(tries: Sequence[Try], limit_gib: float) -> int | None:
    """Return the length at which a peak reaches the limit, on lines through the latest two; None: they are unknown."""
    known = sorted((each for each in tries if each.went and each.peaks_gib), key=lambda each: each.tokens)[-2:]
    if len(known) < 2:
        return None
    lengths = []
    for low, high in zip(known[0].peaks_gib, known[1].peaks_gib, strict=True):
        slope = (high - low) / (known[1].tokens - known[0].tokens)
        if slope > 0:
            lengths.append(known[1].tokens + (limit_gib - high) / slope)
    return max(0, int(min(lengths))) if lengths else None


def predicted_s(tries: Sequence[Try], tokens: int) -> float:
    """Return what a step takes: a part in proportion to its tokens, and one to their square, which is attention."""
    known = sorted((each for each in tries if each.went), key=lambda each: each.tokens)[-2:]
    if not known:
        return 0.0
    rate, square = known[-1].step_s / known[-1].tokens, 0.0
    if len(known) == 2:
        low = known[0].step_s / known[0].tokens
        square = max(0.0, (rate - low) / (known[1].tokens - known[0].tokens))
        rate = max(0.0, rate - square * known[1].tokens)
    return rate * tokens + square * tokens**2


def longest_went(tries: Sequence[Try]) -> int:
    """Return the longest length that went."""
    return max((each.tokens for each in tries if each.went), default=0)


def most_possible(tries: Sequence[Try]) -> int:
    """Return the longest length that is not known to take too much."""
    said = [each.at_most for each in tries if each.at_most is not None and not each.is_first]
    return min([MOST_TOKENS, *said, *(each.tokens - 1 for each in tries if not each.went)])


def is_found(tries: Sequence[Try], granule: int) -> bool:
    """Return whether what is longer than the longest that went is known to take too much, up to one step."""
    low = longest_went(tries)
    return low > 0 and most_possible(tries) < max(low * GROWTH, low + granule)


def next_length(tries: Sequence[Try], bounds: Bounds, left_s: float) -> int | None:
    """Return the length to try next; None if there is nothing more to learn, or no time."""
    low, most = longest_went(tries), most_possible(tries)
    later = [each for each in tries if not each.is_first]
    if is_found(tries, bounds.granule):
        return None
    if not later:
        guess = extrapolated(tries, bounds.limit_gib) or (2 * low if most == MOST_TOKENS else (low + most) // 2)
    else:
        last = later[-1]
        in_a_row = next((n for n, each in enumerate(reversed(later)) if each.went != last.went), len(later))
        factor = 1 + (GROWTH - 1) * 2 ** (in_a_row - 1)  # in one direction, each step is twice the one before
        if last.at_most is not None and (last.went or last.at_most < last.tokens):
            guess = min(last.at_most, 2 * max(low, bounds.granule))  # far away it says little
        elif last.went:
            guess = max(int(low * factor), low + bounds.granule)
        else:
            guess = int((most + 1) / factor)
    if not low < guess <= most:
        guess = low + bounds.granule if most == MOST_TOKENS else (low + most) // 2
    while guess > low and bounds.steps * predicted_s(tries, guess) > left_s:
        guess = int(guess / GROWTH)
    guess = guess // bounds.granule * bounds.granule
    return guess if guess > low else None


def search(
    attempt: Callable[[int, bool], Try], bounds: Bounds, clock: Callable[[], float] = time.monotonic
) -> list[Try]:
    """Try lengths. ``attempt`` takes one, and whether it is one of the first, from which others are reckoned."""
    deadline = clock() + bounds.seconds
    tries: list[Try] = []
    for tokens in sorted(bounds.first):
        if all(each.went for each in tries):
            tries.append(attempt(tokens, True))
    for _ in range(bounds.tries):
        following = next_length(tries, bounds, deadline - clock())
        if following is None:
            break
        tries.append(attempt(following, False))
    return tries


def row_of(way: str, tries: Sequence[Try], granule: int, common: int | None) -> dict[str, Any]:
    """Sum up a way. ``or_more``: tries or time were used up before a length was known to take too much."""
    not_went = [each.tokens for each in tries if not each.went]
    row: dict[str, Any] = {"way": way, "longest": 0, "did_not": min(not_went, default=None)}
    went = [each for each in tries if each.went]
    if went:
        best = max(went, key=lambda each: each.tokens)
        row |= {
            "longest": best.tokens, "or_more": not is_found(tries, granule), "at_most": best.at_most,
            "step_s": best.step_s, "ms_a_1000_tokens": best.step_s / best.tokens * 1e6,
            "peak_gib": best.peak_gib, "reserved_gib": best.reserved_gib, "phase": best.phase,
        }  # fmt: skip
    same = [each for each in went if each.tokens == common]
    if same:
        row |= {"common": common, "common_step_s": same[-1].step_s, "common_peak_gib": same[-1].peak_gib}
    return row
