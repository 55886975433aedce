"""module_models.py: small models whose modules are chosen by offload_modules, and the runs that train them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import torchoffload
from devices import Device
from gradients import Program, Run, assert_same_gradients

WIDTH, TOKENS, DEPTH = 32, 16, 3
INPUT_BYTES = TOKENS * WIDTH * 4  # of what one layer hands to the next


class Attention(nn.Module):
    """Saves 3 records: its input, what exp gives, and the product of both."""

    SAVED_BYTES = 3 * INPUT_BYTES

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.query(x).mul(0.1).exp() + x)  # saves x, the exp, the sum


class Mlp(nn.Module):
    """Saves 3 records: its input, what gelu is given, and what it gives."""

    SAVED_BYTES = 3 * INPUT_BYTES

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x)))


class Layer(nn.Module):
    """Attention and Mlp, each with a residual that saves nothing."""

    SAVED_BYTES = Attention.SAVED_BYTES + Mlp.SAVED_BYTES

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Stack(nn.Module):
    """Layers, and a head; what stands between saves, too."""

    SAVED_BYTES = DEPTH * Layer.SAVED_BYTES

    def __init__(self, depth: int = DEPTH, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(layer() for _ in range(depth))
        self.lm_head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x.sin()).tanh()
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x).square().sum()


def options(device: Device) -> dict[str, Any]:
    """The options of the device's own context, as offload_modules takes them."""
    return device.context().options.as_keywords()


def offload(run: Run, device: Device, model: nn.Module, modules: Any, **chosen: Any) -> Any:
    """offload_modules on this run's device; None in a stock run."""
    return None if run.stock else torchoffload.offload_modules(model, modules, **(options(device) | chosen))


def training(
    device: Device,
    modules: Any,
    *,
    steps: int = 2,
    make: Callable[[], nn.Module] = Stack,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    **chosen: Any,
) -> Program:
    """A program: some steps of a model with `modules` (or what that makes of the model) chosen."""

    def program(run: Run) -> Any:
        model = wrap(run.module(make))
        x = run.leaf(TOKENS, WIDTH)
        is_maker = callable(modules) and getattr(modules, "__name__", "") == "of_model"
        offload(run, device, model, modules(model) if is_maker else modules, **chosen)
        for _ in range(steps):
            loss = model(x)
            loss.backward()
            run.check(loss=loss, step=model)
        return model, x.grad

    return program


def assert_moves(device: Device, modules: Any, nbytes: int, *, steps: int = 2, **rest: Any) -> Any:
    """Bit-equal, and exactly so many bytes move in each step."""
    program = training(device, modules, steps=steps, **rest)
    reason = "not_an_input" if nbytes == 0 else None
    return assert_same_gradients(program, device=device, moved_bytes=steps * nbytes, kept_reason=reason)
