"""tasks.py: the scenarios of what is done as a graph task ends (R14)."""

import contextlib
from typing import Never

import torch
from scenario import NBYTES, Stage, scenario


def buffers_beyond(stage: Stage, before_bytes: int) -> str:
    return f"{(stage.simulation.allocated_bytes() - before_bytes) // NBYTES} buffers stay"


@scenario("EndedTaskPassesBy", right="0 buffers stay", wrong="2 buffers stay")
def a_backward_ends_before_it_comes_to_what_it_reloaded(stage: Stage) -> str:
    x = stage.leaf()
    with stage.context(reload_window_bytes=2 * NBYTES):
        middle = x.sin().sin().sin().sin()
        y = middle.exp()
    before_bytes = stage.simulation.allocated_bytes()
    torch.autograd.grad(y.sum(), middle, retain_graph=True)
    return buffers_beyond(stage, before_bytes)


@scenario("EndedTaskWeakens", right="0 buffers stay", wrong="1 buffers stay")
def a_backward_takes_one_of_two_branches(stage: Stage) -> str:
    x = stage.leaf()
    with stage.context():
        h = x.exp()
        first, second = h.sin(), h.cos()
    del h
    before_bytes = stage.simulation.allocated_bytes()
    torch.autograd.grad(first.sum(), x, retain_graph=True)
    outcome = buffers_beyond(stage, before_bytes)
    del second
    return outcome


@scenario("FailedTaskIsNoticed", right="0 buffers stay", wrong="2 buffers stay")
def a_backward_fails_before_it_comes_to_what_it_reloaded(stage: Stage) -> str:
    def refuse(_gradient: torch.Tensor) -> Never:
        raise ValueError

    x = stage.leaf()
    with stage.context(reload_window_bytes=2 * NBYTES):
        middle = x.sin().sin().sin().sin()
        middle.register_hook(refuse)
        y = middle.exp()
    before_bytes = stage.simulation.allocated_bytes()
    with contextlib.suppress(ValueError):
        y.sum().backward()
    with stage.context():
        other = stage.leaf().sin()
    del other
    return buffers_beyond(stage, before_bytes)
