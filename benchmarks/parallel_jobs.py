"""What parallel_step.py measures: a Llama-shaped model under one kind of parallelism, and one step of its training."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from llama import Llama, Shape, loss_of

__all__ = ["KINDS", "Job", "make_job"]


@dataclass(frozen=True)
class Job:
    """A model, and what one step of it is.

    Attributes
    ----------
    model : torch.nn.Module
        This process's model, or its stage of one.
    step : callable
        Forward and backward: takes the makers of the context around forward; returns the losses that this process has.
    """

    model: nn.Module
    step: Callable[[Callable[[], Any]], list[torch.Tensor]]

    def gradients(self) -> list[torch.Tensor]:
        """Return what this process has of each gradient."""
        gradients = [parameter.grad for parameter in self.model.parameters()]
        assert all(gradient is not None for gradient in gradients)
        return [each.to_local() if isinstance(each, DTensor) else each for each in gradients if each is not None]

    def zero_gradients(self) -> None:
        """Keep them allocated, as a step that accumulates does."""
        for gradient in self.gradients():
            gradient.zero_()


@dataclass(frozen=True)
class Batch:
    """Batch size, tokens a sequence, and micro-batches, which the pipeline alone has more than one of."""

    batch: int
    tokens: int
    micro_batches: int = 1


def make_job(kind: str, shape: Shape, size: Batch, device: torch.device) -> Job:
    """One of KINDS, with weights and a batch that depend on the rank alone, where they depend on anything."""
    return KINDS[kind](shape, size, device)


def _make_model(shape: Shape, device: torch.device, stage: int = 0, stages: int = 1) -> Llama:
    torch.manual_seed(1)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            return Llama(shape, stage, stages)
    finally:
        torch.set_default_dtype(dtype)


def _make_batch(shape: Shape, batch: int, tokens: int, device: torch.device, seed: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(shape.vocabulary, (batch, tokens + 1), generator=generator).to(device)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def _whole_model_job(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Job:
    tokens, labels = batch

    def step(context: Callable[[], Any]) -> list[torch.Tensor]:
        with context():
            loss = loss_of(model(tokens), labels)
        loss.backward()
        return [loss.detach()]

    return Job(model, step)


def _replicas(shape: Shape, size: Batch, device: torch.device) -> Job:
    model = _make_model(shape, device)
    return _whole_model_job(model, _make_batch(shape, size.batch, size.tokens, device, seed=dist.get_rank()))


def _fsdp2(shape: Shape, size: Batch, device: torch.device) -> Job:
    model = _make_model(shape, device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _whole_model_job(model, _make_batch(shape, size.batch, size.tokens, device, seed=dist.get_rank()))


def _tensor(shape: Shape, size: Batch, device: torch.device) -> Job:
    """Tensor parallelism, with the sequence in shards between attention and feed-forward."""
    model = _make_model(shape, device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    for layer in model.layers:
        plan: dict[str, Any] = {name: SequenceParallel() for name in ("attention_norm", "feed_forward_norm")}
        plan |= {name: PrepareModuleInput(**gathered) for name in ("attention", "feed_forward")}
        plan |= {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        plan |= {f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")}
        plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.o", "feed_forward.down")}
        parallelize_module(layer, mesh, plan)
    return _whole_model_job(model, _make_batch(shape, size.batch, size.tokens, device, seed=0))


def _pipeline(shape: Shape, size: Batch, device: torch.device) -> Job:
    """1F1B, a stage for each process; the context is around the whole step of the schedule."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    is_first, is_last = rank == 0, rank == stages - 1
    model = _make_model(shape, device, rank, stages)
    tokens, labels = _make_batch(shape, size.batch * size.micro_batches, size.tokens, device, seed=0)
    one = (size.batch, size.tokens)
    hidden = torch.empty(*one, shape.hidden, dtype=torch.bfloat16, device="meta", requires_grad=True)
    logits = torch.empty(*one, shape.vocabulary, dtype=torch.bfloat16, device="meta", requires_grad=True)
    given = torch.empty(one, dtype=torch.int64, device="meta") if is_first else hidden
    stage = PipelineStage(model, rank, stages, device, input_args=given, output_args=logits if is_last else hidden)
    schedule = Schedule1F1B(stage, n_microbatches=size.micro_batches, loss_fn=loss_of)
    # The logits of all micro-batches at once are of no use here.
    takes_return_outputs = "return_outputs" in inspect.signature(schedule.step).parameters
    options: dict[str, Any] = {"return_outputs": False} if takes_return_outputs else {}

    def step(context: Callable[[], Any]) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        with context():
            if is_last:
                schedule.step(*([tokens] if is_first else []), target=labels, losses=losses, **options)
            else:
                schedule.step(*([tokens] if is_first else []), **options)
        return [loss.detach() for loss in losses]

    return Job(model, step)


KINDS: dict[str, Callable[[Shape, Batch, torch.device], Job]] = {
    "fsdp2": _fsdp2,
    "tensor": _tensor,
    "pipeline": _pipeline,
    "replicas": _replicas,
}
