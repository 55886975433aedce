"""fitted_programs.py: training programs that are hard to compute again, run stock and under fit, bits compared."""

import contextlib
import dataclasses
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn

import torchoffload
from devices import Device
from fitted_models import options_of
from gradients import Run, TestErr, differing, execute

WIDTH = 32
STEPS = 14
Function = Callable[[Any, torch.Tensor], torch.Tensor]
Program = Callable[["Loop"], None]


@dataclasses.dataclass(frozen=True)
class Way:
    """How a program is fitted: whether anything may move, and for which part of the memory, once that is known.

    The part is between 0, the least memory that the survey says will do, and 1, which is room for all.
    """

    moves: bool
    part: float

    def __str__(self) -> str:
        return f"{'moving' if self.moves else 'computing again'}, {self.part}"


WAYS = (Way(moves=False, part=0.0), Way(moves=True, part=0.0), Way(moves=True, part=0.4))
LEAST = WAYS[:2]


class Mlp(nn.Module):
    """Two linear layers, with a function of the test's between them."""

    def __init__(self, function: Function | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Any) -> Any:
        h = self.up(x)
        h = torch.sin(h) if self.function is None else self.function(self, h)
        return x + self.down(torch.tanh(h))


class Net(nn.Module):
    """Blocks between a first layer and a head."""

    def __init__(self, make: Callable[[], nn.Module] = Mlp, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Any) -> Any:
        return self.head(self.through(self.first(x)))

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Loop:
    """The training loop of a program: what it makes its model and its batches with, and tells the end of its steps."""

    def __init__(self, run: Run, device: Device, way: Way | None, options: dict[str, Any]) -> None:
        self.run, self.device = run, run.device
        self._device, self._way, self._options = device, way, options
        self.handles: list[Any] = []
        self._replanned: set[int] = set()
        self._models: list[Any] = []  # which a report needs

    @property
    def stock(self) -> bool:
        return self._way is None

    def fit(self, model: Any, **options: Any) -> Any:
        """Fit the model, except in stock runs. Returns the model."""
        self._models.append(model)
        if self._way is not None:
            given = options_of(self._device) if self._way.moves else {"move": False}
            given |= {"on_unfit": "warn"} | self._options | options
            self.handles.append(torchoffload.fit(model, 1 << 50, **given))
        return model

    def make(self, make: Callable[[], nn.Module]) -> Any:
        """A fitted model, with weights that are the same in each run."""
        return self.fit(self.run.module(make))

    def batch(self, *shape: int) -> torch.Tensor:
        return self.run.tensor(*(shape or (4, 8, WIDTH)))

    def ends_step(self, *models: nn.Module, **more: Any) -> None:
        """Check what a step has left; plan for the memory in question once the survey is done."""
        for model in models:
            self.run.check(
                gradients={name: each.grad for name, each in model.named_parameters()},
                parameters=dict(model.named_parameters()),
                buffers=dict(model.named_buffers()),
            )
        # torch.rand would move on the generator, which programs seed as they like.
        self.run.check(random=torch.get_rng_state(), **more)
        for number, handle in enumerate(self.handles):
            if number not in self._replanned and handle.phase == "settled" and self._way is not None:
                points = handle.frontier()
                low, high = points[0].memory_bytes, points[-1].memory_bytes
                handle.replan(int((low + (high - low) * self._way.part) / (1 - 0.04)) + 1)
                self._replanned.add(number)

    def train(
        self,
        model: Any,
        *,
        steps: int = STEPS,
        call: Callable[[Any, torch.Tensor], torch.Tensor] = lambda model, x: model(x),
        around: Callable[[], Any] = contextlib.nullcontext,
        between: Callable[[Any, int], None] | None = None,
        after: Callable[[Any, int], None] | None = None,
        extra: Callable[[Any], dict[str, Any]] | None = None,
        shape: tuple[int, ...] = (4, 8, WIDTH),
        optimizer: bool = True,
    ) -> None:
        """Train a model.

        Parameters
        ----------
        model : nn.Module
            The model, fitted.
        steps : int
            How many steps.
        call : callable
            The forward; its output is the loss, or the mean of its squares is.
        around : callable
            Makes a context around the forward.
        between, after : callable
            What the program does between forward and backward, and after each step.
        extra : callable
            What to compare besides the gradients.
        shape : tuple of int
            The shape of a batch.
        optimizer : bool
            Whether an optimizer steps.
        """
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(steps):
            x = self.batch(*shape)
            with around():
                y = call(model, x)
            loss = y if y.dim() == 0 else y.float().square().mean()
            if between is not None:
                between(model, step)
            loss.backward()
            self.ends_step(model, loss=loss.detach(), **(extra(model) if extra is not None else {}))
            if optimizer:
                sgd.step()
            model.zero_grad()
            if after is not None:
                after(model, step)


