"""The functions that ``torch.compile`` made of a model for an amount of memory, and which of them a call runs.

A graph is planned for the sizes with which it is compiled. If it has dynamic shapes, PyTorch runs it for larger calls,
too, which may not fit. So the first function runs calls of its own shapes alone, and its graphs have no dynamic shapes.
A second one runs all other calls, and is made anew for a call that may not fit.
"""

from dataclasses import dataclass
from typing import Any

import torch

from torchoffload._contexts.planned_graphs import GraphPlan, PlannedGraphs
from torchoffload._fit.model.sizes import tensors_in

__all__ = ["CallSize", "PlannedFunction", "PlannedFunctions"]

_ANY_BYTES = 1 << 62


@dataclass(frozen=True)
class CallSize:
    """The size of a call of the model.

    Attributes
    ----------
    shapes : tuple
        The shapes and types of the tensors in its arguments.
    """

    shapes: tuple[tuple[torch.Size, torch.dtype], ...]

    @classmethod
    def of(cls, inputs: Any) -> "CallSize":
        """Return the size of a call with these arguments."""
        return cls(tuple((tensor.shape, tensor.dtype) for tensor in tensors_in(inputs)))

    @property
    def nbytes(self) -> int:
        """The bytes of these tensors."""
        return sum(shape.numel() * dtype.itemsize for shape, dtype in self.shapes)


@dataclass(eq=False)
class PlannedFunction:
    """One function. The model holds the function that ``torch.compile`` made, since that holds the model.

    Attributes
    ----------
    graphs : PlannedGraphs
        Its graphs.
    size : CallSize
        The size of the call that it was made for.
    memory_bytes : int
        The memory that it was made for.
    plans : tuple of GraphPlan
        The plans of its graphs that were noted.
    least_bytes : int
        The bytes of the arguments of the smallest call that a graph with dynamic shapes was compiled for.
    """

    graphs: PlannedGraphs
    size: CallSize
    memory_bytes: int
    plans: tuple[GraphPlan, ...] = ()
    least_bytes: int = _ANY_BYTES

    def note_plans(self, size: CallSize) -> list[GraphPlan]:
        """Return the plans that a call of this size has made."""
        former, self.plans = self.plans, self.graphs.plans
        new = [plan for plan in self.plans if not any(plan is each for each in former)]
        if any(plan.is_dynamic for plan in new):
            self.least_bytes = min(self.least_bytes, size.nbytes)
        return new

    def needed_bytes(self, size: CallSize, graph_count: int) -> int:
        """Return the memory that a call of this size takes, as predicted.

        0: its plan is the one of the least memory, and does not fit. The memory of a graph with dynamic shapes, without
        its inputs, is reckoned to grow with the square of the call's bytes, as that of attention does.
        """
        plans = self.graphs.all_plans
        if not all(plan.fits for plan in plans):
            return 0
        if not plans:  # no graph is compiled yet, or PyTorch's cache does not tell the plan of one
            return self.memory_bytes if graph_count <= self.graphs.graphs else _ANY_BYTES
        growth = max(1.0, size.nbytes / max(1, self.least_bytes)) ** 2
        more = graph_count - self.graphs.graphs
        return max(_grown_bytes(plan, growth) + more * plan.other_bytes for plan in plans)


def _grown_bytes(plan: GraphPlan, growth: float) -> int:
    most_bytes = plan.predicted_peak_bytes + (0 if plan.is_tight else plan.doubt_bytes)
    return plan.input_bytes + int((most_bytes - plan.input_bytes) * (growth if plan.is_dynamic else 1))


class PlannedFunctions:
    """The functions of one model.

    Parameters
    ----------
    dynamic : bool or None
        The argument of ``torch.compile``. False: each size has graphs of its own, so that one function does.
    """

    def __init__(self, dynamic: bool | None) -> None:
        self._dynamic = dynamic
        self._first: PlannedFunction | None = None
        self._other: PlannedFunction | None = None

    @property
    def all(self) -> list[PlannedFunction]:
        """The functions, the first one first."""
        return [each for each in (self._first, self._other) if each is not None]

    @property
    def plans(self) -> tuple[GraphPlan, ...]:
        """The plans of their graphs."""
        return tuple(plan for each in self.all for plan in each.graphs.plans)

    def _is_for_first(self, size: CallSize) -> bool:
        return self._dynamic is not None or self._first is None or self._first.size.shapes == size.shapes

    def find(self, size: CallSize) -> PlannedFunction | None:
        """Return the function for a call; None if there is none yet."""
        return self._first if self._is_for_first(size) else self._other

    def put(self, function: PlannedFunction) -> None:
        """Have a function run calls of its size, in place of another one that did."""
        if self._is_for_first(function.size):
            self._first = function
        else:
            self._other = function

    def clear(self) -> None:
        """Forget all functions."""
        self._first = self._other = None

    def mark_dynamic(self, inputs: Any, function: PlannedFunction) -> None:
        """Have PyTorch make the sizes dynamic by which a call differs from the first one, if it compiles a graph."""
        if function is not self._other or self._first is None:
            return
        tensors = list(tensors_in(inputs))
        if len(tensors) != len(self._first.size.shapes):
            return
        for tensor, (shape, _) in zip(tensors, self._first.size.shapes, strict=True):
            if tensor.dim() != len(shape):
                continue
            for dimension, (own, first) in enumerate(zip(tensor.shape, shape, strict=True)):
                if own != first:
                    torch._dynamo.maybe_mark_dynamic(tensor, dimension)
