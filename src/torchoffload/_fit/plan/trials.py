"""Plans that were tried, with their times and bytes, and the messages about them."""

import dataclasses
import math
from typing import Any

import torch

from torchoffload._contexts.amounts import amount_text
from torchoffload._fit.plan.budget import Budget
from torchoffload._fit.plan.step import BlockCall, CallPlan, Step, StepPlan, Way
from torchoffload._observe.units import human_bytes

__all__ = ["MORE_ROOM", "DoesNotFitError", "Trial", "does_not_fit", "failure_message", "restricted", "unfit_message"]


class DoesNotFitError(torch.OutOfMemoryError):
    """A training step needs more memory than there is, whatever is chosen."""


def does_not_fit(message: str, device: torch.device) -> DoesNotFitError:
    """Return the error for a step that does not fit.

    Loops that try a smaller batch then know it by its class or by its text: those of
    ``accelerate.utils.find_executable_batch_size`` look for " out of memory.", Lightning's also for "CUDA".
    """
    return DoesNotFitError(f"fit: {'CUDA ' if device.type == 'cuda' else ''}out of memory. {message}")


MORE_ROOM = "Give a smaller batch, smaller blocks (blocks=), or leave more of the device to this process."


@dataclasses.dataclass
class Trial:
    """A plan, and the time and bytes that it took when it was tried.

    Attributes
    ----------
    step : Step
        The step that the plan was made for, with the times that it is predicted to take.
    plan : StepPlan
        The plan.
    step_s : float or None
        The least time of the steps that were timed; None while there is none.
    allocated_bytes : int
        The most that was allocated on the device until the end of a backward; 0 if this is not known.
    reserved_bytes : int
        The most that was reserved on the device at the end of a step, with its optimizer; likewise.
    backward_reserved_bytes : int
        Likewise, for forward and backward alone: without the bytes reserved between its steps, as by an optimizer.
    has_failed : bool
        Whether a step under the plan ran out of memory.
    room_bytes : int
        The most bytes that might be reserved as it was tried; 0 if it was not.
    waits_for_memory : bool
        Whether PyTorch's allocator had to give back cached memory in the step that was timed, which takes time.
    """

    step: Step
    plan: StepPlan
    step_s: float | None = None
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    backward_reserved_bytes: int = 0
    has_failed: bool = False
    room_bytes: int = 0
    waits_for_memory: bool = False

    @property
    def does(self) -> Any:
        """The work of the blocks, as a value to compare."""
        ways = [self._way(call, planned) for call, planned in zip(self.step.calls, self.plan.calls, strict=True)]
        moves = [(planned.moves, planned.moved) for planned in self.plan.calls]
        windows = [(planned.offload_bytes, planned.reload_bytes) for planned in self.plan.calls]
        return [(way.is_plain, way.kept) for way in ways], moves, windows, self.plan.loss_window_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that is on the device, as predicted."""
        return self.step.peak_bytes(self.plan)

    @property
    def again_count(self) -> int:
        """How many calls of blocks compute something again."""
        calls = zip(self.step.calls, self.plan.calls, strict=True)
        return sum(not self._way(call, planned).is_plain for call, planned in calls)

    @property
    def is_plain(self) -> bool:
        """Whether nothing is computed again, and nothing moves."""
        return not self.again_count and not self.plan.moved_bytes

    def with_times(self, step: Step) -> "Trial":
        """Return the same trial of the same step with other times."""
        return dataclasses.replace(self, step=step, plan=self.plan.timed_as(step))

    def _way(self, call: BlockCall, planned: CallPlan) -> Way:
        return self.step.kinds[call.kind].ways[planned.way]


def restricted(step: Step, *, may_recompute: bool, may_move: bool) -> Step:
    """Return a step in which nothing is computed again, or nothing moves."""
    if not may_recompute:
        kinds = [dataclasses.replace(kind, ways=tuple(way for way in kind.ways if way.is_plain)) for kind in step.kinds]
        step = dataclasses.replace(step, kinds=tuple(kinds))
    return step if may_move else dataclasses.replace(step, may_move=False)


def failure_message(trial: Trial) -> str:
    """Say that a step ran out of memory under a plan."""
    return f"A step ran out of memory under a plan that was predicted to take {human_bytes(trial.peak_bytes)}"


def unfit_message(step: Step, least: StepPlan, budget: Budget) -> str:
    """Say how much memory a step needs at least, and for which parts."""
    if budget.beyond_bytes:
        return (
            f"{budget.limit} is too little. Some steps take {human_bytes(budget.beyond_bytes)} more than planned, and "
            "no plan leaves as much free. Give more memory, a smaller batch, or smaller blocks."
        )
    needed = step.peak_bytes(least)
    wanted = amount_text(math.ceil(needed / (1 - budget.margin)))
    parts = dict(step.fixed)
    fixed = sum(parts.values())
    parts["at the loss"] = max(0, step.loss_bytes - fixed)
    parts["one block computed again"] = max(0, max((call.backward_bytes for call in step.calls), default=0) - fixed)
    parts["outside of forward and backward, as the optimizer"] = max(0, step.other_bytes - fixed)
    told = ", ".join(f"{name} {human_bytes(nbytes)}" for name, nbytes in parts.items())
    return (
        f"{budget.limit} is too little. This step needs at least {human_bytes(needed)}, and "
        f"{budget.margin:.0%} of the memory is left free. It takes: {told}; the last three not all at once. Give "
        f'memory="{wanted}", a smaller batch, or smaller blocks.'
    )
