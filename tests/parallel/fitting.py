"""fitting.py: the numerics pattern of the cases with ``fit``.

A case makes a `Fitting`, and a *program* that trains a model within ``fitting.fitted`` for ``fitting.steps``.
`assert_fits` runs it with ``fit`` and then, for as many steps, without it. It compares every bit that the program has
checked, and asks whether blocks were really computed again.
"""

import contextlib
import math
import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _get_work_registry_size
from world import BATCH, World, local_values

import torchoffload
from fitted_models import options_of
from gradients import Live, Program, Run, TestErr, differing, execute, settled
from torchoffload._fit.block import blocks

ROOM_FOR_ALL = 1 << 50
LEAST, ALL = 0.0, 1.0  # budgets
MARGINS = {"cuda": 0.3}  # pieces of memory in which tensors are reserved are large beside those of these steps
MARGIN = 0.04  # fit's own
MOST_STEPS = 60
LEFT_BYTES = 8 << 20
SETTLED_STEPS = 2  # of all ranks, at the end


def batch_size_of(world: World) -> int:
    """On a GPU what blocks save has to be large beside the pieces in which memory is reserved."""
    return 4096 if world.device.name == "cuda" else BATCH


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """This process's part of the gradient of each parameter."""
    return {name: gradient for name, (_, gradient) in local_values(model).items()}


class Fitting:
    """How one rank fits its models, and what came of it.

    Parameters
    ----------
    world : World
        This process.
    move : bool
        Whether anything may move, to the world's device.
    budgets : list of float, optional
        For each rank the part of the memory that it plans for, between 0, the least that its survey says will do, and
        1, which is room for all. Default: the least for each.
    computes_again : bool, optional
        Whether blocks have to be computed again, or must not be. Default: they have to if it takes that to keep to the
        budget, and must not be if there is room for all.
    """

    def __init__(
        self, world: World, *, move: bool, budgets: list[float] | None = None, computes_again: bool | None = None
    ) -> None:
        self.world = world
        self.moves = move
        self.budget = budgets[world.rank] if budgets else LEAST
        self.computes_again = computes_again
        if computes_again is None and (not move or (self.budget == LEAST and world.device.name != "cuda")):
            self.computes_again = self.budget < ALL
        self.step_count = 0
        self.settled_at: int | None = None  # the first step behind which all ranks were settled
        self.told: dict[str, Any] = {}
        self._margin = MARGINS.get(world.device.name, MARGIN)
        self._allocated_bytes: list[int] = []  # at the end of each step
        self._options: dict[str, Any] = options_of(world.device) if move else {"move": False}
        self._handles: list[torchoffload.Fitted] = []
        self._phases: list[str] = []
        self._has_budget = False
        self._may_keep_all = False  # whether what there is beside the margin is enough for all that some model saves

    @contextlib.contextmanager
    def fitted(self, run: Run, *models: nn.Module, memory: int = ROOM_FOR_ALL) -> Iterator[list[torchoffload.Fitted]]:
        """Fit the models, one by one; in stock runs leave them as they are."""
        with contextlib.ExitStack() as stack:
            if not run.stock:
                for model in models:
                    handle = torchoffload.fit(model, memory, margin=self._margin, **self._options)
                    self._handles.append(stack.enter_context(handle))
            yield self._handles
            if not run.stock:
                self._check()
                plans = [handle.plan for handle in self._handles if handle.plan is not None]
                self.told = {
                    "phases": self._phases,
                    "moved_bytes": sum(plan.moved_bytes for plan in plans),
                    "reports": [handle.report() for handle in self._handles],
                }
            self._handles.clear()

    def steps(self, run: Run) -> Iterator[int]:
        """Yield the numbers of steps, until the models of all ranks are settled; in a stock run, of as many."""
        if run.stock:
            yield from range(self.step_count)
            return
        left = SETTLED_STEPS
        self._allocated_bytes.clear()
        while self.step_count < MOST_STEPS and left > 0:
            yield self.step_count
            self.step_count += 1
            self._check_memory()
            self.step_ends()
            is_settled = self._has_budget and all(handle.phase == "settled" for handle in self._handles)
            left = left - 1 if self._all_say(is_settled) else SETTLED_STEPS
            if left < SETTLED_STEPS and self.settled_at is None:
                self.settled_at = self.step_count

    def _check_memory(self) -> None:
        """Fail if a step has left something behind."""
        assert _get_work_registry_size() == 0, "collectives are left that nobody has waited for"
        if self.world.device.name == "cuda":
            self._allocated_bytes.append(torch.cuda.memory_allocated())
            beyond = self._allocated_bytes[-1] - min(self._allocated_bytes[1:], default=self._allocated_bytes[-1])
            assert beyond <= LEFT_BYTES, f"steps leave more and more behind: {self._allocated_bytes}"

    def was_settled(self, step: int) -> bool:
        """Whether all ranks had been settled before this step."""
        return self.settled_at is not None and step >= self.settled_at

    def _all_say(self, value: bool) -> bool:
        told = torch.tensor(int(value), device=self.world.torch_device)
        dist.all_reduce(told, dist.ReduceOp.MIN)
        return bool(told)

    def step_ends(self) -> None:
        """Note the phase, and take the budget as soon as the survey of each model is done."""
        if not self._handles:
            return
        self._phases.append(self._handles[0].phase)
        if not self._has_budget and all(handle.phase != "survey" for handle in self._handles):
            self._has_budget = True
            self._replan(self.budget)

    def _replan(self, budget: float) -> None:
        """Give all models of this process the same memory: the most that one of them asks for."""
        memory_bytes = max(self._memory_bytes(handle, budget) for handle in self._handles)
        most_bytes = min(handle.frontier()[-1].memory_bytes for handle in self._handles)
        self._may_keep_all = memory_bytes * (1 - self._margin) >= most_bytes
        for handle in self._handles:
            handle.replan(memory_bytes)

    def _memory_bytes(self, handle: torchoffload.Fitted, budget: float) -> int:
        if budget == ALL:
            return ROOM_FOR_ALL
        points = handle.frontier()
        low, high = points[0].memory_bytes, points[-1].memory_bytes
        return math.ceil((low + (high - low) * budget) / (1 - self._margin)) + 1

    def _check(self) -> None:
        for handle in self._handles:
            assert handle.phase == "settled", (self._phases, handle.report())
            assert handle.plan is not None
            assert handle.plan.measured_s is not None, f"the plan was never timed: {self._phases}"
            if self.computes_again and not self._may_keep_all:  # with room for all, times of tiny steps decide
                assert handle.plan.recompute_s > 0, handle.report()


