"""Cases of data parallelism: DDP, FSDP1 and FSDP2. Each trains for some steps, and compares losses and weights."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from world import STEPS, World, batch_of, local_values, make_llama

import torchoffload
from gradients import Run
from llama import Layer, loss_of

LayerRunner = Callable[[nn.Module, torch.Tensor], torch.Tensor]


SAVED_OPERATORS = [
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
]


def layer_runner(run: Run, checkpointing: str | None) -> LayerRunner | None:
    """How a model runs its layers: None, or under a "reentrant", "non-reentrant" or "selective" checkpoint."""
    if checkpointing is None:
        return None
    options: dict[str, Any] = {"use_reentrant": checkpointing == "reentrant"}
    if checkpointing == "selective":
        make = create_selective_checkpoint_contexts if run.stock else torchoffload.selective_checkpoint_context_fn
        options["context_fn"] = functools.partial(make, SAVED_OPERATORS)
    return lambda layer, x: checkpoint(layer, x, **options)


def train(
    run: Run,
    world: World,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: int = 1,
    steps: int = STEPS,
    **options: Any,
) -> None:
    """Some steps with batches of this rank's own."""
    for step in range(steps):
        for micro_batch in range(micro_batches):
            tokens, labels = batch_of(run, seed=100 * step + 10 * micro_batch + world.rank)
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = micro_batch == micro_batches - 1
            with run.offload(**options):
                loss = loss_of(model(tokens), labels)
            loss.backward()
            run.check(loss=loss)
            del loss
        run.check(gradients={name: grad for name, (_, grad) in local_values(model).items()})
        optimizer.step()
        optimizer.zero_grad()


def ddp(world: World, checkpointing: str | None = None, micro_batches: int = 1, **options: Any) -> dict:
    def program(run: Run) -> Any:
        model = make_llama(run, run_layer=layer_runner(run, checkpointing))
        world.watch(model)
        devices = [world.rank] if run.device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=devices, bucket_cap_mb=0.02, **options)
        train(run, world, wrapped, torch.optim.AdamW(model.parameters(), lr=1e-2), micro_batches)
        return local_values(model)

    return world.assert_trains_the_same(program)


def ddp_learning(world: World) -> dict:
    """More steps than learning needs, in one context, with windows of its own choice."""

    def program(run: Run) -> Any:
        model = make_llama(run)
        world.watch(model)
        wrapped = DistributedDataParallel(model, device_ids=[world.rank] if run.device.type == "cuda" else None)
        train(run, world, wrapped, torch.optim.SGD(model.parameters(), lr=1e-2), steps=8, learn=True)
        return local_values(model)

    return world.assert_trains_the_same(program, min_moved_fraction=0.1)


def fsdp1(
    world: World,
    use_orig_params: bool,
    strategy: str = "FULL_SHARD",
    mixed: bool = False,
    checkpointing: str | None = None,
) -> dict:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if mixed else None

    def program(run: Run) -> Any:
        model = make_llama(run, run_layer=layer_runner(run, checkpointing))
        world.watch(model)
        wrapped = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Layer}),
            sharding_strategy=ShardingStrategy[strategy],
            mixed_precision=precision,
            use_orig_params=use_orig_params,
            device_id=world.torch_device,
        )
        train(run, world, wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-2))
        return local_values(wrapped)

    return world.assert_trains_the_same(program)


def fsdp2(
    world: World,
    reshard_after_forward: bool,
    mixed: bool = False,
    cpu_offload: bool = False,
    checkpointing: str | None = None,
    micro_batches: int = 1,
) -> dict:
    options: dict[str, Any] = {"reshard_after_forward": reshard_after_forward}
    if mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.name == "cuda")

    def program(run: Run) -> Any:
        model = make_llama(run, run_layer=layer_runner(run, checkpointing))
        mesh = world.mesh(world.size, names=("shard",))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
        world.watch(model)
        train(run, world, model, torch.optim.AdamW(model.parameters(), lr=1e-2), micro_batches)
        return local_values(model)

    return world.assert_trains_the_same(program)
