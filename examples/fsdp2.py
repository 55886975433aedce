"""FSDP2 with torchrun: each process trains its shard, plain and then offloaded, and compares bit for bit.

Weights, and what is gathered of them, never move: only what autograd saves of the activations does.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py
    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py --tier disk       # on CPUs, with gloo
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import torchoffload
from _distributed import Steps, digest, gather, process_group
from _options import add_offload_options, offload_options, positive
from _text import batches, standard_library_text
from train_gpt import GPT


def train(arguments: argparse.Namespace, device: torch.device, context: AbstractContextManager[Any]) -> tuple[str, str]:
    """Train from the same weights each time: what to print, and the digest of losses and shards."""
    torch.manual_seed(0)
    model = GPT(arguments.width, arguments.layers, arguments.heads, arguments.tokens).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if arguments.bf16 else None)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data = batches(standard_library_text(1 << 20), arguments.batch, arguments.tokens, dist.get_rank(), device)

    steps, losses = Steps(device), []
    for _ in range(arguments.steps):
        inputs, targets = next(data)
        with steps:
            with context:
                loss = F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return str(steps), digest([*losses, *(parameter.to_local() for parameter in model.parameters())])


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a GPT with FSDP2, plain and offloaded, and compare.")
    add_offload_options(parser)
    parser.add_argument("--steps", type=positive, default=3, help="optimizer steps of each run (%(default)s)")
    parser.add_argument("--width", type=positive, default=128, help="features of a token (%(default)s)")
    parser.add_argument("--layers", type=positive, default=4, help="transformer blocks (%(default)s)")
    parser.add_argument("--heads", type=positive, default=4, help="attention heads of a block (%(default)s)")
    parser.add_argument("--batch", type=positive, default=8, help="sequences of each process (%(default)s)")
    parser.add_argument("--tokens", type=positive, default=256, help="bytes in a sequence (%(default)s)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, with FSDP2's mixed precision")
    arguments = parser.parse_args()

    with process_group(arguments) as device:
        plain, plain_bits = train(arguments, device, contextlib.nullcontext())
        context = torchoffload.OffloadActivations(**offload_options(arguments))
        offloaded, offloaded_bits = train(arguments, device, context)
        verdict = "identical" if plain_bits == offloaded_bits else "NOT THE SAME"
        rank = dist.get_rank()
        text = f"rank {rank} plain      {plain}\nrank {rank} offloaded  {offloaded}\n"
        lines = gather(text + f"rank {rank} losses and weights: {verdict}")
        if rank == 0:
            print("\n".join(lines))
    return int(verdict != "identical")


if __name__ == "__main__":
    sys.exit(main())
