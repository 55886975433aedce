"""What the models of the zoo share: what one is, the table of them, and how they are made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

__all__ = [
    "ZOO",
    "Size",
    "ZooModel",
    "adamw",
    "autocast",
    "built",
    "causal",
    "draw_tokens",
    "dtype_of",
    "entry",
    "lists_of",
    "make_zoo_model",
    "noise",
    "of_class",
]

Size = Literal["tiny", "real"]


@dataclass
class ZooModel:
    """A model that is trained.

    Attributes
    ----------
    model : nn.Module
        The model, in training mode.
    layers : list of nn.Module
        The layers that a user would put into checkpoints by hand.
    loss : callable
        Takes the number of the step, runs forward, and returns the loss.
    optimizer : torch.optim.Optimizer or None
        The optimizer that steps after each backward; None if gradients are only zeroed.
    """

    model: nn.Module
    layers: list[nn.Module]
    loss: Callable[[int], torch.Tensor]
    optimizer: torch.optim.Optimizer | None = None


ZOO: dict[str, Callable[[Size, torch.device], ZooModel]] = {}


def entry(make: Callable[[Size, torch.device], ZooModel]) -> Callable[[Size, torch.device], ZooModel]:
    ZOO[make.__name__] = make
    return make


def make_zoo_model(name: str, size: Size, device: torch.device) -> ZooModel:
    """Make a model of the zoo with weights drawn from seed 0. KeyError if there is none of that name."""
    torch.manual_seed(0)
    return ZOO[name](size, device)


# ---- What the entries share


def built(make: Callable[[], nn.Module], device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """Make a model on its device in training mode."""
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = make()
    finally:
        torch.set_default_dtype(default_dtype)
    return model.to(device).train()


def dtype_of(size: Size) -> torch.dtype:
    return torch.bfloat16 if size == "real" else torch.float32


def draw_tokens(device: torch.device, vocabulary: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocabulary, shape, generator=generator).to(device)


def noise(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def autocast(device: torch.device, *, wanted: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16) if wanted else contextlib.nullcontext()


def lists_of(model: nn.Module, *names: str) -> list[nn.Module]:
    """Return the layers of the module lists of these names."""
    return [layer for name in names for layer in model.get_submodule(name).children()]


def of_class(model: nn.Module, *names: str) -> list[nn.Module]:
    """Return the modules whose class has one of these names, in order."""
    found = [module for module in model.modules() if type(module).__name__ in names]
    if not found:
        raise ValueError(f"no module of {type(model).__name__} is a {' or '.join(names)}")
    return found


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def causal(
    size: Size, device: torch.device, config: Any, model_class: Any, layers: str, batch: int, tokens: int
) -> ZooModel:
    """Make a causal language model, without an optimizer."""
    config.use_cache = False
    model = built(lambda: model_class(config), device, dtype_of(size))
    data = draw_tokens(device, min(config.vocab_size, 30_000), batch, tokens)
    return ZooModel(model, lists_of(model, layers), lambda _: model(input_ids=data, labels=data).loss)
