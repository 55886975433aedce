"""models.py: small models, and the steps that train them, shared by the gradient tests."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional

from gradients import Run


class Block(nn.Module):
    """A pre-norm transformer block: interleaved qkv, scaled dot product attention, and an MLP."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(functional.gelu(self.up(self.norm_mlp(x))))


class Residual(nn.Module):
    """An MLP around which its input is added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class TinyGpt(nn.Module):
    """Embedding, `depth` blocks, a tied head and the loss."""

    def __init__(self, depth: int = 2, width: int = 32, vocabulary: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def mlp(run: Run) -> nn.Module:
    return run.module(
        lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32), nn.Tanh())
    )


def tokens_and_labels(run: Run, batch: int = 2, tokens: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = (run.tensor(batch, tokens + 1) + 1).mul(32).long().clamp(0, 63)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def update(model: nn.Module) -> None:
    """One step of SGD, by hand; gradients are gone after it."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.05 * parameter.grad
            parameter.grad = None


def zero(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.grad = None
