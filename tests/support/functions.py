"""functions.py: custom autograd Functions that save what built-in operators never would."""

from collections.abc import Callable
from typing import Any

import torch


class Save(torch.autograd.Function):
    """Saves any tensors beside `x`, and hands them to `look` in backward. The output is a copy of `x`.

    ``Save.apply(x, look, *tensors)``; ``look(*unpacked)`` may return a tensor that the gradient is multiplied by.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, look: Callable[..., Any], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        ctx.look = look
        ctx.count = len(tensors)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        factor = ctx.look(*ctx.saved_tensors)
        return (gradient if factor is None else gradient * factor, None) + (None,) * ctx.count


class ReadTwice(torch.autograd.Function):
    """sin(x) whose backward reads its saved tensors twice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (first,) = ctx.saved_tensors
        (second,) = ctx.saved_tensors
        return gradient * (first.cos() + second.cos()) / 2


class ReturnsView(torch.autograd.Function):
    """x * y + 0; its backward returns views of what it unpacked, with no arithmetic in between."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = ctx.saved_tensors
        return y[:], x.t().t()


class SavesInput(torch.autograd.Function):
    """x * 2, saving x and nothing else; its backward is no derivative, but needs what it saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x


class WritesIntoUnpacked(torch.autograd.Function):
    """x * 3, saving x; its backward writes into what it unpacked and returns it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return x.mul_(gradient)


class KeepsUnpacked(torch.autograd.Function):
    """x.sin(); its backward puts what it unpacked into the list `kept`, for ever."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.kept = kept
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        ctx.kept.append(x)
        return gradient * x.cos(), None


class Fails(torch.autograd.Function):
    """The identity, saving x; raises in forward or in backward while `fails` (a one-element list) is true."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, where: str, fails: list[bool]) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.where, ctx.fails = where, fails
        if where == "forward" and fails[0]:
            raise ValueError("planted in forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (x,) = ctx.saved_tensors
        if ctx.where == "backward" and ctx.fails[0]:
            raise ValueError("planted in backward")
        return gradient * x, None, None
