"""Checkpointing and offloading, alone and together: what each costs, and what each leaves on the device.

A checkpointed block saves its inputs alone, and computes the rest again in backward. Around it, the context moves those
inputs: less is left on the device at the loss than by checkpointing alone, and no more is computed.

    python examples/with_checkpointing.py
"""

from __future__ import annotations

import argparse
import contextlib
import sys

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import _variants
import torchoffload
from _options import device_of, least_memory_options
from train_gpt import GPT

PLAIN, CHECKPOINTED, OFFLOADED, BOTH = "plain", "checkpointed", "offloaded", "both"


def make_variant(arguments: argparse.Namespace, name: str) -> _variants.Variant:
    model = GPT(arguments.width, arguments.layers, arguments.heads, arguments.tokens).to(device_of(arguments))

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = model.bytes(inputs) + model.positions.weight
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False) if name in (CHECKPOINTED, BOTH) else block(x)
        return F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), targets.flatten())

    if name not in (OFFLOADED, BOTH):
        return _variants.Variant(model, loss, contextlib.nullcontext)
    options = least_memory_options(arguments)
    return _variants.Variant(model, loss, lambda: torchoffload.OffloadActivations(**options))


if __name__ == "__main__":
    parser = _variants.make_parser("Train a GPT plain, checkpointed, offloaded, and with both.")
    sys.exit(_variants.main(parser, [PLAIN, CHECKPOINTED, OFFLOADED, BOTH], make_variant))
