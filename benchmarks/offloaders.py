"""What is compared: each offloader by name, as a context for the forward of one step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

# Called before each forward; what it returns is entered around it, and left before backward.
MakeContext = Callable[[], AbstractContextManager[Any]]


def _torchoffload(model: torch.nn.Module, options: dict[str, Any]) -> MakeContext:
    import torchoffload

    context = torchoffload.get_act_offloading_ctx_manager(model, **options)
    return lambda: context


def _save_on_cpu() -> AbstractContextManager[Any]:
    return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())


# A peer is one more entry: given the model and torchoffload's options, it makes its contexts.
OFFLOADERS: dict[str, Callable[[torch.nn.Module, dict[str, Any]], MakeContext]] = {
    "none": lambda _model, _options: contextlib.nullcontext,
    "torchoffload": _torchoffload,
    "save_on_cpu": lambda _model, _options: _save_on_cpu,
}
