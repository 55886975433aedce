"""Cases of data parallelism with ``fit`` of a model that was compiled as a whole: each rank plans its own graphs."""

import dataclasses
import functools
from typing import Any

import torch
import torch.distributed as dist
from fit_parallel import shard
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import SHAPE, World, batch_of, local_values, make_llama

import torchoffload
from fitted_models import options_of
from gradients import Run
from llama import loss_of

ROOM = 1 << 40
# Each layer has more weights than the first bucket of DDP, at the ends of whose buckets PyTorch cuts a compiled graph.
WIDE = dataclasses.replace(SHAPE, hidden=224, intermediate=448, layers=2)
STEPS = 3


def train(world: World, model: nn.Module, called: nn.Module) -> list[Any]:
    """The loss, and this rank's part of each weight and its gradient, for each step."""
    run = Run(world.device, stock=True, context=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    results = []
    for step in range(STEPS):
        tokens, labels = batch_of(run, seed=100 * step + world.rank, batch=64)
        loss = loss_of(called(tokens), labels)
        loss.backward()
        values = {name: (value.clone(), grad) for name, (value, grad) in local_values(model).items()}
        results.append((loss.item(), values))
        optimizer.step()
        optimizer.zero_grad()
    return results


def made(world: World, parallelism: str, compiled: str) -> tuple[nn.Module, nn.Module]:
    """A Llama, and the module that training calls: compiled "inside" or "outside" of DDP, or by FSDP2 "in place"."""
    torch._dynamo.reset()
    torch._functorch.config.enable_autograd_cache = torch._inductor.config.fx_graph_cache = False
    model = make_llama(Run(world.device, stock=True, context=None), WIDE)
    if parallelism == "fsdp2":
        shard(world, model, reshard_after_forward=True, mixed=False)
        model.compile()
        return model, model
    devices = [world.rank] if world.device.name == "cuda" else None
    wrap = functools.partial(DistributedDataParallel, device_ids=devices, bucket_cap_mb=2)
    return model, wrap(torch.compile(model)) if compiled == "inside" else torch.compile(wrap(model))


def fitted_steps(
    world: World, parallelism: str, compiled: str, memory: int, **options: Any
) -> tuple[list[Any], torchoffload.Fitted]:
    model, called = made(world, parallelism, compiled)
    with torchoffload.fit(called, memory, **options) as handle:
        results = train(world, model, called)
        assert handle.phase in ("compiled", "least memory"), handle.report()
    return results, handle


def same_steps(world: World, parallelism: str, compiled: str, parts: list[float], move: bool) -> dict:
    """``parts``: of the peak of a step of PyTorch's own, for each rank."""
    options: dict[str, Any] = options_of(world.device) if move else {"move": False}
    expected = train(world, *made(world, parallelism, compiled))
    unplanned, handle = fitted_steps(world, parallelism, compiled, ROOM, move=False)
    torch.testing.assert_close(unplanned, expected, rtol=0, atol=0)
    driver = handle._driver
    calls = driver._graph_calls
    peak_bytes = max(plan.predicted_peak_bytes + (calls - 1) * plan.other_bytes for plan in driver.plans)
    planned, handle = fitted_steps(
        world, parallelism, compiled, int(parts[world.rank] * peak_bytes), on_unfit="warn", **options
    )
    torch.testing.assert_close(planned, expected, rtol=1e-4, atol=1e-6)
    plans = handle._driver.plans
    again = sum(len(piece.again) for plan in plans for piece in plan.pieces)
    dist.barrier()
    return {"graphs": len(plans), "calls": calls, "again": again, "moved_bytes": handle.plan.moved_bytes}
