"""The state of a fitted model at one moment, for the report, the frontier and plan files."""

from dataclasses import dataclass
from typing import Any

from torchoffload._fit.model.phase import Phase
from torchoffload._fit.plan.step import Step
from torchoffload._fit.plan.trials import Trial

__all__ = ["Snapshot"]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of a fitted model at one moment.

    Attributes
    ----------
    model_name : str
        The class of the model.
    block_count : int
        The number of its blocks.
    phase : Phase
        The phase.
    why_over : str or None
        Why there will be no more steps; None if some may come.
    has_been_called : bool
        Whether a call of the model with gradients was seen.
    memory_bytes, device_bytes, room_bytes : int
        The memory that the user gave, the part of it that the device has, and the part that a plan may take.
    sharer_count : int
        The number of fitted models that share the memory.
    allocator : str
        A sentence about the settings of PyTorch's allocator, or nothing.
    largest_size : int
        The bytes of the arguments of the model's largest call.
    step : Step or None
        The surveyed step; None while the survey goes on.
    settled : Trial or None
        The plan that is followed for good; None while there is none.
    trials : tuple of Trial
        The plans that were tried.
    blocks : tuple of str
        The names of all blocks.
    opener : str
        The part of the model whose call begins the surveyed step; empty for the model itself.
    others : tuple of (str, Trial)
        Likewise for the steps that begin with calls of other parts, and the plan that these follow.
    names : tuple of str
        The block of each call of the surveyed step.
    operators : tuple of tuple
        The operators of each kind of block, in order.
    obstacles : dict
        For the number of a kind that cannot be computed again, the reason.
    is_of_several : bool
        Whether several ranks plan together.
    left_plan_count : int
        The number of calls of blocks that called other operators than planned.
    notes : tuple of str
        Notes for the user.
    """

    model_name: str
    block_count: int
    phase: Phase
    why_over: str | None
    has_been_called: bool
    memory_bytes: int
    device_bytes: int
    room_bytes: int
    sharer_count: int
    allocator: str
    largest_size: int
    step: Step | None
    settled: Trial | None
    trials: tuple[Trial, ...]
    blocks: tuple[str, ...]
    opener: str
    others: tuple[tuple[str, Trial], ...]
    names: tuple[str, ...]
    operators: tuple[tuple[Any, ...], ...]
    obstacles: dict[int, str]
    is_of_several: bool
    left_plan_count: int
    notes: tuple[str, ...]
