"""Cases of data parallelism with ``fit``: DDP, FSDP1 and FSDP2. Each rank fits what it calls, and plans for itself."""

import contextlib
import dataclasses
from typing import Any

import torch
from fitting import Fitting, Restless, assert_fits, batch_size_of, gradients_of
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from world import SHAPE, World, batch_of, local_values, make_llama

from gradients import Run
from llama import Layer, loss_of

SHAPE_3 = dataclasses.replace(SHAPE, layers=3)


class Switched(Layer):
    """A layer with another way, which shows in none of its parameters."""

    other_way = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return torch.tanh(y) if self.other_way else y


def make_model(run: Run, world: World, differs_on: int | None = None) -> nn.Module:
    """A Llama whose last layer goes another way on one rank: the survey takes another step there."""
    model = make_llama(run, SHAPE_3)
    for layer in model.layers:
        layer.__class__ = Switched
    model.layers[-1].other_way = world.rank == differs_on
    return model


def train_step(
    run: Run, world: World, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, batches: list[int]
) -> None:
    """One step, of a micro-batch of each size; gradients are exchanged with the last one."""
    for number, batch in enumerate(batches):
        tokens, labels = batch_of(run, seed=100 * step + 10 * number + world.rank, batch=batch)
        is_last = number == len(batches) - 1
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(is_last)
        waits = isinstance(model, DistributedDataParallel) and not is_last
        with model.no_sync() if waits else contextlib.nullcontext():
            loss = loss_of(model(tokens), labels)
            loss.backward()
        run.check(loss=loss.detach())
        del loss
    run.check(gradients=gradients_of(model))
    optimizer.step()
    optimizer.zero_grad()


