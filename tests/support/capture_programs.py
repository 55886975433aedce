"""Programs that meet a CUDA graph capture: ``python capture_programs.py NAME``.

test_cuda_graphs.py runs each in a process of its own, since a capture that goes wrong leaves the process unusable. One
that returns prints "right".
"""

import contextlib
import gc
import sys
from collections.abc import Callable

import pytest
import torch

import torchoffload
from autograd_threads import await_autograd

SIDE = 256


def forward(x: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        x = x.sigmoid()
    return x.sum()


def context(window: int | None = 0) -> torchoffload.OffloadActivations:
    return torchoffload.OffloadActivations(min_offload_size=0, offload_window_bytes=window, reload_window_bytes=0)


def step(x: torch.Tensor, around: contextlib.AbstractContextManager[object]) -> torch.Tensor:
    with around:
        y = forward(x)
    return torch.autograd.grad(y, x)[0]


def leaf() -> torch.Tensor:
    return torch.linspace(-1, 1, SIDE * SIDE, device="cuda").reshape(SIDE, SIDE).requires_grad_()


class Side:
    """A stream on which all of a program runs, warmed up, as a capture needs it."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        with torch.cuda.stream(self.stream):
            self.x = leaf()
            for _ in range(3):
                step(self.x, contextlib.nullcontext())
            self.expected = step(self.x, contextlib.nullcontext())
            step(self.x, context())

    def check_later_steps(self) -> None:
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                assert torch.equal(step(self.x, context()), self.expected), "a later step is wrong"
        torch.cuda.synchronize()
        gc.collect()
        stats = torchoffload.stats()
        left = (stats.live_handles, stats.live_records, stats.live_slots, stats.live_tapes)
        assert left == (0, 0, 0, 0), f"handles, records, slots, tapes: {left} are left"


def asked_for_inside() -> None:
    """Moved before the capture, asked for inside it: an error of ours, before anything is captured that may not be."""
    side = Side()
    with torch.cuda.stream(side.stream), context():
        y = forward(side.x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side.stream):
        doubled = side.x.detach() * 2
        with pytest.raises(RuntimeError, match="before this CUDA graph capture"):
            torch.autograd.grad(y, side.x, retain_graph=True)
    graph.replay()  # of what else was captured
    torch.cuda.synchronize()
    assert torch.equal(doubled, side.x.detach() * 2)
    with torch.cuda.stream(side.stream):
        (gradient,) = torch.autograd.grad(y, side.x)
        assert torch.equal(gradient, side.expected), "the graph was hurt by the error"
    del y
    side.check_later_steps()


def dies_inside() -> None:
    """A graph whose copies are on their way is dropped while another is captured."""
    side = Side()
    for window in (0, 1 << 30):
        with torch.cuda.stream(side.stream), context(window):
            y = forward(side.x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side.stream):
            doubled = side.x.detach() * 2
            del y
            tripled = side.x.detach() * 3
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(doubled + side.x.detach(), tripled)
        side.check_later_steps()


def pins_nothing() -> None:
    """Pinned memory does not grow under a capture, neither of this thread's nor of another engine's work."""
    side = Side()
    torchoffload.trim()
    before = torchoffload.stats().pinned_bytes
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side.stream):
        gradient = step(side.x, context())
        assert torchoffload.stats().pinned_bytes == before, "pinned memory grew"
    assert torchoffload.stats().bytes_kept["capturing"] > 0
    with torch.no_grad():
        side.x.mul_(0.5)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    with torch.cuda.stream(side.stream):
        side.expected = step(side.x, contextlib.nullcontext())
    torch.cuda.synchronize()
    assert torch.equal(gradient, side.expected), "the replay with new inputs is wrong"
    side.check_later_steps()


def packed_before_flushed_inside() -> None:
    """What waits for its copy when a capture begins is copied after it."""
    side = Side()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side.stream):
        open_context = context()
        open_context.__enter__()
        y = forward(side.x)
    with torch.cuda.graph(graph, stream=side.stream):
        doubled = side.x.detach() * 2
        inner = side.x.exp()  # a hook event under the capture
    graph.replay()
    with torch.cuda.stream(side.stream):
        open_context.__exit__(None, None, None)
        (gradient,) = torch.autograd.grad(y, side.x)
        assert torch.equal(gradient, side.expected), "its gradient is wrong"
    del y, inner, doubled
    side.check_later_steps()


PROGRAMS: dict[str, Callable[[], None]] = {
    program.__name__: program for program in (asked_for_inside, dies_inside, pins_nothing, packed_before_flushed_inside)
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
    await_autograd("cuda")
    print("right", flush=True)
