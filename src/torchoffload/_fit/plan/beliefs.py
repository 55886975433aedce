"""Predictions of the times of plans, from the steps that were timed under others."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from torchoffload._fit.plan.step import Step, StepPlan, times_of

__all__ = ["Belief", "Beliefs"]

# How the times of computing again and the rate of the link may differ from the survey's. The survey times operators one
# by one, and the link alone: in a step both have others beside them.
_AGAIN = (0.4, 0.7, 1.0, 1.5, 2.5)
_RATES = (0.5, 0.7, 0.85, 1.0)
_LEAST_PACE, _MOST_PACE = 0.1, 10.0
_ROUNDS = 4  # until the pace of a belief is found; each begins with the pace of the one before
_NEAR = 0.005
_NOISE = 0.04  # the part by which the times of steps under one plan differ
_LIKELY = 1.5  # a belief is likely if its doubt exceeds the best one's by at most this


@dataclasses.dataclass(frozen=True)
class Belief:
    """One explanation of the times that were measured.

    Attributes
    ----------
    again : float
        How many times as long computing again takes as the survey measured, beside the pace of all operators.
    rate : float
        The part of the measured rate that the link has in a step.
    pace : float
        How many times as long all operators take as the survey measured.
    doubt : float
        How badly it explains the times, and how far it is from the survey's.
    """

    again: float
    rate: float
    pace: float = 1.0
    doubt: float = 0.0

    @property
    def factors(self) -> tuple[float, float, float]:
        """The factors of a step's times if it is true: of all computing, of computing again besides, of the rate."""
        return self.pace, self.again, self.rate

    def of(self, step: Step) -> Step:
        """Return a surveyed step with the times that it has if this belief is true."""
        return step.with_times(pace=self.pace, again=self.again, rate=self.rate)


class Beliefs:
    """Explanations of the times of a step, given the plans that were timed.

    Parameters
    ----------
    step : Step
        The surveyed step.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        rates = _RATES if step.may_move else (1.0,)
        self._all = [Belief(again, rate) for again, rate in itertools.product(_AGAIN, rates)]
        self.learn([])

    @property
    def best(self) -> Belief:
        """The belief that explains the times best."""
        return min(self._all, key=lambda belief: belief.doubt)

    @property
    def likely(self) -> list[Belief]:
        """The beliefs that explain the times nearly as well."""
        most = self.best.doubt + _LIKELY
        return [belief for belief in self._all if belief.doubt <= most]

    def learn(self, timed: Sequence[tuple[StepPlan, float]]) -> None:
        """Take notice of plans and of how long steps took under them: find the paces that explain the times best."""
        plans = [plan for plan, _ in timed]
        misses = [[0.0] for _ in self._all]
        unsettled = list(range(len(self._all)))
        for _ in range(_ROUNDS if timed else 0):
            if not unsettled:
                break
            changed = []
            times = times_of(self._step, plans, [self._all[number].factors for number in unsettled])
            for number, times_s in zip(unsettled, times, strict=True):
                pairs = zip(timed, times_s, strict=True)
                misses[number] = [math.log(taken_s / max(step_s, 1e-12)) for (_, taken_s), step_s in pairs]
                change = sum(misses[number]) / len(timed)
                if abs(change) < _NEAR:
                    continue
                pace = min(max(self._all[number].pace * math.exp(change), _LEAST_PACE), _MOST_PACE)
                self._all[number] = dataclasses.replace(self._all[number], pace=pace)
                changed.append(number)
            unsettled = changed
        self._all = [_doubted(belief, missed) for belief, missed in zip(self._all, misses, strict=True)]

    def predicted_s(self, plan: StepPlan, known: tuple[StepPlan, float]) -> tuple[float, float, float]:
        """Return how long a step takes under a plan: the least that is likely, by the best belief, and the most.

        Of each belief, the difference from a ``known`` plan counts, whose time was measured: a belief may explain one
        time badly for the sake of the others.
        """
        known_plan, known_s = known
        found = times_of(self._step, [plan, known_plan], [belief.factors for belief in (self.best, *self.likely)])
        best_s, *likely_s = (step_s * known_s / max(as_known_s, 1e-12) for step_s, as_known_s in found)
        return min(likely_s), best_s, max(likely_s)


def _doubted(belief: Belief, misses: Sequence[float]) -> Belief:
    """Return a belief with its doubt, by the logarithms of how badly it explains each time."""
    miss = math.sqrt(sum(each * each for each in misses) / len(misses)) / _NOISE
    far = sum(abs(math.log2(each)) for each in (belief.again, belief.rate, belief.pace))
    return dataclasses.replace(belief, doubt=miss + far)
