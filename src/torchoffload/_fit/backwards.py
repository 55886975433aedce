"""When the backward of what a model returned begins, and when it ends."""

import weakref
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["Backwards"]


class _Listener(Protocol):
    def backward_begins(self) -> None: ...
    def backward_ends(self) -> None: ...


class Backwards:
    """Tells a listener of each backward through what a model returned.

    Parameters
    ----------
    listener : object
        Its ``backward_begins()`` and ``backward_ends()`` are called. It is held weakly, since the graph holds this.
    """

    def __init__(self, listener: _Listener) -> None:
        self._listener = weakref.ref(listener)
        self._task = -1  # the graph task that was told of last

    def follow(self, output: Any) -> None:
        """Tell of backwards through the tensors in ``output``."""
        for leaf in [*tree_leaves(output), *tree_leaves(dict(getattr(output, "__dict__", {})))]:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(self._begins)  # type: ignore[no-untyped-call]

    def _begins(self, _gradient: torch.Tensor) -> None:
        self.is_seen()

    def is_seen(self) -> None:
        """Take notice of a backward, in which this is called."""
        task, listener = torch._C._current_graph_task_id(), self._listener()
        if task == self._task or listener is None:
            return
        self._task = task
        listener.backward_begins()
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(_end, self._listener))


def _end(listener: "weakref.ref[_Listener]") -> None:
    found = listener()
    if found is not None:
        found.backward_ends()
