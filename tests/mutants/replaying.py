"""The scenarios of recomputation by replay: each is a step that comes out as stock, unless a check is left out."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from scenario import Stage, scenario
from torch import nn

from torchoffload._fit.block.blocks import plan_block
from torchoffload._fit.block.graph import BlockPlan
from torchoffload._fit.block.record import Recorder

AS_STOCK, OTHERWISE = "as stock", "other gradients"
LARGE = (64, 300, 16)  # not copied as it is read


class _Block(nn.Module):
    def __init__(self, function: Callable[["_Block", torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)
        self.function = function
        self.large = torch.ones(LARGE)  # no buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.function(self, self.up(x)))


def _compare(
    function: Callable[[_Block, torch.Tensor], torch.Tensor],
    between: Callable[[_Block], None] = lambda block: None,
    plan: BlockPlan | None = None,
) -> str:
    """What comes of a step with a planned block, beside stock's."""
    results = []
    for is_planned in (False, True):
        block = _Block(function)
        if is_planned:
            plan_block(block, plan or BlockPlan(operators=()))
        x = torch.linspace(-1, 1, 64).view(4, 16).requires_grad_()
        torch.manual_seed(1)
        loss = block(x).square().sum()
        between(block)
        try:
            loss.backward()
        except RuntimeError as error:
            results.append(f"raised: {str(error)[:40]}")
            continue
        results.append([x.grad, *(each.grad for each in block.parameters())])
    stock, found = results
    if isinstance(stock, str) or isinstance(found, str):
        return AS_STOCK if stock == found else f"{found if isinstance(found, str) else OTHERWISE}"
    return AS_STOCK if all(map(torch.equal, stock, found)) else OTHERWISE


@scenario("ReplaySetsSwitches", right=AS_STOCK, wrong=OTHERWISE)
def replay_with_another_default_dtype(stage: Stage) -> str:
    def function(block: _Block, h: torch.Tensor) -> torch.Tensor:
        torch.set_default_dtype(torch.float64)
        return torch.sin((h * torch.ops.aten.full.default([16], 1 / 3)).float())

    try:
        return _compare(function, lambda block: torch.set_default_dtype(torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)


@scenario("ReplaySetsRandomState", right=AS_STOCK, wrong=OTHERWISE)
def replay_of_random_numbers(stage: Stage) -> str:
    return _compare(lambda block, h: torch.sin(h) * torch.rand_like(h))


@scenario("ReplayedVersionChecked", right=AS_STOCK, wrong=OTHERWISE)
def a_saved_tensor_is_written_to(stage: Stage) -> str:
    made: list[torch.Tensor] = []

    def function(block: _Block, h: torch.Tensor) -> torch.Tensor:
        made.append(torch.exp(h))
        return made[-1]

    return _compare(function, lambda block: made[-1].detach().add_(1))


@scenario("ForeignVersionChecked", right="raised: torchoffload: the parameter up.bias of s", wrong=OTHERWISE)
def a_parameter_is_written_to(stage: Stage) -> str:
    return _compare(lambda block, h: torch.sin(h), lambda block: block.up.bias.detach().add_(1))


@scenario("KeptValueChecked", right=AS_STOCK, wrong=OTHERWISE)
def a_kept_value_is_written_to(stage: Stage) -> str:
    made: list[torch.Tensor] = []

    def function(block: _Block, h: torch.Tensor) -> torch.Tensor:
        made.append(torch.sin(h.detach()))
        return h * torch.cos(made[-1])

    aten = torch.ops.aten
    plan = BlockPlan(operators=(aten.addmm.default, aten.sin.default), kept=frozenset({1}))
    return _compare(function, lambda block: made[-1].mul_(3), plan)


@scenario("SmallForeignCopied", right=AS_STOCK, wrong="raised: torchoffload: a tensor that was given to")
def a_small_tensor_is_written_to(stage: Stage) -> str:
    small = torch.ones(16)
    # Not so often that it is another value than at the beginning.
    return _compare(lambda block, h: torch.sin(h + small), lambda block: small.add_(1).sub_(1))


@scenario("CopyBeforeWrite", right=AS_STOCK, wrong="raised: a value that is held has no copy")
def the_block_writes_to_what_it_has_read(stage: Stage) -> str:
    def function(block: _Block, h: torch.Tensor) -> torch.Tensor:
        large = torch.ops.aten.detach.default(block.large)
        early = torch.sin(h.sum() + large).mean()
        large.mul_(2)
        return h * early * large.mean()

    outcome = _compare(function)
    return "raised: a value that is held has no copy" if "raised" in outcome else outcome


@scenario("UninitialisedIsKept", right=AS_STOCK, wrong=OTHERWISE)
def memory_is_filled_past_the_dispatcher(stage: Stage) -> str:
    def function(block: _Block, h: torch.Tensor) -> torch.Tensor:
        filled = torch.empty(16)
        filled.numpy()[:] = 2
        return torch.sin(h * filled)

    def reuse(_block: _Block) -> None:
        others = [torch.full((16,), 7.0) for _ in range(64)]
        del others

    return _compare(function, reuse)


class _SavedUnwaited(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h: torch.Tensor) -> torch.Tensor:
        summed = torch.ops._c10d_functional.all_reduce(h, "sum", dist.group.WORLD.group_name)
        ctx.save_for_backward(summed)
        return summed

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0]


class _Saving(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return _SavedUnwaited.apply(h)


@scenario("ReplayedCollectiveAwaited", right=AS_STOCK, wrong="a collective that nobody waits for")
def what_a_collective_fills_is_saved_before_somebody_waits(stage: Stage) -> str:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        linear = nn.Linear(16, 16)
        block = nn.Sequential(linear, nn.Tanh(), _Saving())
        x = torch.ones(4, 16)
        # Only a collective that a plan has is called again.
        with Recorder(block, ((x,), {})) as recorder:
            torch.ops._c10d_functional.wait_tensor(block(x).detach())
        plan_block(block, BlockPlan(operators=tuple(call.operator for call in recorder.record.operators)))
        before = torch._C._distributed_c10d._get_work_registry_size()
        summed = block(x)
        torch.ops._c10d_functional.wait_tensor(summed.detach())
        summed.sum().backward()
        left = torch._C._distributed_c10d._get_work_registry_size() - before
        return "a collective that nobody waits for" if left else AS_STOCK
    finally:
        dist.destroy_process_group()
