"""Cases of tensor and sequence parallelism through DTensor, alone and with FSDP2 over the mesh's other dimension."""

import contextlib
from typing import Any

import torch
from data_parallel import layer_runner
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from world import STEPS, World, batch_of, local_values, make_llama

from gradients import Run
from llama import loss_of

LAYER_PLAN = {
    "attention.q": ColwiseParallel,
    "attention.k": ColwiseParallel,
    "attention.v": ColwiseParallel,
    "attention.o": RowwiseParallel,
    "feed_forward.gate": ColwiseParallel,
    "feed_forward.up": ColwiseParallel,
    "feed_forward.down": RowwiseParallel,
}


def parallelize(model: nn.Module, mesh: DeviceMesh, sequence: bool, loss: bool) -> None:
    """As a Llama is parallelized: heads and the feed-forward's width by columns, then by rows."""
    logits: dict[str, Any] = {"output_layouts": Shard(-1), "use_local_output": False} if loss else {
        "output_layouts": Replicate()
    }  # fmt: skip
    plan: dict[str, Any] = {"head": ColwiseParallel(**logits)}
    between: dict[str, Any] = {}
    if sequence:
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        plan["norm"] = SequenceParallel()
        plan["head"] = ColwiseParallel(input_layouts=Shard(1), **logits)
        between = {"output_layouts": Shard(1)}
    parallelize_module(model, mesh, plan)
    for layer in model.layers:
        layer_plan: dict[str, Any] = {
            name: kind(**(between if kind is RowwiseParallel else {})) for name, kind in LAYER_PLAN.items()
        }
        if sequence:
            for name in ("attention", "feed_forward"):
                layer_plan[f"{name}_norm"] = SequenceParallel()
                layer_plan[name] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        parallelize_module(layer, mesh, layer_plan)


def train(run: Run, model: nn.Module, seed: int, loss: bool = False, **options: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)  # which mixes DTensors with plain tensors
    for step in range(STEPS):
        tokens, labels = batch_of(run, seed=100 * step + seed)
        with loss_parallel() if loss else contextlib.nullcontext():
            with run.offload(**options):
                value = loss_of(model(tokens), labels)
            value.backward()
        run.check(loss=value.full_tensor() if loss else value)
        del value
        run.check(gradients={name: grad for name, (_, grad) in local_values(model).items()})
        optimizer.step()
        optimizer.zero_grad()


def tensor_parallel(world: World, sequence: bool = False, loss: bool = False, checkpointing: str | None = None) -> dict:
    def program(run: Run) -> Any:
        model = make_llama(run, run_layer=layer_runner(run, checkpointing))
        parallelize(model, world.mesh(world.size, names=("tensor",)), sequence, loss)
        world.watch(model)
        train(run, model, seed=0, loss=loss)
        return local_values(model)

    return world.assert_trains_the_same(program)


def sharded_tensor_parallel(
    world: World,
    shards: int,
    sequence: bool = False,
    reshard_after_forward: bool = True,
    mixed: bool = False,
    checkpointing: str | None = None,
) -> dict:
    """FSDP2 over the first dimension of the mesh, TP over the second; one of them may have a single process."""
    options: dict[str, Any] = {"reshard_after_forward": reshard_after_forward}
    if mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def program(run: Run) -> Any:
        mesh = world.mesh(shards, world.size // shards, names=("shard", "tensor"))
        model = make_llama(run, run_layer=layer_runner(run, checkpointing))
        parallelize(model, mesh["tensor"], sequence, loss=False)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["shard"], **options)
        fully_shard(model, mesh=mesh["shard"], **options)
        world.watch(model)
        train(run, model, seed=mesh["shard"].get_local_rank())
        return local_values(model)

    return world.assert_trains_the_same(program)
