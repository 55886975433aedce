"""fit of models that were compiled as wholes, in two processes: each rank plans its own graphs, and none waits."""

import os

import pytest
from processes import Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
IS_LONG = bool(os.environ.get("TORCHOFFLOAD_TEST_LONG"))
LESS_ON_ONE = [2.0, 0.7]  # parts of the peak of PyTorch's own plans


@pytest.mark.parametrize(
    ("parallelism", "compiled", "graphs", "calls"),
    [("ddp", "inside", 3, 3), ("fsdp2", "in place", 1, 2), *([("ddp", "outside", 3, 3)] if IS_LONG else [])],
    ids=["ddp-inside", "fsdp2", *(["ddp-outside"] if IS_LONG else [])],
)
def test_each_rank_plans_its_own_graphs(processes: Processes, parallelism: str, compiled: str, graphs: int, calls: int):
    """DDP cuts a graph at the ends of its buckets; FSDP2 breaks it at each layer, and layers have one in common."""
    arguments = {"parallelism": parallelism, "compiled": compiled, "parts": LESS_ON_ONE, "move": calls == 2}
    first, last = processes.run("fit_compiled:same_steps", timeout_s=240, **arguments)
    assert first["graphs"] == last["graphs"] == graphs
    assert first["calls"] == last["calls"] == calls
    assert first["again"] == first["moved_bytes"] == 0
    assert last["again"] + last["moved_bytes"] > 0
