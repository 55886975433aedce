"""A context around the calls of a model that something out of reach has compiled."""

import threading
from typing import Any

import torch
from torch import nn

import torchoffload
from torchoffload._contexts.keywords import ContextKeywords

__all__ = ["CompiledCalls"]


class CompiledCalls:
    """Enters a context at each call of ``model`` that has gradients enabled, from inside of what compiled it.

    A trainer compiles its model and gives callbacks the one inside. Hooks that are not to be traced end the region
    that was about to begin, and the model's forward becomes one of its own: what that saves, it saves in the context.
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
        """Take the hooks away, and leave what a call that never came back (Ctrl-C) had entered."""
        for hook in self._hooks:
            hook.remove()
        while self._open_count():
            self._leave()
