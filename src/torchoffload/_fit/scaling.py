"""Plans for calls whose arguments are smaller than those of the call that was surveyed."""

import dataclasses
import math

from torchoffload._fit.step import Call, Kind, Step, plan_step
from torchoffload._fit.trials import Trial

__all__ = ["SmallerCalls", "scaled"]

_PARTS = 8  # sizes are told apart by eighths of the largest one
_MORE = 1.05  # what a smaller call is taken to need, of its share: not all in a step grows with its arguments


class SmallerCalls:
    """Plans for smaller calls, by how large their arguments are: the smaller, the less is computed again or moves.

    Parameters
    ----------
    settled : Trial
        The plan of the largest call.
    largest_size : int
        The elements of the arguments of that call.
    plan_bytes : int
        What a plan may allocate on the device.
    """

    def __init__(self, settled: Trial, largest_size: int, plan_bytes: int) -> None:
        self._settled = settled
        self._largest_size = largest_size
        self._plan_bytes = plan_bytes
        self._trials: dict[int, Trial] = {}

    def plan_for(self, size: int) -> Trial:
        """Return the plan of a call whose arguments have so many elements."""
        part = math.ceil(_PARTS * size / self._largest_size) if self._largest_size else _PARTS
        if part >= _PARTS:
            return self._settled
        if part not in self._trials:
            step = scaled(self._settled.step, min(1.0, _MORE * part / _PARTS))
            plan = plan_step(step, self._plan_bytes)
            self._trials[part] = self._settled if plan is None else Trial(step, plan)
        return self._trials[part]


def scaled(step: Step, share: float) -> Step:
    """Return what a step takes that has this share of the bytes and times of another one, beside what is fixed."""
    fixed = sum(step.fixed.values())

    def part(nbytes: int) -> int:
        return math.ceil(min(nbytes, fixed) + max(0, nbytes - fixed) * share)

    return dataclasses.replace(
        step,
        kinds=tuple(_scaled_kind(kind, share) for kind in step.kinds),
        calls=tuple(Call(call.kind, part(call.forward_bytes), part(call.backward_bytes)) for call in step.calls),
        head_s=step.head_s * share,
        loss_s=step.loss_s * share,
        end_s=step.end_s * share,
        loss_bytes=part(step.loss_bytes),
    )


def _scaled_kind(kind: Kind, share: float) -> Kind:
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
    return Kind(kind.forward_s * share, kind.backward_s * share, outputs, ways, kind.input_link_share)
