"""Which of the functions that a model was compiled to a call runs, and the memory that it is taken to need."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchoffload._compile.joint_plan import GraphPlan
from torchoffload._fit.model.planned_functions import CallSize, PlannedFunction, PlannedFunctions


def size(rows: int, columns: int = 8) -> CallSize:
    return CallSize.of(((torch.empty(rows, columns),), {"labels": [torch.empty(rows)]}))


def plan(peak_bytes: int, *, doubt_bytes: int = 0, other_bytes: int = 0, is_dynamic: bool = False) -> GraphPlan:
    return GraphPlan(
        (), None, {}, 0, 1.0, peak_bytes, doubt_bytes, 1.0, peak_bytes, 0, other_bytes, 100, 1000, is_dynamic
    )


def function(made_for: CallSize, *plans: GraphPlan, graphs: int = 1) -> PlannedFunction:
    planned: Any = SimpleNamespace(nbytes=1000, graphs=graphs, plans=plans, all_plans=plans)
    made = PlannedFunction(planned, made_for, 1000)
    assert made.note_plans(made_for) == list(plans)
    assert made.note_plans(made_for) == []
    return made


def test_the_size_of_a_call_is_that_of_its_tensors():
    assert size(3).nbytes == 3 * 8 * 4 + 3 * 4
    assert size(3).shapes == size(3).shapes != size(8, 3).shapes


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_other_sizes_have_another_function_unless_the_program_has_chosen(dynamic: bool | None):
    functions = PlannedFunctions(dynamic)
    assert functions.find(size(4)) is None
    first = function(size(4), plan(500))
    functions.put(first)
    assert functions.find(size(4)) is first
    assert functions.find(size(3)) is (None if dynamic is None else first)
    if dynamic is None:
        other, later = function(size(3), plan(400)), function(size(6), plan(700))
        functions.put(other)
        assert functions.find(size(2)) is other
        functions.put(later)
        assert functions.all == [first, later]
        assert functions.find(size(4)) is first
        assert [each.predicted_peak_bytes for each in functions.plans] == [500, 700]
    functions.clear()
    assert functions.find(size(4)) is None


def test_what_a_call_needs():
    own, twice = size(4), size(8)
    made = function(own, plan(500, doubt_bytes=50, other_bytes=20), plan(300))
    assert made.needed_bytes(own, 1) == made.needed_bytes(twice, 1) == 550, "no larger call can run it"
    assert made.needed_bytes(own, 3) == 590
    others_hold_theirs = function(own, plan(500, other_bytes=20), graphs=3)
    assert others_hold_theirs.needed_bytes(own, 1) == 460
    assert function(own, plan(960, doubt_bytes=50)).needed_bytes(own, 1) == 960, "no plan takes less"
    assert function(own, plan(1200)).needed_bytes(own, 1) == 0, "and none fits"
    assert function(own).needed_bytes(own, 1) == 1000, "the plan is not known"
    assert function(own).needed_bytes(own, 2) > 1 << 60


def test_what_a_larger_call_needs():
    made = function(size(4), plan(500, doubt_bytes=50, is_dynamic=True), plan(900))
    assert made.needed_bytes(size(4), 1) == made.needed_bytes(size(2), 1) == 900
    assert made.needed_bytes(size(8), 1) == 100 + 4 * 450
    made.graphs.plans = made.graphs.all_plans = (plan(200),)
    made.note_plans(size(1))
    made.graphs.plans = made.graphs.all_plans = (plan(200, is_dynamic=True),)
    assert made.needed_bytes(size(8), 1) == 100 + 4 * 100, "a size of one has a graph of its own"
    made.note_plans(size(2))
    assert made.needed_bytes(size(8), 1) == 100 + 16 * 100


def test_the_sizes_that_differ_become_dynamic():
    functions = PlannedFunctions(None)
    functions.put(function(size(4)))
    other = function(size(3))
    functions.put(other)
    tensor, labels = torch.empty(3, 8), torch.empty(3)
    functions.mark_dynamic(((tensor,), {"labels": [labels]}), other)
    assert tensor._dynamo_weak_dynamic_indices == {0}
    assert labels._dynamo_weak_dynamic_indices == {0}
    same = torch.empty(4, 8)
    functions.mark_dynamic(((same,), {"labels": [torch.empty(4)]}), functions.all[0])
    assert not hasattr(same, "_dynamo_weak_dynamic_indices")
