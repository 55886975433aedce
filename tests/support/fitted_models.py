"""fitted_models.py: a model of blocks, and the options with which fit runs on each device under test."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from devices import Device
from planned_blocks import WIDTH, Net


class Model(nn.Module):
    """Blocks between a first layer and a head, that returns a loss."""

    def __init__(self, make: Callable[[], nn.Module], depth: int = 4, times: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.net = Net(make, depth, times)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(self.head(self.net(self.first(x))), -1).square().mean()


def options_of(device: Device) -> dict[str, Any]:
    options: dict[str, Any] = {"tier": device.tier, "min_offload_size": 0}
    return options | ({"disk_dir": str(device.directory)} if device.tier == "disk" else {})
