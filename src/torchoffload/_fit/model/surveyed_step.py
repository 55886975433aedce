"""A step as a survey has shown it, and the plans for it if another step is the one that plans are tried for."""

from collections.abc import Collection
from typing import Any

from torchoffload._fit.choosing.called_blocks import CalledBlocks
from torchoffload._fit.model.clock import Opener
from torchoffload._fit.plan.scaling import MORE, OtherSizes, scaled
from torchoffload._fit.plan.step import Step, plan_step, survey_plan
from torchoffload._fit.plan.trials import Trial

__all__ = ["SurveyedStep"]


class SurveyedStep:
    """The surveyed step of those that begin with the same module.

    If networks are trained in turns, each in steps of its own, several steps are surveyed. Plans are tried for the one
    in which autograd would save most bytes. Meanwhile the blocks keep as little as they can in the others, and the
    bytes are noted that these allocate beyond the prediction: other networks may have gradients now that they did not
    have in the survey. Once a plan has settled, each other step has a plan that is not tried, in the memory that the
    tried plans have shown to be there.

    Parameters
    ----------
    opener : weakref.ref of nn.Module
        The module.
    parts : collection of weakref.ref of nn.Module
        All modules that the loop calls in it.
    step : Step
        The step.
    keys : list of tuple
        The keys of the kinds of its blocks, by their numbers.
    called : CalledBlocks
        The block of each call.
    saved_bytes : list of int
        The bytes that autograd would save in each call.
    window_bytes : int
        The windows of the survey.
    reserved_bytes, began_bytes : int
        The most that was reserved in it, and the bytes on the device as it began, without gradients.
    some_retain : bool
        Whether some such steps retain a graph, and others do not. The step counts the bytes of the former.

    Attributes
    ----------
    opener, parts, step, keys, called, saved_bytes, window_bytes, reserved_bytes, began_bytes, some_retain
        The same.
    trial : Trial
        The plan that is followed if the step is not the one that plans are tried for.
    """

    def __init__(
        self, *, opener: Opener, parts: Collection[Opener], step: Step, keys: list[tuple[Any, ...]],
        called: CalledBlocks, saved_bytes: list[int], window_bytes: int, reserved_bytes: int, began_bytes: int,
        some_retain: bool,
    ) -> None:  # fmt: skip
        self.opener, self.parts, self.step, self.keys, self.called = opener, parts, step, keys, called
        self.saved_bytes, self.window_bytes = saved_bytes, window_bytes
        self.reserved_bytes, self.began_bytes, self.some_retain = reserved_bytes, began_bytes, some_retain
        self._more_bytes: int | None = None  # than predicted that it has allocated; None if that is not known
        self._room_bytes = 0  # that its latest plan was to allocate
        self._take_least()

    @property
    def least(self) -> Trial:
        """The plan by which its blocks keep as little as they can."""
        return Trial(self.step, survey_plan(self.step, self.window_bytes))

    def _take_least(self) -> None:
        self.trial = self.least
        self._sizes: OtherSizes | None = None

    def take_more(self, nbytes: int) -> None:
        """Take notice of bytes that are on the device beside it for good."""
        self.step = self.step.with_more(nbytes)
        self._more_bytes = None
        self._take_least()

    def note_allocated(self, nbytes: int) -> None:
        """Take notice of the most that was allocated in such a step, while other plans are tried."""
        self._more_bytes = max(self._more_bytes or 0, nbytes - self.trial.plan.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most that is expected to be allocated."""
        return self.trial.plan.peak_bytes + (self._more_bytes or 0)

    def take_plan(self, allocated_bytes: int) -> None:
        """Plan for so many allocated bytes until the end of backward, if there was such a step since the survey."""
        self._take_least()
        self._room_bytes = allocated_bytes
        if self._more_bytes is None:
            return
        larger, plan_bytes = scaled(self.step, MORE), allocated_bytes - self._more_bytes
        plan = plan_step(larger.of_blocks, plan_bytes)
        if plan is not None:
            self.trial = Trial(larger, plan)
            self._sizes = OtherSizes(self.trial, plan_bytes)

    def takes_more(self, nbytes: int) -> bool:
        """Plan anew after a step that took so many bytes, more than planned. Returns whether the next can take less."""
        had_plan = self._sizes is not None
        self.note_allocated(nbytes)
        self.take_plan(self._room_bytes)
        return had_plan

    def takes_less(self) -> bool:
        """Take notice of a step that ran out of memory. Returns whether the next one can take less."""
        had_plan = self._sizes is not None
        self._take_least()
        return had_plan

    def trial_for(self, share: float) -> Trial | None:
        """Return the plan of a step of so many times the surveyed size; None if it has to be surveyed."""
        if self._sizes is None:
            return self.trial if share <= 1 else None
        return self._sizes.trial_for(share)
