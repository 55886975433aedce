"""planned_blocks.py: blocks that are hard to compute again, nets of them, and the plans that a recorded call gives."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gradients import Run
from models import Block
from torchoffload._fit.block.blocks import plan_block, unplan_block
from torchoffload._fit.block.graph import Corner, block_frontier
from torchoffload._fit.block.record import BlockRecord, Recorder

WIDTH = 32


class Dropouts(nn.Module):
    """Draws random numbers twice, and on its other way once more between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other_way = False

    def dropout(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dropout(self.first(x))
        y = self.dropout(y) if self.other_way else torch.exp(y)
        return torch.sin(self.dropout(self.second(y)))


class Masks(Dropouts):
    """The same by an operator whose output can be kept: on a CPU dropout writes to its mask in place."""

    def dropout(self, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.rand_like(x) > 0.3)


class SwitchedOperators(nn.Module):
    """Its other way has the same saves, and another operator between them that saves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other_way = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.sin(x)
        h = (x.detach() - h) if self.other_way else (h + x.detach())
        return self.down(torch.exp(torch.cos(self.up(h)))) + h


class SwitchedWires(nn.Module):
    """Its other way has the same operators, which read other outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other_way = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = torch.sin(x), torch.cos(x)
        h = (other if self.other_way else one) * 1.5
        return self.down(torch.sin(self.up(h))) + one


class InPlace(nn.Module):
    """Writes to what it made: before it is saved, and behind an operator that reads it. Its other way needs both."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other_way = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = functional.relu(self.up(x).mul_(0.5), inplace=True)
        rest = (x * 2).add_(1)
        early = rest + 1
        rest.sub_(3)
        rest = torch.tanh(rest) * early if self.other_way else rest + early
        return self.down(h) + rest


class Normalised(nn.Module):
    """Its running statistics are written to by an operator whose schema does not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.norm(self.up(x).flatten(0, -2)).view(x.shape))


class Rectified(Normalised):
    """Writes to one result of an operator that has several."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu_(self.norm(self.up(x).flatten(0, -2))).view(x.shape)


class Counts(nn.Module):
    """Writes to a buffer and reads it, and to a temporary that is no operator's output as far as autograd knows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        scale = torch.tensor(0.5, device=x.device)
        scale += 0.25
        return self.down(torch.sin(self.up(x)) * self.count.sqrt()) * scale


class OwnCheckpoint(nn.Module):
    """Has a checkpoint of the user's inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(lambda h: self.down(functional.gelu(self.up(h))), self.norm(x), use_reentrant=False)


class ReadsNumbers(nn.Module):
    """Reads a number off a tensor, and decides by it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        if h.abs().max().item() > 0:
            h = h * 2
        return x + self.down(functional.silu(h) * torch.sigmoid(h))


class PartlyWithoutGradients(nn.Module):
    """Looks at views of values that nobody needs while gradients are off."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        doubled = h.view(-1) * 2.0
        with torch.no_grad():
            positive = (doubled.view(h.shape).transpose(0, 1)[0] > 0).float().mean()
        return x + self.down(torch.sin(h) * positive)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "transformer": Block,
    "dropouts": Dropouts,
    "masks": Masks,
    "switched operators": SwitchedOperators,
    "switched wires": SwitchedWires,
    "in place": InPlace,
    "batch norm": Normalised,
    "batch norm and a write": Rectified,
    "counts": Counts,
    "own checkpoint": OwnCheckpoint,
    "reads numbers": ReadsNumbers,
    "partly without gradients": PartlyWithoutGradients,
}


class Net(nn.Module):
    """Blocks in a row; with `times` 2 each is called twice."""

    def __init__(self, make: Callable[[], nn.Module], depth: int = 2, times: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(depth))
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            for _ in range(self.times):
                x = block(x)
        return x


def record(block: nn.Module, x: torch.Tensor, autocast: bool = False) -> BlockRecord:
    """What a copy of the block does with `x`; neither the block nor the generators change."""
    block = copy.deepcopy(block)
    x = x.detach().requires_grad_()
    with (
        torch.random.fork_rng(),
        torch.autocast(x.device.type, torch.bfloat16, enabled=autocast),
        Recorder(block, ((x,), {})) as recorder,
    ):
        _output = block(x)  # as long as it lives, so do the saved tensors that are verified
    return recorder.record


def corners(block: nn.Module, x: torch.Tensor, autocast: bool = False) -> list[Corner]:
    return block_frontier(record(block, x, autocast))


@contextlib.contextmanager
def planned(run: Run, net: Net, corner: Corner, *, moves: bool = True) -> Iterator[None]:
    """Each block of the net follows the plan, but in stock runs."""
    plan = dataclasses.replace(corner.plan, moved=corner.plan.kept if moves else frozenset())
    if not run.stock:
        for block in net.blocks:
            plan_block(block, plan)
    yield
    for block in net.blocks:
        unplan_block(block)


def outcome(net: nn.Module) -> dict[str, Any]:
    """Gradients and buffers."""
    gradients = {name: parameter.grad for name, parameter in net.named_parameters()}
    return {**gradients, **{name: buffer.clone() for name, buffer in net.named_buffers()}}
