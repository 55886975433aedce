"""fit on blocks whose kernels PyTorch's dispatcher does not see: Triton's, called by custom Functions."""

from typing import Any

import pytest
import torch
from torch import nn

import torchoffload

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

pytestmark = pytest.mark.cuda

WIDTH = 256


@triton.jit
def _gated_forward(x, y, out, count, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    left, right = tl.load(x + at, inside), tl.load(y + at, inside)
    tl.store(out + at, left * tl.sigmoid(left) * right + tl.load(out + at, inside), inside)


@triton.jit
def _filled(out, count, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, tl.zeros([SIZE], tl.float32), at < count)


@triton.jit
def _gated_backward(x, y, grad, grad_x, grad_y, count, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    left, right, given = tl.load(x + at, inside), tl.load(y + at, inside), tl.load(grad + at, inside)
    gate = tl.sigmoid(left)
    tl.store(grad_x + at, given * right * gate * (1 + left * (1 - gate)), inside)
    tl.store(grad_y + at, given * left * gate, inside)


class Gated(torch.autograd.Function):
    """silu(x) * y, added to what a kernel or PyTorch has put into the memory of the output before."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, begins_as: str) -> torch.Tensor:
        x, y = x.contiguous(), y.contiguous()
        grid = (triton.cdiv(x.numel(), 512),)
        if begins_as == "empty":
            out = torch.empty_like(x)
            _filled[grid](out, x.numel(), SIZE=512)
        elif begins_as == "zeros":
            out = torch.zeros_like(x)
        else:
            out = x * 0.5
        _gated_forward[grid](x, y, out, x.numel(), SIZE=512)
        ctx.begins_as = begins_as
        ctx.save_for_backward(x, y)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, y = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x, grad_y = torch.empty_like(x), torch.empty_like(y)
        _gated_backward[(triton.cdiv(x.numel(), 512),)](x, y, grad, grad_x, grad_y, x.numel(), SIZE=512)
        return grad_x + 0.5 * grad if ctx.begins_as == "written over" else grad_x, grad_y, None


class Block(nn.Module):
    def __init__(self, begins_as: str) -> None:
        super().__init__()
        self.begins_as = begins_as
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return x + self.down(torch.tanh(Gated.apply(self.gate(normed), self.up(normed), self.begins_as)))


def trained(begins_as: str, memory: int | None) -> tuple[list[torch.Tensor], str, int]:
    """Train for 20 steps. Returns each step's loss and gradients, the report, and the least memory that fit knows."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.Sequential(*(Block(begins_as) for _ in range(6)))
        x = torch.randn(32, 256, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fitted = None if memory is None else torchoffload.fit(model, memory)
    seen: list[torch.Tensor] = []
    for _ in range(20):
        loss = model(x).square().mean()
        loss.backward()
        seen += [loss.detach().cpu(), *(each.grad.cpu() for each in model.parameters() if each.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    report, least = "", 0
    if fitted is not None:
        assert fitted.phase == "settled", fitted.report()
        report, least = fitted.report(), fitted.frontier()[0].memory_bytes
        if memory != 1 << 40:
            assert fitted.plan.moved_bytes + fitted.plan.recompute_s > 0, report
        fitted.remove()
    return seen, report, least


@pytest.mark.parametrize("begins_as", ["empty", "zeros", "written over"])
def test_blocks_of_triton_kernels_are_fitted_bit_for_bit(begins_as: str) -> None:
    """The kernels are given no tensors of the dry run, and what they write is not taken for what operators wrote."""
    stock, _, _ = trained(begins_as, None)
    free, report, least = trained(begins_as, 1 << 40)
    assert "a dry run of the model failed" in report, report
    little, _, _ = trained(begins_as, int(least * 1.1))
    assert len(stock) == len(free) == len(little) > 20
    for one, ours, other in zip(stock, free, little, strict=True):
        assert torch.equal(one, ours)
        assert torch.equal(one, other)
