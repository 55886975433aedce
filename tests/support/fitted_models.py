"""fitted_models.py: a model of blocks, fit on a simulated device, and its options on each device under test."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchoffload
from devices import Device
from planned_blocks import WIDTH, Net
from simulated_allocator import SimulatedAllocator, SimulatedMeter


class Model(nn.Module):
    """Blocks between a first layer and a head, that returns a loss."""

    def __init__(self, make: Callable[[], nn.Module], depth: int = 4, times: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.net = Net(make, depth, times)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(self.head(self.net(self.first(x))), -1).square().mean()


class Wide(nn.Module):
    """Keeps more than its input, in several sizes."""

    def __init__(self, times: int, depth: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, times * WIDTH), nn.Linear(times * WIDTH, WIDTH)
        self.depth = depth

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        for _ in range(self.depth):
            h = torch.tanh(h) * torch.sigmoid(h)
        return x + self.down(h)


class Adversaries(nn.Module):
    """Two networks that train against each other: a step calls the second one in both of its backwards.

    ``views``: how often it is called for the second backward. ``order``: of the calls before the first backward.
    ``is_one``: the loop calls both of them by way of the model.
    """

    def __init__(self, views: int = 1, order: str = "maker first", *, is_one: bool = False) -> None:
        super().__init__()
        self.maker, self.judge = (nn.Sequential(*(Wide(3, 2) for _ in range(4))) for _ in range(2))
        self.views, self.order, self.is_one = views, order, is_one

    def forward(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(name)(x)

    def call(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self(name, x) if self.is_one else self.get_submodule(name)(x)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        real = self.call("judge", x).square().mean() if self.order == "judge first" else 0
        made = self.call("maker", x)
        if self.order == "maker first" and self.views == 1:
            real = self.call("judge", x).square().mean()
        (self.call("judge", made.detach()).square().mean() - real).backward()
        self.judge.zero_grad()
        judged = (self.call("judge", made * (view + 1)).square().mean() for view in range(self.views))
        return sum(judged, torch.zeros(()))


def options_of(device: Device) -> dict[str, Any]:
    options: dict[str, Any] = {"tier": device.tier, "min_offload_size": 0}
    return options | ({"disk_dir": str(device.directory)} if device.tier == "disk" else {})


@contextlib.contextmanager
def fitted_on(model: nn.Module, allocator: SimulatedAllocator, memory: Any, **options: Any) -> Iterator[Any]:
    """Yield what fit returns for a model on a device whose memory the allocator simulates; nothing moves by default."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchoffload._fit.model.fit.meter_for", lambda _device: SimulatedMeter(allocator))
        with torchoffload.fit(model, memory, **({"move": False} | options)) as handle:
            yield handle
