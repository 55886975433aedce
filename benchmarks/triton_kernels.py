"""Kernels of Triton for a model of the zoo. They need a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["gated", "gated_gradients"]

_SIZE = 1024


@triton.jit
def _gated(x, y, out, count, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    left, right = tl.load(x + at, inside).to(tl.float32), tl.load(y + at, inside).to(tl.float32)
    tl.store(out + at, left * tl.sigmoid(left) * right, inside)


@triton.jit
def _gated_gradients(x, y, grad, grad_x, grad_y, count, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    left, right = tl.load(x + at, inside).to(tl.float32), tl.load(y + at, inside).to(tl.float32)
    given = tl.load(grad + at, inside).to(tl.float32)
    gate = tl.sigmoid(left)
    tl.store(grad_x + at, given * right * gate * (1 + left * (1 - gate)), inside)
    tl.store(grad_y + at, given * left * gate, inside)


def gated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return silu(x) * y. Both are contiguous and of one shape."""
    out = torch.empty_like(x)
    _gated[(triton.cdiv(x.numel(), _SIZE),)](x, y, out, x.numel(), SIZE=_SIZE)
    return out


def gated_gradients(x: torch.Tensor, y: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x and of y for that of silu(x) * y."""
    grad = grad.contiguous()
    grad_x, grad_y = torch.empty_like(x), torch.empty_like(y)
    _gated_gradients[(triton.cdiv(x.numel(), _SIZE),)](x, y, grad, grad_x, grad_y, x.numel(), SIZE=_SIZE)
    return grad_x, grad_y
