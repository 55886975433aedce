"""The phase of a fitted model: each with the state that it alone has."""

import enum
from dataclasses import dataclass

from torchoffload._fit.plan.climb import Climb
from torchoffload._fit.plan.scaling import OtherSizes
from torchoffload._fit.plan.trials import Trial
from torchoffload._fit.survey.survey import Survey

__all__ = ["Climbing", "LeastMemory", "Phase", "Removed", "Settled", "State", "Surveying"]


class Phase(enum.Enum):
    """The names of the phases, as the user sees them."""

    SURVEY = "survey"
    TRIALS = "trials"
    SETTLED = "settled"
    LEAST = "least memory"
    COMPILED = "compiled"
    REMOVED = "removed"


@dataclass(frozen=True)
class Surveying:
    """Steps are measured."""

    survey: Survey
    name: Phase = Phase.SURVEY


@dataclass(frozen=True)
class Climbing:
    """Plans are tried."""

    climb: Climb
    name: Phase = Phase.TRIALS


@dataclass(frozen=True)
class Settled:
    """A plan is followed, and plans for calls of other sizes beside it."""

    trial: Trial
    others: OtherSizes
    name: Phase = Phase.SETTLED


@dataclass(frozen=True)
class LeastMemory:
    """Nothing fits: the plan of the least memory is followed, or the survey's plan if no step could be surveyed."""

    trial: Trial | None
    survey: Survey | None = None
    name: Phase = Phase.LEAST


@dataclass(frozen=True)
class Removed:
    """All is over; the plan that was followed last is still told of."""

    trial: Trial | None
    name: Phase = Phase.REMOVED


State = Surveying | Climbing | Settled | LeastMemory | Removed
