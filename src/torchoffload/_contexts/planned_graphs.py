"""The graphs of a model that was compiled as a whole, as ``fit`` sees them. The package ``_compile`` plans them."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

__all__ = ["GraphPlan", "PiecePlan", "PlannedGraphs", "planned_graphs", "register_planner"]


class PiecePlan(Protocol):
    """The plan for a block of a graph; ``torchoffload._compile.joint_plan.PiecePlan`` explains it."""

    @property
    def name(self) -> str: ...
    @property
    def kept_bytes(self) -> int: ...
    @property
    def moved_bytes(self) -> int: ...
    @property
    def again(self) -> tuple[str, ...]: ...
    @property
    def again_s(self) -> float: ...


class GraphPlan(Protocol):
    """The plan for a graph; ``torchoffload._compile.joint_plan.GraphPlan`` explains it."""

    @property
    def pieces(self) -> tuple[PiecePlan, ...]: ...
    @property
    def releases(self) -> Mapping[str, str | None]: ...
    @property
    def reload_bytes(self) -> int: ...
    @property
    def predicted_s(self) -> float: ...
    @property
    def predicted_peak_bytes(self) -> int: ...
    @property
    def doubt_bytes(self) -> int: ...
    @property
    def other_bytes(self) -> int: ...
    @property
    def input_bytes(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def is_dynamic(self) -> bool: ...
    @property
    def fits(self) -> bool: ...
    @property
    def is_tight(self) -> bool: ...


class PlannedGraphs(Protocol):
    """The graphs of one model, which are planned for an amount of memory as they are compiled.

    Attributes
    ----------
    nbytes : int
        The memory for all graphs of a step. It may change: graphs that are compiled later are planned for it.
    graphs : int
        How many calls of graphs a step has.
    plans : tuple of GraphPlan
        The plans of the latest compilation of each piece of code.
    all_plans : tuple of GraphPlan
        Those of all compilations, such as for arguments of other sizes.
    """

    nbytes: int

    @property
    def graphs(self) -> int: ...
    @property
    def plans(self) -> tuple[GraphPlan, ...]: ...
    @property
    def all_plans(self) -> tuple[GraphPlan, ...]: ...

    def options(self) -> dict[str, Any]:
        """Return the options for ``torch.compile``."""

    def lines(self, first_number: int) -> list[str]:
        """Return the lines of a report on the plans, whose graphs have numbers from a first one on."""


_Planner = Callable[[int, int, bool], PlannedGraphs]
_planners: list[_Planner] = []


def register_planner(planner: _Planner) -> None:
    """Have graphs planned by a function that is given the memory in bytes and the number of graphs."""
    _planners[:] = [planner]


def planned_graphs(nbytes: int, graphs: int, *, sets_reload_window: bool) -> PlannedGraphs:
    """Return graphs to be planned for an amount of memory.

    ``sets_reload_window``: whether their context will be given the reload window that the plan says.
    """
    return _planners[0](nbytes, graphs, sets_reload_window)
