"""What a fitted model is at, and why it plans anew."""

import enum

__all__ = ["Excess", "Phase"]


class Phase(enum.Enum):
    """What a fitted model is at."""

    SURVEY = "survey"
    TRIALS = "trials"
    SETTLED = "settled"
    LEAST = "least memory"
    REMOVED = "removed"


class Excess(enum.Enum):
    """What plans have taken too much of."""

    RESERVED = "more was reserved than the user gives"
    OUT_OF_MEMORY = "a step ran out of memory"
