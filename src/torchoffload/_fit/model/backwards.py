"""When the backward of a model's output begins, and when it ends."""

import weakref
from functools import partial
from typing import Any, Protocol

import torch

from torchoffload._fit.model.sizes import tensors_in

__all__ = ["Backwards"]


class _Listener(Protocol):
    def backward_begins(self) -> None: ...
    def backward_ends(self) -> None: ...


_MOST_MISSED = 16  # the backwards of later calls that may come before a call's own, as in a pipeline


class _OpenCall:
    """A call of the model whose backward has not ended. It lives as long as the call's graph.

    Attributes
    ----------
    number : int
        How many calls there were before it.
    missed : int
        The number of backwards of other calls that have ended since.
    is_given_up : bool
        Whether its backward is not awaited any more.
    """

    missed = 0
    is_given_up = False

    def __init__(self, number: int) -> None:
        self.number = number


class Backwards:
    """Tells a listener of each backward through an output of a model.

    Parameters
    ----------
    listener : object
        Its ``backward_begins()`` and ``backward_ends()`` are called. It is held weakly, since the graph holds this.
    """

    def __init__(self, listener: _Listener) -> None:
        self._listener = weakref.ref(listener)
        self._task = -1  # the graph task that was told of last
        self._count = 0  # of calls
        self._waits_longer = False  # since a backward came that was not awaited any more
        self._open: weakref.WeakSet[_OpenCall] = weakref.WeakSet()
        self._in_backward: weakref.WeakSet[_OpenCall] = weakref.WeakSet()

    @property
    def has_open_calls(self) -> bool:
        """Whether there are calls whose backward has not ended, and may come yet.

        If the program keeps the output of a call, its backward is not awaited any more once those of many others have
        ended.
        """
        return len(self._open) > 0

    def call_begins(self, *, starts_over: bool = True) -> None:
        """Await no backward of a call any more if those of all later ones have ended, and yet another call begins.

        As a rule the program keeps the call's output then. But a generator has its backward behind that of its critic,
        which is called between them. Once such a backward has come, the next ones are awaited until the module is
        called that began the step (``starts_over``): the loop may leave some of the backwards out.
        """
        newest = max(self._open, key=lambda call: call.number, default=None)
        if newest is None or newest.missed == 0 or newest.number >= self._count - 1:
            return
        if starts_over:
            for call in [each for each in self._open if each.missed > 0]:
                self._give_up(call)
        elif not self._waits_longer:
            self._give_up(newest)

    def _give_up(self, call: _OpenCall) -> None:
        call.is_given_up = True
        self._open.discard(call)

    def follow(self, output: Any) -> bool:
        """Tell of backwards through the tensors in ``output``. Returns whether there are any that have one."""
        call = _OpenCall(self._count)
        self._count += 1
        for tensor in tensors_in(output):
            # A leaf, such as a parameter, would collect a hook in each call.
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(partial(self._begins, call))  # type: ignore[no-untyped-call]
                self._open.add(call)
        return call in self._open

    def _begins(self, call: _OpenCall, _gradient: torch.Tensor) -> None:
        self._in_backward.add(call)
        self._waits_longer |= call.is_given_up
        self.is_seen()

    def is_seen(self) -> None:
        """Take notice of a backward, in which this is called."""
        task, listener = torch._C._current_graph_task_id(), self._listener()
        if task == self._task or listener is None:
            return
        self._task = task
        listener.backward_begins()
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(_end, weakref.ref(self)))

    def end(self) -> None:
        """Take notice of the end of a backward."""
        self._open -= self._in_backward
        self._in_backward.clear()
        for call in list(self._open):
            call.missed += 1
            if call.missed > _MOST_MISSED:
                self._give_up(call)
        listener = self._listener()
        if listener is not None:
            listener.backward_ends()


def _end(backwards: "weakref.ref[Backwards]") -> None:
    found = backwards()
    if found is not None:
        found.end()
