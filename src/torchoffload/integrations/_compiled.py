"""Entering a context around the calls of a model that a trainer has compiled as a whole."""

import threading
from typing import Any

import torch
from torch import nn

import torchoffload
from torchoffload._contexts.keywords import ContextKeywords

__all__ = ["CompiledCalls"]


class CompiledCalls:
    """A context that is entered at each call of ``model`` with gradients enabled.

    The trainer calls a compiled wrapper, but gives callbacks the model inside it. So the hooks that enter and leave the
    context are set on that model and marked as not to be traced. They end the compiled region that was about to begin
    outside, and the forward of the model becomes a region of its own, whose saved tensors are saved inside the context.

    Parameters
    ----------
    model : torch.nn.Module
        The model inside of the compiled wrapper.
    options : dict
        Keyword options of ``OffloadActivations``.
    """

    def __init__(self, model: nn.Module, options: ContextKeywords) -> None:
        self._context = torchoffload.OffloadActivations(model=model, **options)
        self._open = threading.local()

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def enter(_module: nn.Module, _inputs: Any) -> None:
            if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
                self._context.__enter__()
                self._open.count = self._open_count() + 1

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
            self._leave()

        self._hooks = [model.register_forward_pre_hook(enter), model.register_forward_hook(leave, always_call=True)]

    def _open_count(self) -> int:
        return getattr(self._open, "count", 0)

    def _leave(self) -> None:
        if self._open_count():
            self._open.count -= 1
            self._context.__exit__(None, None, None)

    def remove(self) -> None:
        """Remove the hooks, and leave the context for calls that ended without their hook, as after Ctrl-C."""
        for hook in self._hooks:
            hook.remove()
        while self._open_count():
            self._leave()
