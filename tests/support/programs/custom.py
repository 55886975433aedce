"""custom.py: custom Functions that save, read, keep and write in the ways that autograd allows, by name.

Each is called with a tensor and the `Kept` of the run: where a backward keeps for ever what it unpacked.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from functions import KeepsUnpacked


class Interrupt(BaseException):
    """As KeyboardInterrupt: no Exception."""


class _Custom(torch.autograd.Function):
    """sin(x) with what is saved, and how it is read, left to the subclass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.kept = kept
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * x.cos(), None


class SavesOutput(_Custom):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        y = x.sigmoid()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return gradient * y * (1 - y), None


class SavesManyTimes(_Custom):
    """The input, twice, its transpose, a slice, an expanded row, an intermediate and a view on that; and None."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        middle = x * 2
        flat = x.reshape(-1)
        ctx.save_for_backward(x, x, x.transpose(0, -1) if x.dim() else x, flat[3:9], flat[:1].expand(5), None, middle,
                              middle.reshape(-1)[1:])  # fmt: skip
        return middle.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        first, second, turned, part, row, nothing, middle, rest = ctx.saved_tensors
        assert nothing is None
        turned = turned.transpose(0, -1) if turned.dim() else turned
        return gradient * (first + second.tanh() + turned) + part.sum() + row.sum() + middle.sin() + rest.sum(), None


class ReadsTwice(_Custom):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (first,) = ctx.saved_tensors
        (second,) = ctx.saved_tensors
        return gradient * (first.cos() + second.cos()) / 2, None


class _SavesItsOwn(_Custom):
    """Saves what the program has not.

    Where a backward writes into a tensor of the program by way of what it unpacked, no hook can follow.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(x * 2)
        return x.sin()


class ReturnsUnpacked(_SavesItsOwn):
    """Its gradient is what it unpacked, with no arithmetic in between."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return x, None


class ReturnsInput(_Custom):
    """The same of a tensor that the program holds, and that other operators may have saved."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return x, None


class ReturnsView(_SavesItsOwn):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return x[...], None


class WritesIntoUnpacked(_SavesItsOwn):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return x.mul_(gradient), None


class InPlace(_Custom):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        ctx.mark_dirty(x)
        x.sigmoid_()
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return gradient * y * (1 - y), None


class TwoOutputs(_Custom):
    """The second output is not differentiable and is saved; the gradient of what is not used stays None."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: list[torch.Tensor]) -> Any:
        ctx.set_materialize_grads(False)
        mask = x.abs() > 0.3
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(mask, x)
        return x * mask, mask

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None, of_mask: torch.Tensor | None) -> Any:
        mask, x = ctx.saved_tensors
        return None if gradient is None else gradient * mask + x * 0, None


class RunsABackward(_Custom):
    """Its backward runs a forward and a backward of its own."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            inner.sin().exp().sum().backward()
        return gradient * inner.grad, None


class OldStyle(_Custom):
    """Holds a tensor on ctx, past every hook, and saves the same one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        ctx.aside = x.detach()
        ctx.save_for_backward(ctx.aside, x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        aside, x = ctx.saved_tensors
        return gradient * (x.cos() + aside - ctx.aside), None


class FailsInForward(_Custom):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(x)
        x.clone().exp()
        raise ValueError("planted in forward")


class FailsInBackward(_Custom):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        raise ValueError(f"planted in backward, where {x.dim()} dimensions were saved")


class Interrupted(_Custom):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise Interrupt("planted in backward")


FUNCTIONS: dict[str, type[torch.autograd.Function]] = {
    kind.__name__: kind
    for kind in (
        SavesOutput, SavesManyTimes, ReadsTwice, ReturnsUnpacked, ReturnsInput, ReturnsView, KeepsUnpacked,
        WritesIntoUnpacked, InPlace, TwoOutputs, RunsABackward, OldStyle, FailsInForward, FailsInBackward, Interrupted,
    )
}  # fmt: skip
FAILING = {"FailsInForward", "FailsInBackward", "Interrupted"}
WRITES = {"WritesIntoUnpacked", "InPlace"}
# Autograd takes a wrapper subclass for a leaf's .grad, and adds into inner tensors that the leaf holds too.
NOT_OF_WRAPPERS = {"ReturnsUnpacked", "ReturnsInput", "ReturnsView"}


def call(name: str, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
    result = FUNCTIONS[name].apply(x, kept)
    return result[0] if isinstance(result, tuple) else result


class Garbage:
    """What only the collector finds; it holds a graph."""

    def __init__(self, graph: object) -> None:
        self.graph = graph
        self.itself = self


def _fail(gradient: torch.Tensor) -> None:
    raise ValueError("planted in a hook")


# Hooks on a tensor's gradient: what they return, if anything, takes its place.
HOOKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "double": lambda gradient: gradient * 2,
    "look": lambda gradient: None,
    "forward_and_backward": lambda gradient: _step_in_hook(gradient),
    "fail": _fail,
}


def _step_in_hook(gradient: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        x = gradient.detach().clone().requires_grad_()
        (x.sin() * x).sum().backward()
    return gradient + 0.01 * x.grad
