"""Cases with ``fit`` whose blocks communicate: tensor parallelism, and collectives that blocks call by themselves."""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from fit_parallel import make_model, wrap_ddp
from fitting import Fitting, assert_fits, batch_size_of, gradients_of
from tensor_parallel import parallelize
from torch import nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from world import SHAPE, TOKENS, World, batch_of, local_values, make_llama

from gradients import Run
from llama import loss_of

WIDTH = SHAPE.hidden


def fitting_of(world: World, move: bool, budgets: list[float] | None = None) -> Fitting:
    """What is computed again here there is for fit to say."""
    fitting = Fitting(world, move=move, budgets=budgets)
    fitting.computes_again = None
    return fitting


def tensor_parallel(world: World, move: bool, sequence: bool = False, budgets: list[float] | None = None) -> dict:
    fitting = fitting_of(world, move, budgets)

    def program(run: Run) -> Any:
        model = make_llama(run, dataclasses.replace(SHAPE, layers=3))
        parallelize(model, world.mesh(world.size, names=("tensor",)), sequence, loss=False)
        train(run, fitting, model, seed=0)
        return local_values(model)

    return assert_fits(fitting, program)


def sharded_tensor_parallel(world: World, move: bool, shards: int) -> dict:
    """FSDP2 over one dimension of the mesh, TP over the other; one of them has a single process."""
    fitting = fitting_of(world, move)

    def program(run: Run) -> Any:
        mesh = world.mesh(shards, world.size // shards, names=("shard", "tensor"))
        model = make_llama(run, dataclasses.replace(SHAPE, layers=3))
        parallelize(model, mesh["tensor"], True, loss=False)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        train(run, fitting, model, seed=mesh["shard"].get_local_rank())
        return local_values(model)

    return assert_fits(fitting, program)


def nested_fsdp2(world: World, move: bool, reshard_after_forward: bool) -> dict:
    """Parts of layers are sharded by themselves, so that their weights are gathered inside of blocks."""
    fitting = fitting_of(world, move)

    def program(run: Run) -> Any:
        model = make_model(run, world)
        mesh = world.mesh(world.size, names=("shard",))
        for layer in model.layers:
            for part in (layer.attention, layer.feed_forward, layer):
                fully_shard(part, mesh=mesh, reshard_after_forward=reshard_after_forward)
        fully_shard(model, mesh=mesh)
        train(run, fitting, model, seed=world.rank)
        return local_values(model)

    return assert_fits(fitting, program)


def train(run: Run, fitting: Fitting, model: nn.Module, seed: int) -> None:
    """Train with batches that depend on ``seed``, on as many ranks as have the same one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)  # which mixes DTensors with plain tensors
    with fitting.fitted(run, model):
        for step in fitting.steps(run):
            tokens, labels = batch_of(run, seed=10 * step + seed, batch=batch_size_of(fitting.world))
            loss = loss_of(model(tokens), labels)
            loss.backward()
            run.check(loss=loss.detach(), gradients=gradients_of(model))
            del loss
            optimizer.step()
            optimizer.zero_grad()


class Native(nn.Module):
    """Two feed-forwards of DTensors. No operator that it calls is a collective: DTensor calls them inside of others."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.up_again, self.down_again = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.sin(self.down(torch.sin(self.up(x))))  # the product has a part of each sum on each rank
        return x + torch.sin(self.down_again(torch.sin(self.up_again(x))))


def collectives_inside_of_operators(world: World, move: bool, budgets: list[float]) -> dict:
    fitting = fitting_of(world, move, budgets)

    def program(run: Run) -> Any:
        model = run.module(lambda: nn.Sequential(*(Native() for _ in range(3))))
        mesh = world.mesh(world.size, names=("tensor",))
        for name, part in model.named_modules():
            if isinstance(part, nn.Linear):
                placement = Shard(0 if "up" in name else 1)
                part.weight = nn.Parameter(distribute_tensor(part.weight.detach(), mesh, [placement]))
        with fitting.fitted(run, model):
            for step in fitting.steps(run):
                run.reseed(step)
                x = DTensor.from_local(run.tensor(TOKENS * batch_size_of(world), WIDTH), mesh, [Replicate()])
                loss = model(x).square().mean()
                loss.backward()
                run.check(loss=loss.full_tensor().detach(), gradients=gradients_of(model))
                del loss
                model.zero_grad()

    return assert_fits(fitting, program)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


class Synced(nn.Module):
    """Divides by a sum over all ranks, as a batch normalization does that is synchronized; or by its own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.sin(self.up(x))
        power = h.square().sum((0, 1))
        if self.way == "function":
            power = _Sum.apply(power)
        elif self.way == "functional":
            power = functional_collectives.all_reduce(power.detach(), "sum", dist.group.WORLD)
        elif self.way == "in place":
            power = power.detach().clone()
            dist.all_reduce(power)
        return x + self.down(torch.sin(torch.tanh(h * torch.rsqrt(power + 1))))


def synced_step(run: Run, world: World, number: int, model: nn.Module, called: nn.Module) -> None:
    """Forward and backward of a model by way of the module that is called, with a batch of this rank's own."""
    run.reseed(10 * number + world.rank)
    loss = called(run.tensor(batch_size_of(world), TOKENS, WIDTH)).square().mean()
    loss.backward()
    run.check(loss=loss.detach(), gradients=gradients_of(model))


def synced(world: World, way: str, budgets: list[float], *, is_late: bool = False) -> dict:
    """DDP of blocks that communicate in a ``way``; if ``is_late`` they begin to once fit is settled."""
    fitting = fitting_of(world, False, budgets)

    def program(run: Run) -> Any:
        model = run.module(lambda: nn.Sequential(*(Synced("none" if is_late else way) for _ in range(3))))
        wrapped = wrap_ddp(world, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        with fitting.fitted(run, wrapped):
            for step in fitting.steps(run):
                for block in model:
                    block.way = way if not is_late or fitting.was_settled(step) else "none"
                synced_step(run, world, step, model, wrapped)
                optimizer.step()
                optimizer.zero_grad()
        return local_values(model)

    return assert_fits(fitting, program)


def replaced(world: World, budgets: list[float], step: int) -> dict:
    """A block that communicates is replaced before a step."""
    fitting = fitting_of(world, False, budgets)

    def program(run: Run) -> Any:
        model = run.module(lambda: nn.Sequential(*(Synced("functional") for _ in range(3))))
        with fitting.fitted(run, model):
            for number in fitting.steps(run):
                if number == step:
                    model[1] = run.module(lambda: Synced("functional"))
                synced_step(run, world, number, model, model)
                model.zero_grad()

    told = assert_fits(fitting, program)
    assert "blocks were replaced or deleted (1)" in told["reports"][0], told
    return told
