"""A pipeline of stages with micro-batches in flight (1F1B), each process with options of its own.

The context stands around the whole step of the schedule: forwards and backwards of the micro-batches come in any order
inside it. A later stage holds fewer micro-batches at a time, so it may move less: see ``--last-stage-plain``.

    torchrun --standalone --nproc-per-node 2 examples/pipeline.py
    torchrun --standalone --nproc-per-node 2 examples/pipeline.py --tier disk    # on CPUs, with gloo
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
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import torchoffload
from _distributed import Steps, digest, gather, process_group
from _options import add_offload_options, offload_options, positive
from _text import batches, standard_library_text
from train_gpt import GPT


class Stage(nn.Module):
    """A run of the model's blocks; the first embeds the bytes, the last predicts them."""

    def __init__(self, model: GPT, index: int, count: int) -> None:
        super().__init__()
        per_stage = len(model.blocks) // count
        last = index == count - 1
        self.embeddings = model.bytes if index == 0 else None
        self.positions = model.positions if index == 0 else None
        self.blocks = model.blocks[index * per_stage : None if last else (index + 1) * per_stage]
        self.head = nn.Sequential(model.norm, model.head) if last else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map bytes or features to features or logits."""
        if self.embeddings is not None:
            x = self.embeddings(x) + self.positions.weight
        return self.head(self.blocks(x))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(arguments: argparse.Namespace, device: torch.device, context: AbstractContextManager[Any]) -> tuple[str, str]:
    """Train from the same weights each time: what to print, and the digest of losses and weights."""
    rank, count = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = GPT(arguments.width, arguments.layers, arguments.heads, arguments.tokens)
    stage_module = Stage(model, rank, count).to(device)
    stage = PipelineStage(stage_module, rank, count, device)
    schedule = Schedule1F1B(stage, arguments.micro_batches, loss_fn=loss_of)
    optimizer = torch.optim.SGD(stage_module.parameters(), lr=0.1)
    data = batches(standard_library_text(1 << 20), arguments.batch, arguments.tokens, 0, device)

    steps, all_losses = Steps(device), []
    for _ in range(arguments.steps):
        inputs, targets = next(data)
        losses: list[torch.Tensor] = []
        with steps:
            given = [inputs] if rank == 0 else []
            with context:
                schedule.step(*given, target=targets if rank == count - 1 else None, losses=losses)
            optimizer.step()
            optimizer.zero_grad()
        all_losses += losses
    return str(steps), digest([*all_losses, *stage_module.parameters()])


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a GPT in pipeline stages, plain and offloaded, and compare.")
    add_offload_options(parser)
    parser.add_argument("--steps", type=positive, default=3, help="optimizer steps of each run (%(default)s)")
    parser.add_argument("--width", type=positive, default=128, help="features of a token (%(default)s)")
    parser.add_argument("--layers", type=positive, default=4, help="transformer blocks of all stages (%(default)s)")
    parser.add_argument("--heads", type=positive, default=4, help="attention heads of a block (%(default)s)")
    parser.add_argument("--batch", type=positive, default=16, help="sequences in a batch (%(default)s)")
    parser.add_argument("--micro-batches", type=positive, default=4, help="parts of a batch (%(default)s)")
    parser.add_argument("--tokens", type=positive, default=256, help="bytes in a sequence (%(default)s)")
    parser.add_argument("--last-stage-plain", action="store_true", help="leave the last stage as it is")
    arguments = parser.parse_args()

    with process_group(arguments) as device:
        rank, count = dist.get_rank(), dist.get_world_size()
        if arguments.layers < count or arguments.batch % arguments.micro_batches:
            raise SystemExit("--layers must be at least the number of processes, --batch a multiple of --micro-batches")
        plain, plain_bits = train(arguments, device, contextlib.nullcontext())
        context: AbstractContextManager[Any] = torchoffload.OffloadActivations(**offload_options(arguments))
        if arguments.last_stage_plain and rank == count - 1:
            context = contextlib.nullcontext()
        offloaded, offloaded_bits = train(arguments, device, context)
        verdict = "identical" if plain_bits == offloaded_bits else "NOT THE SAME"
        text = f"stage {rank} plain      {plain}\nstage {rank} offloaded  {offloaded}\n"
        lines = gather(text + f"stage {rank} losses and weights: {verdict}")
        if rank == 0:
            print("\n".join(lines))
    return int(verdict != "identical")


if __name__ == "__main__":
    sys.exit(main())
