"""The memory that a fitted model may take on its device, beside others that are fitted there."""

import weakref

import torch
from torch import nn

from torchoffload._devices import Meter
from torchoffload._fit.machine.agreement import Agreement
from torchoffload._fit.plan.step import Step, least_plan
from torchoffload._observe.units import human_bytes

__all__ = ["Budget"]

_ANY_BYTES = 1 << 62
# One model may be trained less often than another one: the critic of a generator may take five steps for each of its.
_PATIENCE = 8
# If a model takes no step for so many steps of others, it has no share. Models that take turns may be trained again
# later: then it has its share again.
_LEFT_OVER = 32
_budgets: "weakref.WeakSet[Budget]" = weakref.WeakSet()


class Budget:
    """The memory that one fitted model plans for.

    Parameters
    ----------
    memory_bytes : int
        The bytes that the process may reserve on the device.
    margin : float
        The part of it that is left for fragmentation.
    device : torch.device
        The device.
    model : nn.Module
        The model. It is held weakly: one that is gone shares nothing with others.

    Attributes
    ----------
    device_bytes : int
        The bytes that the process could have of the device when the plan was made.
    sharer_count : int
        How many models of the process were fitted on the device when the plan was made, this one among them, without
        those that have taken no step for long.
    is_surveying : bool
        Whether the model's survey has begun and not ended.
    beyond_bytes : int
        The bytes that some steps of the model take beyond their plan, since the survey saw none of these steps. Plans
        leave as much free.
    """

    def __init__(self, memory_bytes: int, margin: float, device: torch.device, model: nn.Module) -> None:
        self.memory_bytes = memory_bytes
        self.margin = margin
        self.device_bytes = _ANY_BYTES
        self.sharer_count = 1
        self.is_surveying = False
        self.beyond_bytes = 0
        self._idle_steps = 0  # steps of others that were surveyed since this model's latest one
        self._unused_steps = 0  # steps of others since this model's latest one
        self._was_left_over: weakref.WeakSet[Budget] = weakref.WeakSet()  # when the plan was made
        self._device = device
        self._model = weakref.ref(model)
        self._model_name = type(model).__name__
        _budgets.add(self)

    @property
    def usable_bytes(self) -> int:
        """The bytes that all plans of the process together may allocate."""
        return self.allocatable_bytes - self.beyond_bytes

    @property
    def allocatable_bytes(self) -> int:
        """The bytes that the process may allocate."""
        return int(self.reservable_bytes * (1 - self.margin))

    @property
    def reservable_bytes(self) -> int:
        """The bytes that the process may reserve, and has."""
        return min(self.memory_bytes, self.device_bytes)

    @property
    def limit(self) -> str:
        """The limit of plans, in words."""
        if self.device_bytes < self.memory_bytes:
            return f"{human_bytes(self.device_bytes)}, all that the device has left for this process,"
        return human_bytes(self.memory_bytes)

    def room_bytes(self, step: Step) -> int:
        """Return the bytes that a plan of the step may allocate.

        Each of several models was surveyed while the others were in their least memory: the memory beyond that is
        divided among them.
        """
        if self.sharer_count == 1:
            return self.usable_bytes
        needed = step.peak_bytes(least_plan(step))
        return min(self.usable_bytes, needed + max(0, self.usable_bytes - needed) // self.sharer_count)

    def begin_survey(self) -> None:
        """Begin a survey, which others wait for once its first step has begun."""
        self._idle_steps = self.beyond_bytes = 0

    def note_surveyed_step(self, *, is_known: bool) -> None:
        """Take notice of the end of a step of the survey; ``is_known``: it showed all there is to know."""
        self.is_surveying = not is_known
        self._idle_steps = 0
        for other in self._others():
            other._idle_steps += 1

    def note_step(self) -> None:
        """Take notice of the end of a step of the model."""
        self._unused_steps = 0
        for other in self._others():
            other._unused_steps += 1

    def _left_over(self) -> "set[Budget]":
        return {each for each in self._others() if each._unused_steps >= _LEFT_OVER}

    @property
    def left_over(self) -> list[str]:
        """The other fitted models that have taken no step for long, by their classes: they have no share."""
        return sorted(each._model_name for each in self._left_over())

    @property
    def has_other_sharers(self) -> bool:
        """Whether a model that had a share when the plan was made is left over now, or one that had none trains."""
        alive = self._others()
        return self._left_over() != {each for each in self._was_left_over if each in alive}

    @property
    def waits_for_others(self) -> bool:
        """Whether to go on with the survey, in the least memory, for the sake of another model's survey.

        A model that takes no more steps is not waited for.
        """
        return any(other.is_surveying and other._idle_steps <= _PATIENCE for other in self._others())

    def _others(self) -> list["Budget"]:
        others = [each for each in _budgets if each is not self and each._device == self._device]
        return [each for each in others if each._model() is not None]

    def share(self, agreement: Agreement | None, meter: Meter) -> None:
        """Take notice of the device's memory, of the other models on it and of other ranks, before a plan is made."""
        left_over = self._left_over()
        self._was_left_over = weakref.WeakSet(left_over)
        self.sharer_count = 1 + len(self._others()) - len(left_over)
        self.device_bytes = meter.total_bytes() if meter.measures_memory else _ANY_BYTES
        if agreement is not None:
            given, had, self.margin, count = agreement.largest(
                -self.memory_bytes, -self.device_bytes, self.margin, self.sharer_count
            )
            self.memory_bytes, self.device_bytes, self.sharer_count = int(-given), int(-had), int(count)

    def give(self, memory_bytes: int) -> None:
        """Take another amount of memory."""
        self.memory_bytes = memory_bytes

    def end(self) -> None:
        """Leave the memory to the others."""
        self.is_surveying = False
        _budgets.discard(self)
