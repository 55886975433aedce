"""Cases of pipeline parallelism: the schedules of torch.distributed.pipelining, and plain loops as Megatron has them.

Each stage is a part of a Llama, with a context around the whole step, or one for each call of a stage.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from data_parallel import layer_runner
from torch import nn
from torch.distributed import pipelining
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from world import BATCH, SHAPE, STEPS, TOKENS, World, batch_of, local_values, make_llama

import torchoffload
from gradients import Run
from llama import loss_of

SHAPE_4 = dataclasses.replace(SHAPE, layers=4)
MICRO_BATCHES = 4
LOOPED = ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleLoopedBFS")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


class InContext(nn.Module):
    """A module that runs in a context of its own at each call."""

    def __init__(self, inner: nn.Module, context: Callable[[], Any]) -> None:
        super().__init__()
        self.inner = inner
        self.context = context

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        with self.context():
            return self.inner(*inputs)


def stages_of(world: World, schedule: str) -> list[int]:
    """The stages that this process holds."""
    if schedule in V_SHAPED:
        return [world.rank, 2 * world.size - 1 - world.rank]
    return [world.rank, world.rank + world.size] if schedule in LOOPED else [world.rank]


def stage_of(world: World, module: nn.Module, index: int, count: int, batch: int = BATCH) -> PipelineStage:
    """Shapes are given: to find them PyTorch calls autograd.grad, which a reentrant checkpoint does not allow."""
    device = world.torch_device
    hidden = torch.empty(batch, TOKENS, SHAPE.hidden, device=device, requires_grad=True)
    tokens = torch.empty(batch, TOKENS, dtype=torch.int64, device=device)
    logits = torch.empty(batch, TOKENS, SHAPE.vocabulary, device=device, requires_grad=True)
    given, made = tokens if index == 0 else hidden, logits if index == count - 1 else hidden
    return PipelineStage(module, index, count, device, input_args=given, output_args=made)


def data_parallel(world: World, stage: nn.Module, parallelism: str | None) -> nn.Module:
    """Over one process for each stage: all that the wrappers do but to exchange bytes."""
    mesh = world.mesh(world.size, 1, names=("stage", "data"))["data"]
    if parallelism == "ddp":
        return DistributedDataParallel(stage, process_group=mesh.get_group())
    if parallelism == "fsdp2":
        for layer in stage.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(stage, mesh=mesh)
    return stage


def schedule_step(
    world: World,
    schedule: str,
    around: str,
    checkpointing: str | None = None,
    options_by_rank: list[dict[str, Any]] | None = None,
    parallelism: str | None = None,
    steps: int = STEPS,
    **expectations: Any,
) -> dict:
    """Train with a schedule by name, the context ``around`` the "step" or each call of a "stage", or on "modules"."""
    own = stages_of(world, schedule)
    options = options_by_rank[world.rank] if options_by_rank else {}

    def program(run: Run) -> Any:
        def context() -> Any:
            return run.offload(**options)

        models = [
            make_llama(run, SHAPE_4, index, world.size * len(own), run_layer=layer_runner(run, checkpointing))
            for index in own
        ]
        world.watch(*models)
        modules = [data_parallel(world, model, parallelism) for model in models]
        if around == "stage":
            modules = [InContext(module, context) for module in modules]
        if around == "modules" and not run.stock:
            for module in modules:
                torchoffload.offload_modules(module, module, **context().options.as_keywords())
        stages = [stage_of(world, m, i, world.size * len(own)) for m, i in zip(modules, own, strict=True)]
        runner = getattr(pipelining.schedules, schedule)(
            stages if len(own) > 1 else stages[0], n_microbatches=MICRO_BATCHES, loss_fn=loss_of
        )
        optimizer = torch.optim.AdamW([p for m in models for p in m.parameters()], lr=1e-2)
        is_last = world.size * len(own) - 1 in own
        for step in range(steps):
            tokens, labels = batch_of(run, step, batch=BATCH * MICRO_BATCHES)
            losses: list[torch.Tensor] = []
            with context() if around == "step" else contextlib.nullcontext():
                runner.step(
                    *([tokens] if 0 in own else []),
                    **({"target": labels, "losses": losses} if is_last else {}),
                )
            run.check(losses=losses, gradients=[local_values(m) for m in models])
            del losses
            optimizer.step()
            optimizer.zero_grad()
        return [local_values(model) for model in models]

    sees_weights = checkpointing is None and around != "modules"
    return world.assert_trains_the_same(program, sees_weights=sees_weights, **expectations)


def first_rank_alone(world: World, schedule: str) -> dict:
    """The last rank's stage is followed at once by its backward: there a user may well leave all of it where it is."""
    nothing = {"min_offload_size": 1 << 40}
    expectations = {"moved_bytes": 0, "kept_reason": "small"} if world.rank == world.size - 1 else {}
    by_rank: list[dict[str, Any]] = [{}, nothing]
    return schedule_step(world, schedule, "step", options_by_rank=by_rank, **expectations)


# ---- plain loops ----


def exchange(world: World, run: Run, received: tuple[int, ...] | None, sent: torch.Tensor | None, peer: int) -> Any:
    """Send to ``peer`` and receive from it, whichever of both is asked for, in one go."""
    buffer = torch.empty(received, device=run.device) if received else None
    operations = []
    if sent is not None:
        operations.append(dist.P2POp(dist.isend, sent.detach().contiguous(), peer))
    if buffer is not None:
        operations.append(dist.P2POp(dist.irecv, buffer, peer))
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    return buffer


def loop_1f1b(world: World, one_context: bool = False, checkpointing: str | None = None) -> dict:
    """Warm-up forwards, steady 1F1B, cool-down: two stages, one tape for each micro-batch."""
    peer, is_first = 1 - world.rank, world.rank == 0
    activation = (BATCH, TOKENS, SHAPE.hidden)

    def program(run: Run) -> Any:
        model = make_llama(run, SHAPE_4, world.rank, 2, run_layer=layer_runner(run, checkpointing))
        world.watch(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        the_context = run.offload() if one_context else None

        def forward(step: int, index: int, received: torch.Tensor | None) -> tuple[Any, torch.Tensor]:
            tokens, labels = batch_of(run, 100 * step + index)
            source = tokens if received is None else received.requires_grad_()
            with the_context if the_context is not None else run.offload():
                output = model(source)
                if not is_first:
                    output = loss_of(output, labels)
                    run.check(loss=output)
            return source, output

        def backward(pair: tuple[torch.Tensor, torch.Tensor], gradient: torch.Tensor | None) -> torch.Tensor | None:
            source, output = pair
            torch.autograd.backward(output, gradient)
            return source.grad

        for step in range(STEPS):
            alive: list[Any] = []
            if is_first:  # one micro-batch of warm-up
                alive.append(forward(step, 0, None))
                exchange(world, run, None, alive[-1][1], peer)
                for index in range(1, MICRO_BATCHES):
                    alive.append(forward(step, index, None))
                    gradient = exchange(world, run, activation, alive[-1][1], peer)
                    backward(alive.pop(0), gradient)
                backward(alive.pop(0), exchange(world, run, activation, None, peer))
            else:
                received = exchange(world, run, activation, None, peer)
                for index in range(MICRO_BATCHES):
                    gradient = backward(forward(step, index, received), None)
                    is_over = index == MICRO_BATCHES - 1
                    received = exchange(world, run, None if is_over else activation, gradient, peer)
            run.check(gradients=local_values(model))
            optimizer.step()
            optimizer.zero_grad()
        return local_values(model)

    return world.assert_trains_the_same(program, sees_weights=checkpointing is None)
