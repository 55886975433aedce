"""Offloading of chosen modules only: by name, by type, a fraction of the bytes, all but the last blocks.

What is not chosen stays on the device, so a link that is too slow for everything moves what is worth most.

    python examples/choose_modules.py
    python examples/choose_modules.py --report      # and what each module moved
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.nn.functional as F

import _variants
import torchoffload
from _options import device_of, least_memory_options
from train_gpt import GPT, Block

# What offload_modules is given, by the name that the table shows.
CHOICES: dict[str, dict[str, Any]] = {
    "plain": {},
    "feed_forward": {"modules": "blocks.*.feed_forward"},
    "all blocks": {"modules": Block},
    "half the bytes": {"modules": Block, "fraction": 0.5},
    "but the last 2": {"modules": Block, "keep_last": 2},
    "even blocks": {"modules": lambda name, module: isinstance(module, Block) and int(name.split(".")[-1]) % 2 == 0},
}


def make_variant(arguments: argparse.Namespace, name: str) -> _variants.Variant:
    model = GPT(arguments.width, arguments.layers, arguments.heads, arguments.tokens).to(device_of(arguments))
    choice = CHOICES[name]
    if choice:
        torchoffload.offload_modules(model, **choice, **least_memory_options(arguments))

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    return _variants.Variant(model, loss)


if __name__ == "__main__":
    parser = _variants.make_parser("Train a GPT with all of it, and with chosen modules of it, offloaded.")
    sys.exit(_variants.main(parser, list(CHOICES), make_variant))
