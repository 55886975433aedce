"""The least that it takes: one ``with`` around forward.

Prints the loss of each step, and then what moved, what stayed and why.

    python examples/minimal.py              # CUDA with pinned memory when it is there, else CPU with a spill file
    python examples/minimal.py --tier disk --disk-dir /var/tmp
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import torchoffload
from _options import add_offload_options, device_of, offload_options, positive


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network with its activations offloaded.")
    add_offload_options(parser)
    parser.add_argument("--steps", type=positive, default=4, help="optimizer steps (%(default)s)")
    parser.add_argument("--layers", type=positive, default=6, help="hidden layers (%(default)s)")
    parser.add_argument("--rows", type=positive, default=8192, help="rows of the batch (%(default)s)")
    arguments = parser.parse_args()
    options, device = offload_options(arguments), device_of(arguments)

    torch.manual_seed(0)
    hidden = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(arguments.layers)]
    model = nn.Sequential(*hidden, nn.Linear(256, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(arguments.rows, 256, device=device)

    for step in range(arguments.steps):
        with torchoffload.OffloadActivations(**options):
            loss = (model(batch) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.6f}")
    print(torchoffload.report())


if __name__ == "__main__":
    main()
