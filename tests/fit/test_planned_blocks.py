"""Planned blocks: the same bits as stock, whatever is kept, moved, left out and computed again."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchoffload
from devices import Device
from gradients import Run, assert_same_gradients
from planned_blocks import BLOCKS, WIDTH, Net, corners, outcome, planned, record
from torchoffload._fit.block.blocks import plan_block
from torchoffload._fit.block.graph import BlockPlan

# Of a block's plans: the least memory, one in the middle, and the least time.
WHICH: dict[str, Callable[[int], int]] = {
    "least memory": lambda count: 0,
    "middle": lambda count: count // 2,
    "least time": lambda count: count - 1,
}

pytestmark = pytest.mark.devices("disk", "simulated-late", "cuda")


def assert_planned(
    device: Device,
    block: str,
    which: str,
    *,
    moves: bool = True,
    times: int = 1,
    autocast: bool = False,
    before: Callable[[Net], None] = lambda net: None,
    change: Callable[[Net], None] = lambda net: None,
    call: Callable[[Net, torch.Tensor], torch.Tensor] = lambda net, x: net(x),
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
) -> None:
    def program(run: Run):
        net = run.module(lambda: Net(BLOCKS[block], times=times))
        x = run.tensor(4, 8, WIDTH)
        before(net)
        plans = corners(net.blocks[0], x, autocast)
        change(net)
        with planned(run, net, plans[WHICH[which](len(plans))], moves=moves):
            torch.manual_seed(5)
            for _ in range(2):
                with run.offload(), torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
                    y = call(net, x)
                backward(y.float().square().mean())
        run.check(next_random=torch.rand(2))
        return outcome(net)

    assert_same_gradients(program, device=device, min_moved_fraction=0.1)


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("block", BLOCKS)
def test_a_planned_block(device_under_test: Device, block: str, which: str):
    assert_planned(device_under_test, block, which)


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("block", ["transformer", "dropouts", "batch norm"])
def test_what_is_kept_may_stay_on_the_device(device_under_test: Device, block: str, which: str):
    assert_planned(device_under_test, block, which, moves=False)


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("block", ["transformer", "dropouts", "counts", "batch norm"])
def test_a_block_that_is_called_twice(device_under_test: Device, block: str, which: str):
    assert_planned(device_under_test, block, which, times=2)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("which", WHICH)
def test_under_autocast(device_under_test: Device, which: str, times: int):
    """A cast of a parameter is made once in each region, and so less often in forward than in recomputations."""
    assert_planned(device_under_test, "transformer", which, autocast=True, times=times)


def take_other_way(net: Net) -> None:
    for block in net.blocks:
        block.other_way = True


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("block", ["dropouts", "masks", "switched operators", "switched wires", "in place"])
def test_a_block_that_goes_another_way_than_planned(device_under_test: Device, block: str, which: str):
    assert_planned(device_under_test, block, which, change=take_other_way)


def freeze(net: Net) -> None:
    for block in net.blocks:
        block.up.weight.requires_grad_(False)


def unfreeze(net: Net) -> None:
    for block in net.blocks:
        block.up.weight.requires_grad_(True)


@pytest.mark.parametrize("which", WHICH)
def test_a_weight_that_was_frozen_since(device_under_test: Device, which: str):
    assert_planned(device_under_test, "transformer", which, change=freeze)


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("block", ["transformer", "switched operators"])
def test_a_weight_that_was_unfrozen_since(device_under_test: Device, block: str, which: str):
    """The same operators save more than they did when the plan was made, also what it leaves out."""
    assert_planned(device_under_test, block, which, before=freeze, change=unfreeze)


@pytest.mark.parametrize("which", WHICH)
def test_another_length_than_planned(device_under_test: Device, which: str):
    assert_planned(device_under_test, "transformer", which, call=lambda net, x: net(x[:3, :5]))


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("block", ["transformer", "batch norm"])
def test_a_write_to_what_a_block_returned(device_under_test: Device, block: str, which: str):
    assert_planned(device_under_test, block, which, call=lambda net, x: net(x).mul_(2))


class ReturnsBoth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.up(x)
        return h, torch.sin(h + 1)


@pytest.mark.parametrize("moves", [True, False])
def test_a_write_to_what_was_kept_and_nobody_saved(device_under_test: Device, moves: bool):
    """Stock allows such a write, so what was kept is not used, and its operator runs again."""

    def program(run: Run):
        block = run.module(ReturnsBoth)
        x = run.leaf(4, 8, WIDTH)
        operators = tuple(call.operator for call in record(block, x).operators)
        plan = BlockPlan(operators=operators, kept=frozenset({0}), moved=frozenset({0} if moves else ()))
        if not run.stock:
            plan_block(block, plan)
        with run.offload():
            h, y = block(x)
            h.detach().mul_(3)
            loss = (h * y).sum()
        loss.backward()
        return x.grad, block.up.weight.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.1)


def twice(loss: torch.Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("block", ["transformer", "dropouts", "masks", "in place"])
def test_a_graph_that_is_used_twice(device_under_test: Device, block: str, which: str):
    assert_planned(device_under_test, block, which, backward=twice)


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_inside_of_a_checkpoint_of_the_user(device_under_test: Device, which: str, use_reentrant: bool):
    def call(net: Net, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(net, x.clone().requires_grad_(), use_reentrant=use_reentrant)
        return result

    assert_planned(device_under_test, "dropouts", which, call=call)


@pytest.mark.devices("disk", "simulated-late")
def test_a_result_that_a_later_operator_overwrites_does_not_move(device_under_test: Device):
    torch.manual_seed(0)
    net, x = Net(BLOCKS["batch norm and a write"], depth=1), torch.randn(4, 8, WIDTH)
    # Corners depend on measured times, so both runs have the plan of one.
    plan = next(corner.plan for corner in corners(net.blocks[0], x) if corner.plan.rewritten)

    def moved_bytes(keeps_rewritten: bool) -> int:
        rewritten = frozenset() if keeps_rewritten else plan.rewritten
        plan_block(net.blocks[0], dataclasses.replace(plan, moved=plan.kept, rewritten=rewritten))
        torchoffload.reset_stats()
        with device_under_test.scope():
            with device_under_test.context():
                y = net(x)
            y.sum().backward()
            return torchoffload.stats().bytes_offloaded

    result_bytes = 4 * 8 * WIDTH * 4
    assert moved_bytes(keeps_rewritten=True) - moved_bytes(keeps_rewritten=False) == result_bytes
