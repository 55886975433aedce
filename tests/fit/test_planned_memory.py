"""Planned blocks: what moves is not held on the device, whatever has noted it."""

import dataclasses
import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from devices import Device
from planned_blocks import WIDTH, corners
from torchoffload._fit.block.blocks import plan_block, unplan_block

pytestmark = pytest.mark.devices("disk", "simulated-late", "cuda")


class Storages(TorchDispatchMode):
    """The storages that operators made, but not those of others, held weakly."""

    def __init__(self, *others: torch.Tensor) -> None:
        super().__init__()
        self.own = {each.untyped_storage()._cdata for each in others}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                known = self.made.get(storage._cdata)
                if storage._cdata not in self.own and (known is None or known[0].expired()):
                    self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return output

    def alive_bytes(self) -> int:
        return sum(nbytes for reference, nbytes in self.made.values() if not reference.expired())


class Projected(nn.Module):
    """A linear layer without bias, of a tensor of three dimensions: a product, and a view with its own counter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64, bias=False), nn.Linear(64, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.sin(self.up(x)))


def test_what_moves_is_not_held(device_under_test: Device):
    with device_under_test.scope():
        block = Projected().to(device_under_test.torch_device)
        x = torch.randn(4, 8, WIDTH, device=device_under_test.torch_device)
        for corner in corners(block, x):
            plan_block(block, dataclasses.replace(corner.plan, moved=corner.plan.kept))
            leaf = x.clone().requires_grad_()
            with Storages(leaf, *block.parameters()) as storages, device_under_test.context(offload_window_bytes=0):
                loss = block(leaf).sum()
            gc.collect()
            assert storages.alive_bytes() == loss.nbytes, corner.kept_bytes
            loss.backward()
            unplan_block(block)