def net(make: Callable[[], nn.Module], depth: int = 4, **trains: Any) -> Program:
    """A program that trains a net of such blocks."""
    return lambda loop: loop.train(loop.make(lambda: Net(make, depth)), **trains)


def function(use: Function, **trains: Any) -> Program:
    """A program that trains a net of blocks that have this function between two layers."""
    return net(lambda: Mlp(use), **trains)


_CUDA_PIECE = 2 << 20


def _spread_bytes(handle: torchoffload.Fitted) -> int:
    points = handle.frontier() if handle.plan is not None else ()
    return points[-1].memory_bytes - points[0].memory_bytes if points else 0


@dataclasses.dataclass
class Fitted:
    """What became of a program under fit."""

    phases: list[str]
    reports: list[str]
    recompute_s: float
    spread_bytes: int  # from the least to the most that a plan may take
    warnings: list[str]


def assert_as_stock(
    program: Program,
    device: Device,
    way: Way,
    *,
    is_computed_again: bool = True,
    obstacle: str | None = None,
    stock_raises: bool = False,
    **options: Any,
) -> Fitted:
    """Fail unless a program does the same under fit as stock, bit for bit, in all phases of fit.

    Parameters
    ----------
    program : callable
        The program.
    device, way : Device, Way
        The device, and how it is fitted.
    is_computed_again : bool
        Whether the plan, once settled, must have blocks computed again if nothing may move and memory is least. A test
        in which nothing is computed again shows nothing.
    obstacle : str, optional
        The report must say so. Without it the report must not say that any block cannot be computed again.
    stock_raises : bool
        Whether an exception ends the program also without fit: with fit it has to have the same type, in that step.
    **options
        Further options of ``fit``.
    """
    found: list[Fitted] = []

    def body(used: Way | None) -> Callable[[Run], None]:
        def observed(run: Run) -> None:
            random.seed(0)
            numpy.random.seed(0)  # noqa: NPY002
            loop = Loop(run, device, used, options)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    program(loop)
                finally:
                    told = [str(each.message) for each in caught]
                    plans = [handle.plan for handle in loop.handles]
                    found.append(
                        Fitted(
                            [handle.phase for handle in loop.handles],
                            [handle.report() for handle in loop.handles],
                            sum(plan.recompute_s for plan in plans if plan is not None),
                            max((_spread_bytes(handle) for handle in loop.handles), default=0),
                            [each for each in told if "torchoffload" in each],
                        )
                    )
                    for handle in loop.handles:
                        handle.remove()

        return observed

    stock = execute(body(None), device, stock=True)
    again = execute(body(None), device, stock=True)
    if stock != again:
        raise TestErr(f"not bit-stable without fit: {differing(stock, again)}")
    if ("exception" in stock) != stock_raises:
        raise TestErr(f"stock raised, and the test does not say so, or the reverse: {stock.get('exception')}")
    if stock_raises:
        stock["exception"] = [text.partition(":")[0] for text in stock["exception"]]
    found.clear()
    torchoffload.reset_stats()
    fitted = execute(body(way), device, stock=False)
    if stock_raises and "exception" in fitted:
        fitted["exception"] = [text.partition(":")[0] for text in fitted["exception"]]
    assert fitted == stock, f"differs from stock: {differing(stock, fitted)}\n{found[0].reports}"
    outcome = found[0]
    report = "\n".join(outcome.reports)
    # What CUDA's allocator reserves comes in pieces, so that on a GPU a tiny model may have room for all in the least.
    if way == WAYS[0] and is_computed_again and not (device.name == "cuda" and outcome.spread_bytes < _CUDA_PIECE):
        assert outcome.recompute_s > 0, f"nothing was computed again:\n{report}"
    if obstacle is None:
        assert "cannot be computed again" not in report, report
    else:
        assert obstacle in report, report
    return outcome