def train(run: Run, fitting: Fitting, model: nn.Module, sizes: str) -> None:
    """Train for as many steps as the fitting wants. ``sizes`` says which batches a step has."""
    world = fitting.world
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    most, is_last = batch_size_of(world), world.rank == world.size - 1
    for step in fitting.steps(run):
        batches = {
            "one": [most],
            "three": [most] * 3,
            "uneven": [most, most, most // 2],
            "uneven steps": [most // 2 if step % 3 == 2 else most],
            "by rank": [most + world.rank],
            "grows": [most + most // 2 if is_last and fitting.was_settled(step) else most],
        }[sizes]
        train_step(run, world, model, optimizer, step, batches)


def ddp(
    world: World, move: bool, fits: str = "wrapper", sizes: str = "one", differs_on: int | None = None,
    budgets: list[float] | None = None, restless: int | None = None, **options: Any,
) -> dict:  # fmt: skip
    """``fits`` says what is fitted: the "wrapper", the "module" in it, or that "before" it is wrapped."""
    fitting = fitting_of(world, move, budgets, restless, sizes)

    def program(run: Run) -> Any:
        model = make_model(run, world, differs_on)
        with contextlib.ExitStack() as stack:
            if fits == "before":
                stack.enter_context(fitting.fitted(run, model))
            wrapped = wrap_ddp(world, model, **options)
            if fits != "before":
                stack.enter_context(fitting.fitted(run, wrapped if fits == "wrapper" else model))
            train(run, fitting, wrapped, sizes)
        return local_values(model)

    return assert_fits(fitting, program)


def fsdp2(
    world: World, move: bool, reshard_after_forward: bool = True, fits: str = "after", sizes: str = "one",
    differs_on: int | None = None, budgets: list[float] | None = None, restless: int | None = None, mixed: bool = False,
) -> dict:  # fmt: skip
    """``fits`` says when the model is fitted: "before" or "after" it is sharded."""
    fitting = fitting_of(world, move, budgets, restless, sizes)

    def program(run: Run) -> Any:
        model = make_model(run, world, differs_on)
        with contextlib.ExitStack() as stack:
            if fits == "before":
                stack.enter_context(fitting.fitted(run, model))
            shard(world, model, reshard_after_forward=reshard_after_forward, mixed=mixed)
            if fits == "after":
                stack.enter_context(fitting.fitted(run, model))
            train(run, fitting, model, sizes)
        return local_values(model)

    return assert_fits(fitting, program)


def fsdp1(world: World, move: bool) -> dict:
    fitting = Fitting(world, move=move)
    fitting.computes_again = None  # whether blocks that are wrapped by FSDP1 can be

    def program(run: Run) -> Any:
        wrapped = FullyShardedDataParallel(
            make_model(run, world),
            auto_wrap_policy=ModuleWrapPolicy({Layer}),
            use_orig_params=True,
            device_id=world.torch_device,
        )
        with fitting.fitted(run, wrapped):
            train(run, fitting, wrapped, "one")
        return local_values(wrapped)

    return assert_fits(fitting, program)


def fitting_of(world: World, move: bool, budgets: list[float] | None, restless: int | None, sizes: str) -> Fitting:
    if restless is not None:
        return Restless(world, move=move, seed=restless)
    fitting = Fitting(world, move=move, budgets=budgets)
    if sizes == "grows":
        fitting.computes_again = None  # a smaller part of what the step takes then is given
    return fitting


def wrap_ddp(world: World, model: nn.Module, **options: Any) -> DistributedDataParallel:
    devices = [world.rank] if world.device.name == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, bucket_cap_mb=0.02, **options)


def shard(world: World, model: nn.Module, *, reshard_after_forward: bool = True, mixed: bool = False) -> None:
    """Shard each layer, and the rest."""
    options: dict[str, Any] = {"mesh": world.mesh(world.size, names=("shard",))}
    options["reshard_after_forward"] = reshard_after_forward
    if mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)


class OneBlock(nn.Module):
    """Repeats no module, so that it is one block. The steps of its forward save what the block can make again."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SHAPE.vocabulary, SHAPE.hidden)
        self.up, self.head = nn.Linear(SHAPE.hidden, 4 * SHAPE.hidden), nn.Linear(4 * SHAPE.hidden, SHAPE.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.up(self.embedding(tokens))
        for _ in range(4):
            x = torch.sin(x)
        return self.head(x)


def ddp_of_one_block(world: World, move: bool) -> dict:
    fitting = Fitting(world, move=move)
    fitting.computes_again = None

    def program(run: Run) -> Any:
        model = run.module(OneBlock)
        wrapped = wrap_ddp(world, model)
        with fitting.fitted(run, wrapped):
            train(run, fitting, wrapped, "one")
        return local_values(model)

    return assert_fits(fitting, program)


def ddp_join(world: World, move: bool) -> dict:
    """The first rank has fewer batches: it joins, and answers the exchanges of the other one."""
    fitting = Fitting(world, move=move)

    def program(run: Run) -> Any:
        model = make_model(run, world)
        wrapped = wrap_ddp(world, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        with fitting.fitted(run, wrapped), wrapped.join():
            for step in range(22 + 3 * world.rank):
                train_step(run, world, wrapped, optimizer, step, [batch_size_of(world)])
                fitting.step_ends()
        return local_values(model)

    return assert_fits(fitting, program)


def too_little(world: World, parallelism: str, fits: str) -> dict:
    """The last rank has too little memory: the call of the model raises an error there, and its loop calls it again.

    It has no more than the weights take.
    """
    fitting = Restless(world, move=False, seed=0)
    raised = []

    def program(run: Run) -> Any:
        model = make_model(run, world)
        with contextlib.ExitStack() as stack:
            weights_bytes = sum(each.numel() * each.element_size() for each in (*model.parameters(), *model.buffers()))
            memory = {} if world.rank < world.size - 1 else {"memory": weights_bytes}
            if fits == "before":
                stack.enter_context(fitting.fitted(run, model, **memory))
            wrapped: nn.Module = model
            if parallelism == "ddp":
                wrapped = wrap_ddp(world, model)
            else:
                shard(world, model)
            if fits == "after":
                stack.enter_context(fitting.fitted(run, wrapped, **memory))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
            for step in range(8):
                tokens, labels = batch_of(run, seed=10 * step + world.rank, batch=batch_size_of(world))
                try:
                    logits = wrapped(tokens)
                except RuntimeError as error:
                    raised.append(str(error))
                    logits = wrapped(tokens)
                loss_of(logits, labels).backward()
                run.check(gradients=gradients_of(model))
                del logits
                optimizer.step()
                optimizer.zero_grad()

    assert_fits(fitting, program)
    return {"raised": raised}


def reckoned_gradients(world: World) -> dict:
    """The bytes of the gradients that a rank holds, and what fit takes them for."""
    fitting = Fitting(world, move=False)
    told: dict[str, int] = {}

    def program(run: Run) -> Any:
        model = make_model(run, world)
        shard(world, model)
        with fitting.fitted(run, model) as handles:
            train(run, fitting, model, "one")
            for handle in handles:
                told["reckoned"] = handle._driver.step.fixed["gradients"]
        told["held"] = sum(value.numel() * value.element_size() for value, _ in local_values(model).values())

    assert_fits(fitting, program)
    return told
