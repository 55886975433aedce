"""Trains a byte-level GPT on the Python standard library's sources: plain, offloaded, and within a budget of memory.

The second run moves what its blocks save, with ``OffloadActivations``. The third one has ``torchoffload.fit`` choose
what stays, what moves and what is computed again, within about half of what the plain run took (``--fit-memory-mib``).
All runs start from the same seed, each in a process of its own. The table at the end shows what each cost and saved,
and says "identical" only after every parameter was compared bit for bit; otherwise the exit status is 1. Fit takes 8 to
18 steps until it settles, on CUDA up to 24, and the steps after that are timed.

    python examples/train_gpt.py                  # CUDA with pinned memory when it is there, else CPU with a spill file
    python examples/train_gpt.py --tier disk --disk-dir /var/tmp --steps 100
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.nn.functional as F
from torch import nn

import _compare
import torchoffload
from _options import device_of, offload_options

BYTE_COUNT = 256


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm and beside a residual connection."""

    def __init__(self, width: int, head_count: int) -> None:
        super().__init__()
        self.head_count = head_count
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float (batch, tokens, width) to the same shape."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, tokens, 3, self.head_count, width // self.head_count)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(nn.Module):
    """A decoder over bytes, with learned positions."""

    def __init__(self, width: int, layer_count: int, head_count: int, tokens: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTE_COUNT, width)
        self.positions = nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, head_count) for _ in range(layer_count)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTE_COUNT, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map int64 (batch, tokens) to logits (batch, tokens, 256)."""
        positions = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.bytes(x) + self.positions(positions))))


def make_task(arguments: argparse.Namespace) -> _compare.Task:
    if arguments.width % arguments.heads:
        raise SystemExit(f"--width {arguments.width} is not a multiple of --heads {arguments.heads}")
    model = GPT(arguments.width, arguments.layers, arguments.heads, arguments.tokens)
    model.to(device_of(arguments))

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    return _compare.Task(model, loss, offload=lambda: torchoffload.OffloadActivations(**offload_options(arguments)))


def make_parser() -> argparse.ArgumentParser:
    parser = _compare.make_parser("Train a byte-level GPT plain, offloaded and by torchoffload.fit, and compare.")
    shape = parser.add_argument_group("shape", "the defaults save more than 512 MiB for backward, in 32-bit floats")
    shape.add_argument("--width", type=int, default=128, help="features of a token (%(default)s)")
    shape.add_argument("--layers", type=int, default=8, help="transformer blocks (%(default)s)")
    shape.add_argument("--heads", type=int, default=4, help="attention heads of a block (%(default)s)")
    shape.add_argument("--batch", type=int, default=32, help="sequences in a batch (%(default)s)")
    shape.add_argument("--tokens", type=int, default=256, help="bytes in a sequence (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(_compare.main(make_parser(), make_task))