class Restless(Fitting):
    """Plans for other amounts again and again, each rank when it likes to; never settled for long."""

    def __init__(self, world: World, *, move: bool, seed: int) -> None:
        super().__init__(world, move=move)
        self._random = random.Random(2 * seed + world.rank)

    def steps(self, run: Run) -> Iterator[int]:
        """Yield the numbers of a few steps."""
        for step in range(16):
            yield step
            self.step_ends()

    def step_ends(self) -> None:
        """Take another budget now and then."""
        is_surveyed = self._handles and all(handle.phase != "survey" for handle in self._handles)
        if is_surveyed and self._random.random() < 0.4:
            self._replan(self._random.random())

    def _check(self) -> None:
        pass


@contextlib.contextmanager
def counted_recomputations() -> Iterator[list[int]]:
    """Count how often a block is computed again, whatever a plan says."""
    count, begin = [0], blocks._Observer.begins_again

    def counting(observer: blocks._Observer) -> None:
        count[0] += 1
        begin(observer)

    blocks._Observer.begins_again = counting  # type: ignore[method-assign]
    try:
        yield count
    finally:
        blocks._Observer.begins_again = begin  # type: ignore[method-assign]


def assert_fits(fitting: Fitting, program: Program) -> dict[str, Any]:
    """Fail unless the program does the same, bit for bit, with and without fit, and leaves nothing behind.

    Returns
    -------
    dict
        ``phases``, one for each step; ``moved_bytes`` of the plan; ``reports``.
    """
    device = fitting.world.device
    live = settled(Live.now(), timeout_s=0)
    torchoffload.reset_stats()
    with counted_recomputations() as count:
        fitted = execute(program, device, stock=False)
    assert "exception" not in fitted, fitted["exception"]
    stats = torchoffload.stats()
    stock = execute(program, device, stock=True)
    if "exception" in stock:
        raise TestErr(f"stock raised: {stock['exception']}")
    assert fitted == stock, f"differs from stock: {differing(stock, fitted)}"
    assert not fitting.computes_again or count[0] > 0, "no block was computed again"
    assert fitting.moves or stats.bytes_offloaded == 0
    assert settled(live) == live, "records, handles or slots outlive the program"
    dist.barrier()
    return fitting.told
