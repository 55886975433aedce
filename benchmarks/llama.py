"""A Llama-shaped decoder in plain PyTorch, whose parts can be sharded, split over stages, and run from a test."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["Layer", "Llama", "Shape", "loss_of"]


@dataclass(frozen=True)
class Shape:
    """What a model is made of.

    Attributes
    ----------
    hidden, intermediate, layers, heads, kv_heads, vocabulary : int
        As in a Llama's configuration.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention with rotary embeddings; heads are counted from what the projections give."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.hidden // shape.heads
        self.q = nn.Linear(shape.hidden, shape.heads * self.head_width, bias=False)
        self.k = nn.Linear(shape.hidden, shape.kv_heads * self.head_width, bias=False)
        self.v = nn.Linear(shape.hidden, shape.kv_heads * self.head_width, bias=False)
        self.o = nn.Linear(shape.heads * self.head_width, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in (self.q, self.k, self.v))
        places = torch.arange(q.shape[2], device=q.device, dtype=torch.float32)
        rates = 1e4 ** (-torch.arange(0, self.head_width, 2, device=q.device, dtype=torch.float32) / self.head_width)
        angles = torch.outer(places, rates)
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        attended = F.scaled_dot_product_attention(
            _rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        return self.o(attended.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Batch, tokens and width, in and out."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """A decoder, or one stage of it: embeddings where it is the first, norm and head where it is the last.

    Parameters
    ----------
    shape : Shape
        Of the whole model.
    stage, stages : int
        Which part of it this is; layers are dealt evenly.
    run_layer : callable, optional
        Called with a layer and its input in place of the layer itself, to checkpoint it for instance.
    """

    def __init__(
        self,
        shape: Shape,
        stage: int = 0,
        stages: int = 1,
        run_layer: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.run_layer = run_layer
        is_last = stage == stages - 1
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden) if stage == 0 else None
        own = range(shape.layers * stage // stages, shape.layers * (stage + 1) // stages)
        self.layers = nn.ModuleList(Layer(shape) for _ in own)
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5) if is_last else None
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False) if is_last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take tokens, or what the stage before gave; return logits, or what the stage behind takes."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x) if self.run_layer is None else self.run_layer(layer, x)
        if self.norm is None or self.head is None:
            return x
        return self.head(self.norm(x))


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of a batch of tokens."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
