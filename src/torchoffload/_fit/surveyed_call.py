"""One call of a block in a surveyed step: when it ran, and what was on the device meanwhile."""

import time
import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from torchoffload._fit.kinds import Kind
from torchoffload._fit.record import BlockRecord
from torchoffload._fit.replay import Watch

if TYPE_CHECKING:
    from torchoffload._fit.survey import Survey

__all__ = ["TIMED_CALLS", "SurveyedCall"]

TIMED_CALLS = 2  # of each kind; the second one, since with the first one's backward that of the model's head ends


class SurveyedCall(Watch):
    """One call of a block in a surveyed step.

    Attributes
    ----------
    key : tuple
        What tells its kind.
    input_bytes : int
        The bytes of its arguments that no earlier call of the step was given, too.
    forward_bytes, backward_bytes : int
        The most on the device while it runs.
    began, returned, began_again, computed_again : moment
        When its forward begins and ends, and when its recomputation begins and ends; None while that has not happened.
    backward_s : float or None
        From ``computed_again`` to the next block's recomputation; None while it is not known.
    forward_host_s, again_host_s, backward_host_s : float
        What the host takes to enqueue the forward, the recomputation, and the block's backward.
    """

    def __init__(self, survey: "Survey", module: nn.Module, key: tuple[Any, ...], inputs: Any) -> None:
        super().__init__(survey.least_plan(key))
        self.records = key not in survey.kinds
        self._module = weakref.ref(module)
        self.key = key
        self.input_bytes = survey.note_inputs(inputs)
        self.forward_bytes = self.backward_bytes = 0
        self.returned: Any = None
        self.began_again: Any = None
        self.computed_again: Any = None
        self.backward_s: float | None = None
        self.forward_host_s = self.again_host_s = self.backward_host_s = 0.0
        self.moments: dict[int, tuple[Any, Any]] = {}
        self._survey = survey
        self.times_operators = survey.is_timing and not self.records and survey.count_of_kind(key) < TIMED_CALLS
        self.began = survey.mark(self._note_forward)
        self._host_s = time.perf_counter()

    @property
    def module(self) -> nn.Module:
        """The block."""
        module = self._module()
        assert module is not None
        return module

    def _note_forward(self, peak: int) -> None:
        self.forward_bytes = max(self.forward_bytes, peak)

    def _note_backward(self, peak: int) -> None:
        self.backward_bytes = max(self.backward_bytes, peak)

    def recorded(self, record: BlockRecord) -> bool:
        """Note what the call did, for all blocks of the kind."""
        self._survey.add_kind(self.key, Kind(record, self._survey.may_recompute, self._survey.may_agree))
        return self._survey.least_plan(self.key) is not None

    def ended(self) -> None:
        """Note the end of forward."""
        self.forward_host_s = time.perf_counter() - self._host_s
        # What comes next is this call's, if another one follows; else it is the loss's.
        self.returned = self._survey.mark(self._note_forward)

    def left_plan(self) -> None:
        """Note that the block is not what its kind is."""
        self._survey.differs(self.module)

    def begins_again(self) -> None:
        """Note the beginning of the block's backward."""
        now = time.perf_counter()
        self._survey.backward_is_seen()
        before = self._survey.last_again
        if before is not None:
            before.backward_host_s = now - before._host_s
        self._survey.last_again = self
        self.began_again = self._survey.mark(self._note_backward, begins_backward=True)
        if self.times_operators and self.plan is not None:
            # So that operators follow each other on the device as they do where the host is far ahead.
            self._survey.meter.keep_host_ahead(len(self.plan.operators))
        self._host_s = time.perf_counter()

    def ends_again(self) -> None:
        """Note the end of the recomputation."""
        self.computed_again = self._survey.meter.now()
        now = time.perf_counter()
        self.again_host_s = now - self._host_s
        self._host_s = now

    def now(self) -> Any:
        """Return this moment on the device."""
        return self._survey.meter.now()

    def timed(self, moments: dict[int, tuple[Any, Any]]) -> None:
        """Note when the operators of the replay began and ended."""
        self.moments = moments

    def refused(self, message: str) -> None:
        """Note that the kind cannot be computed again."""
        self._survey.refuse(self.key, message)
