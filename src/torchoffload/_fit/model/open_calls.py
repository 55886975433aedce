"""The calls of a fitted model that are running, and whether a backward runs inside of one of them."""

import sys
import threading
from types import FrameType

import torch

__all__ = ["OpenCalls"]

# One of these functions runs as long as a backward does that Python code asks for.
_BACKWARDS = {torch.autograd.grad.__code__, torch.autograd.backward.__code__}


class OpenCalls:
    """The outermost calls of a model that are running: one a thread.

    A program may ask for a gradient in the forward of a module, as energy-based layers do, or potentials for forces.
    That backward belongs to the call. The engine runs it on threads of its own on a GPU, so that its operators do not
    tell from where it was called: the frames of the thread of the call do.
    """

    def __init__(self) -> None:
        self._frames: dict[int, FrameType] = {}  # that run as long as the calls do, by their threads

    def begin(self, frame: FrameType) -> None:
        """Note that a call begins on this thread, which lasts as long as a frame runs."""
        self._frames[threading.get_ident()] = frame

    def end(self) -> None:
        """Note that the call of this thread has ended. One that a KeyboardInterrupt has left is not told of."""
        self._frames.pop(threading.get_ident(), None)

    def have_backward(self) -> bool:
        """Return whether the backward that runs here is one inside of a call; of any thread, on one of the engine's."""
        own = threading.get_ident()
        calls = {own: self._frames[own]} if own in self._frames else self._frames.copy()
        # No variable holds the frames of all threads: this function's own frame is one of them, and would hold itself.
        return any(_has_backward(sys._current_frames().get(thread), call) for thread, call in calls.items())


def _has_backward(frame: FrameType | None, call: FrameType) -> bool:
    """Return whether a call runs below a frame, and a backward between the two."""
    is_in_backward = False
    while frame is not None and frame is not call:
        is_in_backward |= frame.f_code in _BACKWARDS
        frame = frame.f_back
    return frame is not None and is_in_backward
