"""What a fitted model is at."""

import enum

__all__ = ["Phase"]


class Phase(enum.Enum):
    """What a fitted model is at."""

    SURVEY = "survey"
    TRIALS = "trials"
    SETTLED = "settled"
    LEAST = "least memory"
    REMOVED = "removed"
