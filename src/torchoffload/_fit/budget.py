"""What a fitted model may take on its device, beside others that are fitted there."""

import weakref

import torch

from torchoffload._fit.agreement import Agreement
from torchoffload._fit.step import Step, least_plan

__all__ = ["Budget"]

_MOST_MARGIN = 0.5
_MOST_WAITS = 64
_budgets: "weakref.WeakSet[Budget]" = weakref.WeakSet()


class Budget:
    """The memory that one fitted model plans for.

    Parameters
    ----------
    memory_bytes : int
        What the process may reserve on the device.
    margin : float
        The part of it that is left for fragmentation.
    device : torch.device
        The device.

    Attributes
    ----------
    sharer_count : int
        How many models of the process were fitted on the device when the plan was made, this one among them.
    is_surveying : bool
        Whether the model's survey has begun and not ended.
    """

    def __init__(self, memory_bytes: int, margin: float, device: torch.device) -> None:
        self.memory_bytes = memory_bytes
        self.margin = self._given_margin = margin
        self.sharer_count = 1
        self.is_surveying = False
        self._waits = 0
        self._device = device
        _budgets.add(self)

    @property
    def usable_bytes(self) -> int:
        """What all plans of the process together may allocate."""
        return int(self.memory_bytes * (1 - self.margin))

    @property
    def is_exhausted(self) -> bool:
        """Whether so much is left free that other plans will not help."""
        return self.margin >= _MOST_MARGIN

    def room_bytes(self, step: Step) -> int:
        """Return what a plan of the step may allocate.

        Each of several models was surveyed while the others were in their least memory: what there is beyond that is
        divided among them.
        """
        if self.sharer_count == 1:
            return self.usable_bytes
        needed = step.peak_bytes(least_plan(step))
        return min(self.usable_bytes, needed + max(0, self.usable_bytes - needed) // self.sharer_count)

    def waits_for_others(self) -> bool:
        """Return whether to go on with the survey, in the least memory, for the sake of another model's survey.

        Asked at the end of each step. One that does not come to an end is not waited for forever.
        """
        self._waits += 1
        return self._waits <= _MOST_WAITS and any(other.is_surveying for other in self._all() if other is not self)

    def _all(self) -> list["Budget"]:
        return [each for each in _budgets if each._device == self._device]

    def share(self, agreement: Agreement | None) -> None:
        """Take notice of the other models on the device, and of the budgets of other ranks, before a plan is made."""
        self.sharer_count = len(self._all())
        if agreement is not None:
            memory_bytes, self.margin, count = agreement.largest(-self.memory_bytes, self.margin, self.sharer_count)
            self.memory_bytes, self.sharer_count = int(-memory_bytes), int(count)

    def give(self, memory_bytes: int) -> None:
        """Take another amount of memory."""
        self.memory_bytes, self.margin = memory_bytes, self._given_margin

    def tighten(self, reserved_bytes: int) -> None:
        """Leave more free, after steps that reserved so much."""
        beyond = max(0, reserved_bytes - self.memory_bytes) / self.memory_bytes
        self.margin = min(0.9, self.margin + max(beyond, 0.02))

    def end(self) -> None:
        """Leave what there is to the others."""
        self.is_surveying = False
        _budgets.discard(self)
