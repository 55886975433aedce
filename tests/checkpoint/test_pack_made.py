"""What dispatch modes pack: its copy begins behind the operator that made it, and not at the end of all."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torchoffload
from devices import Device
from gradients import Run, assert_same_gradients
from planned_blocks import BLOCKS, WIDTH, corners
from torchoffload._checkpoint.saved_outputs import Packed, PackHook
from torchoffload._fit.block.blocks import plan_block, unplan_block

SIN = torch.ops.aten.sin.default


class PacksSines(TorchDispatchMode):
    """Packs what each sine returns; notes how many bytes are on their way, or gone, as the next operator is called."""

    def __init__(self, pack: PackHook) -> None:
        super().__init__()
        self._pack = pack
        self.packed: list[Packed] = []
        self.moved_bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.moved_bytes.append(torchoffload.stats().bytes_offloaded)
        output = func(*args, **(kwargs or {}))
        if func is SIN:
            self.packed.append(Packed(output, self._pack, func))
        return output


@pytest.mark.devices("disk", "simulated-late", "simulated-early", "simulated-seeded", "cuda")
def test_a_copy_is_enqueued_as_soon_as_the_operator_has_returned(device_under_test: Device):
    def program(run: Run) -> Any:
        x = run.leaf(64, 64)
        if run.stock:
            return x.sin().sin().sin()
        torchoffload.reset_stats()
        with run.offload(offload_window_bytes=0):
            pack, _ = torch._C._autograd._top_saved_tensors_default_hooks(False)
            with PacksSines(pack) as mode:
                y = x.sin().sin().sin()
        expected = [number * x.nbytes for number in range(3)]
        packed_bytes = mode.moved_bytes  # what autograd saves of x and of the first two is packed besides
        assert all(moved >= least for moved, least in zip(packed_bytes, expected, strict=True)), packed_bytes
        run.check(sines=[packed.get() for packed in mode.packed])
        return y

    def stock_program(run: Run) -> Any:
        if not run.stock:
            return program(run)
        x = run.leaf(64, 64)
        sines = [x.sin(), x.sin().sin(), x.sin().sin().sin()]
        run.check(sines=[each.detach() for each in sines])
        return sines[-1]

    assert_same_gradients(stock_program, device=device_under_test, min_moved_fraction=0.5)


@pytest.mark.devices("disk", "simulated-late", "cuda")
def test_what_a_planned_block_moves_is_on_its_way_when_the_block_has_ended(device_under_test: Device):
    """Behind the last block the loss takes memory. What waited until the context is left was there beside it."""
    with device_under_test.scope():
        block = BLOCKS["transformer"]().to(device_under_test.torch_device)
        x = torch.randn(4, 8, WIDTH, device=device_under_test.torch_device)
        moved = []
        for corner in corners(block, x):
            plan_block(block, dataclasses.replace(corner.plan, moved=corner.plan.kept))
            leaf = x.clone().requires_grad_()
            torchoffload.reset_stats()
            with device_under_test.context():
                y = block(leaf)
                inside_bytes = torchoffload.stats().bytes_offloaded
            moved.append(torchoffload.stats().bytes_offloaded)
            assert moved[-1] - inside_bytes <= x.nbytes, "only the input, which the checkpoint saved, may wait"
            y.square().mean().backward()
        unplan_block(block)
        assert max(moved) > 4 * x.nbytes
