"""When the backward of a model's output begins, and when it ends."""

import weakref
from collections import deque
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from torchoffload._fit.model.sizes import tensors_in

__all__ = ["Backwards"]


class _Listener(Protocol):
    def backward_begins(self) -> None: ...
    def backward_ends(self) -> None: ...
    def is_inner_backward(self) -> bool: ...


_MOST_MISSED = 16  # the backwards of later calls, and the later calls, that may come before a call's own backward
_MOST_PATTERNS = 16

# What is called, and whether one of its arguments has a gradient: as the output of an earlier call has.
_Called = tuple["weakref.ref[nn.Module]", bool]


class _OpenCall:
    """A call of the model whose backward has not ended. It lives as long as the call's graph.

    Attributes
    ----------
    number : int
        How many calls had begun as it returned.
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
        Its ``backward_begins()`` and ``backward_ends()`` are called, unless its ``is_inner_backward()`` returns True
        as the backward begins: that of a gradient inside of a call. It is held weakly, since the graph holds this.
    """

    def __init__(self, listener: _Listener) -> None:
        self._listener = weakref.ref(listener)
        self._task = -1  # the graph task that was seen last
        self._is_inner = False  # it runs inside of a call
        self._count = 0  # of calls that have begun
        self._latest: deque[_Called] = deque(maxlen=_MOST_MISSED)  # of them
        self.late_number = 0  # of the latest call whose backward was not awaited any more as it came; 0 if none
        # The calls that there were between a call and its backward, if that was not awaited any more as it came.
        self._patterns: deque[tuple[_Called, ...]] = deque(maxlen=_MOST_PATTERNS)
        self._open: weakref.WeakSet[_OpenCall] = weakref.WeakSet()
        self._in_backward: weakref.WeakSet[_OpenCall] = weakref.WeakSet()

    @property
    def count(self) -> int:
        """How many calls have begun."""
        return self._count

    @property
    def has_open_calls(self) -> bool:
        """Whether there are calls whose backward has not ended, and may come yet.

        If the program keeps the output of a call, its backward is not awaited any more once those of many others have
        ended.
        """
        return len(self._open) > 0

    def call_begins(self, module: nn.Module, arguments: Any) -> None:
        """Await no backward of a call any more if those of all later ones have ended, and yet another call begins.

        As a rule the program keeps the call's output then. But a generator has its backward behind that of its critic,
        which is called between them. Once such a backward has come, the next ones are awaited as long as the same
        modules are called behind the call as were then, with arguments that have gradients where those had any: the
        loop may leave some of the backwards out.
        """
        newest = max(self._open, key=lambda call: call.number, default=None)
        others_are_over = newest is not None and newest.missed > 0 and newest.number < self._count
        self._count += 1
        self._latest.append((weakref.ref(module), any(each.requires_grad for each in tensors_in(arguments))))
        if others_are_over:
            for call in [each for each in self._open if each.missed > 0 and not self._may_come(each)]:
                self._give_up(call)

    def _may_come(self, call: _OpenCall) -> bool:
        since = self._since(call)
        return since is not None and any(pattern[: len(since)] == since for pattern in self._patterns)

    def _since(self, call: _OpenCall) -> tuple[_Called, ...] | None:
        """Return the calls that have begun since a call has ended; None if they are too many."""
        count = self._count - call.number
        return None if count > len(self._latest) else tuple(self._latest)[len(self._latest) - count :]

    def _give_up(self, call: _OpenCall) -> None:
        call.is_given_up = True
        self._open.discard(call)

    def follow(self, output: Any) -> bool:
        """Tell of backwards through the tensors in ``output``. Returns whether there are any that have one."""
        call = _OpenCall(self._count)
        for tensor in tensors_in(output):
            # A leaf, such as a parameter, would collect a hook in each call.
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(partial(self._begins, call))  # type: ignore[no-untyped-call]
                self._open.add(call)
        return call in self._open

    def _begins(self, call: _OpenCall, _gradient: torch.Tensor) -> None:
        if not self.is_seen():
            return
        self._in_backward.add(call)
        if call.is_given_up:
            self.late_number = call.number
            since = self._since(call)
            if since is not None and since not in self._patterns:
                self._patterns.append(since)

    def is_seen(self) -> bool:
        """Take notice of a backward, in which this is called. Returns whether it is one that is told of."""
        task, listener = torch._C._current_graph_task_id(), self._listener()
        if listener is None:
            return False
        if task == self._task:
            return not self._is_inner
        self._task, self._is_inner = task, listener.is_inner_backward()
        if self._is_inner:
            return False
        listener.backward_begins()
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(_end, weakref.ref(self)))
        return True

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
