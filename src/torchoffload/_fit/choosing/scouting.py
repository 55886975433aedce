"""A scouting call: a real call of a model in which all that autograd saves moves, and tells in which module it was."""

from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from torchoffload._contexts.offload_activations import OffloadActivations
from torchoffload._contexts.options import OffloadOptions
from torchoffload._core import core
from torchoffload._fit.choosing.call_tree import CallTree
from torchoffload._fit.choosing.collector import Collector
from torchoffload._pytorch import hook_stack
from torchoffload._pytorch.compiled_calls import called_modules, is_compiled
from torchoffload._pytorch.hook_stack import Role

__all__ = ["Scouting"]


class Scouting:
    """One call of a model that is watched.

    It needs no more memory than any other call whose saved tensors all move. Hooks are on the modules as long as it
    lasts.

    Parameters
    ----------
    model : nn.Module
        The model, whose call has begun.
    arguments : tuple
        The positional and the keyword arguments of the call.
    options : OffloadOptions
        The options of the context that moves.
    frame : FrameType
        The Python frame that runs as long as the call does.
    """

    def __init__(self, model: nn.Module, arguments: Any, options: OffloadOptions, frame: FrameType) -> None:
        self._model = model
        self._collector = Collector(model)
        windows = {"offload_window_bytes": 0, "reload_window_bytes": 0}
        manager = OffloadActivations(model=model, **(options.as_keywords() | windows))
        called = list(called_modules(model))
        inside = [each for each in called if each is not model]
        ends_watch = self._collector.watch(dict(zip(inside, inside, strict=True)))
        self._collector.begin(model, arguments)
        self._context = manager._open()
        # Below a frame that Dynamo has given up it would trace the hook.
        disable: Any = torch._dynamo.disable if any(map(is_compiled, called)) else lambda pack: pack
        hooks = saved_tensors_hooks(disable(self._pack), core.unpack)
        hook_stack.push(self, Role.MODULE, hooks, frame, partial(_end, self._context, ends_watch))

    def _pack(self, tensor: torch.Tensor) -> Any:
        self._collector.note_save(tensor)
        return self._context.pack(tensor)

    def end(self) -> CallTree:
        """End it, once forward has returned. Return the calls."""
        hook_stack.leave(self)
        self._collector.end(self._model)
        return self._collector.tree()


def _end(context: core.Context, ends_watch: list[Callable[[], None]]) -> None:
    context.exit()
    for end in ends_watch:
        end()
