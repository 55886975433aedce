"""Draws the memory of one training step, operator by operator: plain, and with its saved tensors offloaded.

    python examples/memory_over_a_step.py                       # writes examples/memory_over_a_step.png
    python examples/memory_over_a_step.py --out memory.svg

On CUDA it is the memory of the GPU. On a CPU it is the resident memory of the process, with Python and PyTorch in it.
It needs matplotlib.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import torchoffload
from _memory import RETURN_FREED_MEMORY
from _options import add_offload_options, device_of, least_memory_options, positive
from train_gpt import GPT


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the memory of one training step, plain and offloaded.")
    add_offload_options(parser)
    parser.add_argument("--layers", type=positive, default=8, help="blocks of the GPT (%(default)s)")
    parser.add_argument("--tokens", type=positive, default=256, help="length of a sequence (%(default)s)")
    parser.add_argument("--batch", type=positive, default=16, help="sequences in a batch (%(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).with_suffix(".png"), help="the picture (%(default)s)"
    )
    arguments = parser.parse_args()
    device = device_of(arguments)
    if device.type == "cpu" and not RETURN_FREED_MEMORY.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | RETURN_FREED_MEMORY)

    torch.manual_seed(0)
    model = GPT(256, arguments.layers, 8, arguments.tokens).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    inputs, targets = torch.randint(256, (2, arguments.batch, arguments.tokens), device=device)
    options = least_memory_options(arguments)

    def step() -> None:
        with torchoffload.OffloadActivations(**options):
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    torchoffload.plot_memory(step, arguments.out, device=device)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
