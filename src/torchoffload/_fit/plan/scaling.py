"""Plans for steps of other sizes than the one that was surveyed."""

import dataclasses
import math

from torchoffload._fit.plan.step import BlockCall, BlockKind, Step, plan_step
from torchoffload._fit.plan.trials import Trial

__all__ = ["MORE", "OtherSizes", "scaled"]

_PARTS = 8  # sizes are told apart by eighths of the largest one
MORE = 1.05  # a plan that is not tried is for a step that is larger by this: its prediction may be too low
_MOST_LARGER = 1.25  # a step that is larger than this is surveyed, unless nothing has to be planned
_OF_ROOM = 0.8  # the part of the room for a larger step in which nothing is planned


class OtherSizes:
    """Plans for steps of other sizes: the smaller, the less is computed again or moves.

    Parameters
    ----------
    settled : Trial
        The plan of the largest step that was surveyed.
    plan_bytes : int
        The bytes that a plan may allocate until the end of backward; 0: all follow the plan of the largest step.
    """

    def __init__(self, settled: Trial, plan_bytes: int) -> None:
        self._settled = settled
        self._plan_bytes = plan_bytes
        self._trials: dict[int, Trial | None] = {_PARTS: settled}

    def trial_for(self, share: float) -> Trial | None:
        """Return the plan of a step of so many times the size of the largest one; None if it has to be surveyed."""
        if share > 1 and self._settled.is_plain:
            return self._settled if self._has_room(share) else None
        part = max(1, math.ceil(_PARTS * share - 1e-9))
        if part <= _PARTS and (self._settled.is_plain or self._plan_bytes == 0):
            return self._settled
        if share > _MOST_LARGER or (part > _PARTS and self._plan_bytes == 0):
            return None
        if part not in self._trials:
            found = self._planned(part)
            self._trials[part] = self._settled if found is None and part < _PARTS else found
        return self._trials[part]

    def _planned(self, part: int) -> Trial | None:
        share = MORE * part / _PARTS
        step = scaled(self._settled.step, min(1.0, share) if part < _PARTS else share)
        plan = plan_step(step.of_blocks, self._plan_bytes)
        return None if plan is None else Trial(step, plan)

    def _has_room(self, share: float) -> bool:
        """Return whether all of a larger step has ample room with nothing computed again or moved."""
        part = math.ceil(_PARTS * share)
        if part not in self._trials:
            step = scaled(self._settled.step, MORE * part / _PARTS)
            plan = plan_step(step.of_blocks, int(self._plan_bytes * _OF_ROOM))
            self._trials[part] = self._settled if plan is not None and Trial(step, plan).is_plain else None
        return self._trials[part] is not None


def scaled(step: Step, share: float) -> Step:
    """Return a step with this share of the bytes and times of another one, beside the fixed bytes."""
    fixed = sum(step.fixed.values())

    def part(nbytes: int) -> int:
        return math.ceil(min(nbytes, fixed) + max(0, nbytes - fixed) * share)

    return dataclasses.replace(
        step,
        kinds=tuple(_scaled_kind(kind, share) for kind in step.kinds),
        calls=tuple(BlockCall(call.kind, part(call.forward_bytes), part(call.backward_bytes)) for call in step.calls),
        head_s=step.head_s * share,
        loss_s=step.loss_s * share,
        end_s=step.end_s * share,
        loss_bytes=part(step.loss_bytes),
        between_bytes=part(step.between_bytes),
    )


def _scaled_kind(kind: BlockKind, share: float) -> BlockKind:
    outputs = tuple(
        dataclasses.replace(
            output, sizes=tuple(math.ceil(size * share) for size in output.sizes), ready_s=output.ready_s * share
        )
        for output in kind.outputs
    )
    ways = tuple(
        dataclasses.replace(way, recompute_s=way.recompute_s * share, input_bytes=math.ceil(way.input_bytes * share))
        for way in kind.ways
    )
    return BlockKind(kind.forward_s * share, kind.backward_s * share, outputs, ways)
