"""fit: the same bits as stock in all its phases, whatever plan it takes."""

import contextlib
import dataclasses
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import torchoffload
from devices import Device
from fitted_models import Model, options_of
from gradients import Run, assert_same_gradients, execute
from models import Residual
from planned_blocks import BLOCKS, WIDTH
from torchoffload._fit.plan.step import survey_plan
from torchoffload._fit.plan.trials import Trial
from torchoffload._pytorch import collectives

pytestmark = pytest.mark.devices("disk", "simulated-late", "cuda")

STEPS = 28
BUDGETS = {"least": 0.0, "middle": 0.5, "all": 1.0}


@contextlib.contextmanager
def fitted(run: Run, device: Device, model: nn.Module, **more: Any) -> Iterator[Any]:
    """The model, fitted with room for all; in stock runs as it is."""
    if run.stock:
        yield None
        return
    with torchoffload.fit(model, 1 << 50, **(options_of(device) | more)) as handle:
        yield handle


def take_budget(handle: Any, budget: float) -> None:
    """Plan for a part of the memory between 0, the least that the survey says will do, and 1, which is room for all."""
    points = handle.frontier()
    low, high = points[0].memory_bytes, points[-1].memory_bytes
    handle.replan(int((low + (high - low) * budget) / (1 - 0.04)) + 1)


def train(
    run: Run,
    handle: Any,
    model: nn.Module,
    *,
    steps: int = STEPS,
    batch: Callable[[int], torch.Tensor] | None = None,
    call: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda model, x: model(x),
    budget: float | None = None,
) -> None:
    """Trains, and checks each step's loss and gradients; all phases are passed."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    make = batch or (lambda step: run.tensor(4, 8, WIDTH))
    was_replanned = False
    for step in range(steps):
        x = make(step)
        optimizer.zero_grad()
        loss = call(model, x)
        loss.backward()
        run.check(loss=loss.detach(), gradients={name: each.grad for name, each in model.named_parameters()})
        optimizer.step()
        if handle is not None and budget is not None and not was_replanned and handle.phase == "settled":
            take_budget(handle, budget)
            was_replanned = True
    run.check(buffers={name: each.clone() for name, each in model.named_buffers()}, random=torch.rand(2))


def assert_fitted(device: Device, make: Callable[[], nn.Module], budget: float = 0.5, **more: Any) -> None:
    times = more.pop("times", 1)

    def program(run: Run):
        model = run.module(lambda: Model(make, times=times))
        with fitted(run, device, model) as handle:
            torch.manual_seed(3)
            train(run, handle, model, budget=budget, **more)
            if handle is not None:
                assert handle.phase == "settled", handle.report()
                assert handle.plan is not None
        return

    assert_same_gradients(program, device=device, min_moved_fraction=1e-9)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("block", BLOCKS)
def test_all_phases_have_the_bits_of_stock(device_under_test: Device, block: str, budget: str):
    assert_fitted(device_under_test, BLOCKS[block], BUDGETS[budget])


def test_without_computing_again(device_under_test: Device):
    def program(run: Run):
        model = run.module(lambda: Model(BLOCKS["transformer"]))
        with fitted(run, device_under_test, model, recompute=False) as handle:
            train(run, handle, model, budget=0.5)
            assert handle is None or handle.plan.recompute_s == 0
        return

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=1e-9)


def test_chosen_blocks_move_as_much_as_has_to_and_compute_nothing_again(device_under_test: Device):
    """With the least memory all moves that can. With room for all, the times of tiny steps decide what moves."""
    plans: dict[str, Any] = {}

    def program(run: Run):
        model = run.module(lambda: Model(BLOCKS["transformer"]))
        with fitted(run, device_under_test, model, blocks="net.blocks.[0-2]", recompute=False) as handle:
            train(run, handle, model, steps=20)
            if handle is not None:
                plans["all"] = handle.plan
                take_budget(handle, 0.0)
            train(run, handle, model, steps=20)
            if handle is not None:
                assert handle.phase == "settled", handle.report()
                plans["least"] = handle.plan
                assert "3 blocks" in handle.report()
                assert "net.blocks.3" not in handle.report()

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=1e-9)
    assert plans["least"].moved_bytes >= plans["all"].moved_bytes
    assert plans["least"].moved_bytes > 0
    assert plans["all"].recompute_s == plans["least"].recompute_s == 0


def test_without_moving(device_under_test: Device):
    def program(run: Run):
        model = run.module(lambda: Model(BLOCKS["transformer"]))
        with fitted(run, device_under_test, model, move=False) as handle:
            train(run, handle, model, budget=0.0)
            if handle is not None:
                assert handle.plan.moved_bytes == 0
                fits_as_measured = 0 < handle.plan.reserved_bytes <= handle._driver.budget.memory_bytes
                assert handle.plan.recompute_s > 0 or fits_as_measured  # CUDA reserves memory in pieces of 2 MiB
        return

    stock = execute(program, device_under_test, stock=True)
    torchoffload.reset_stats()
    assert execute(program, device_under_test, stock=False) == stock
    assert "exception" not in stock
    assert torchoffload.stats().bytes_offloaded == 0


def test_blocks_that_are_called_twice(device_under_test: Device):
    assert_fitted(device_under_test, BLOCKS["dropouts"], times=2)


def test_under_autocast(device_under_test: Device):
    def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return model(x)

    assert_fitted(device_under_test, BLOCKS["transformer"], call=call)


def test_two_calls_before_a_backward(device_under_test: Device):
    assert_fitted(device_under_test, BLOCKS["transformer"], call=lambda model, x: model(x) + model(x + 1))


@pytest.mark.devices("disk")
@pytest.mark.parametrize("keeps_first", [False, True])
def test_each_of_two_calls_moves_what_is_planned_for_it(device_under_test: Device, keeps_first: bool):
    """As in preference training. By a plan made by hand, what one forward saves moves, and the rest stays.

    ``keeps_first``: the first forward runs under a NoOpManager, and it is the one that stays.
    """
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Residual(64) for _ in range(4))), torch.randn(256, 64)
    options = options_of(device_under_test) | {"recompute": False, "min_offload_size": 0, "margin": 0.0}
    with torchoffload.fit(model, 1 << 50, blocks=Residual, **options) as handle:

        def moved_bytes() -> int:
            torchoffload.reset_stats()
            with torchoffload.NoOpManager() if keeps_first else contextlib.nullcontext():
                first = model(x)
            (first - model(x.flip(0)).tanh()).square().mean().backward()
            return torchoffload.stats().bytes_offloaded

        for _ in range(STEPS):
            moved_bytes()
        step = handle._driver.step
        all_moved = survey_plan(step)
        moving = slice(4, 8) if keeps_first else slice(4)
        calls = [dataclasses.replace(call, moved=(), moves=False) for call in all_moved.calls]
        assert len(calls) == 8
        calls[moving] = all_moved.calls[moving]
        assert all(call.moves for call in calls[moving])
        handle._driver._follow_settled(Trial(step, dataclasses.replace(all_moved, calls=tuple(calls))), 0)
        half = all_moved.moved_bytes // 2
        for _ in range(2):
            # the first block's input is the loop's, so that it may stay
            assert half - x.nbytes <= moved_bytes() <= half


def test_evaluation_between_steps(device_under_test: Device):
    def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
        return model(x)

    assert_fitted(device_under_test, BLOCKS["batch norm"], call=call)


@pytest.mark.parametrize("budget", [None, 0.5])
def test_larger_and_smaller_batches(device_under_test: Device, budget: float | None):
    """A much larger call than any before is surveyed anew, unless all has room; smaller ones follow plans."""

    def program(run: Run):
        model = run.module(lambda: Model(BLOCKS["transformer"]))
        with fitted(run, device_under_test, model, on_unfit="warn") as handle, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # twice the batch may not fit
            phases = []
            for step, size in enumerate([4] * 26 + [2, 3, 4] + [8] * 14):
                if handle is not None and step == 13 and budget is not None:
                    take_budget(handle, budget)
                train(run, handle, model, steps=1, batch=lambda _, size=size: run.tensor(size, 8, WIDTH))
                phases.append(None if handle is None else handle.phase)
                if handle is not None and step == 28:  # times of tiny steps may favour another plan than keeping all
                    keeps_all = handle.plan.moved_bytes == 0 and handle.plan.recompute_s == 0
            if handle is not None:
                assert phases[28] == "settled"
                assert phases[29] == ("settled" if budget is None and keeps_all else "survey")
                assert phases[-1] in ("settled", "least memory")
        return

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=1e-9)


def test_a_forward_that_raises(device_under_test: Device):
    """In a survey, in a trial and later; the loop goes on."""

    class Raises(BLOCKS["transformer"]):  # type: ignore[misc]
        raises = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if self.raises:
                raise ValueError("stop")
            return y

    def program(run: Run):
        model = run.module(lambda: Model(Raises))
        with fitted(run, device_under_test, model) as handle:
            for step in range(STEPS):
                if step in {0, 1, 3, 12}:
                    model.net.blocks[2].raises = True
                    with run.raising(f"step {step}"):
                        model(run.tensor(4, 8, WIDTH))
                    model.net.blocks[2].raises = False
                train(run, handle, model, steps=1)
            if handle is not None:
                assert handle.phase == "settled"
        return

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=1e-9)


class Cached(nn.Module):
    """Appends to a list that the caller gives, as a cache of keys and values does."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
        h = torch.sin(self.up(x))
        cache.append(h)
        return x + torch.cos(sum(cache))


class WithCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Cached() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, cache)
        return x.square().mean()


def test_a_block_that_changes_a_list_is_computed_again(device_under_test: Device):
    def program(run: Run):
        model = run.module(WithCache)
        with fitted(run, device_under_test, model) as handle:
            train(run, handle, model, steps=12)
            if handle is not None:
                assert "cannot be computed again" not in handle.report()
        return

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=1e-9)


def test_a_model_without_blocks_is_one_block(device_under_test: Device):
    def program(run: Run):
        model = run.module(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)))
        with fitted(run, device_under_test, model) as handle:
            train(run, handle, model, call=lambda model, x: model(x).square().mean(), budget=0.3)
            if handle is not None:
                assert "1 block (" in repr(handle)
        return

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=1e-9)


class Reduces(nn.Module):
    """Calls a collective in its forward, as a layer does that is split over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.sin(self.up(x))
        return x + torch.cos(torch.ops.torchoffload_tests.reduce(h.detach()) + h)


def test_a_block_with_a_collective_is_not_computed_again(device_under_test: Device, monkeypatch: pytest.MonkeyPatch):
    """What is a collective is told by the namespace of the operator; here it is one that needs no process group."""
    monkeypatch.setattr(collectives, "_NAMESPACES", frozenset(("torchoffload_tests",)))

    def program(run: Run):
        model = run.module(lambda: Model(Reduces))
        with fitted(run, device_under_test, model) as handle:
            train(run, handle, model, budget=0.0)
            if handle is not None:
                assert handle.plan.recompute_s == 0
                assert "collectives inside" in handle.report()

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=1e-9)


@torch.library.custom_op("torchoffload_tests::reduce", mutates_args=())
def reduce(x: torch.Tensor) -> torch.Tensor:
    """Stands for a collective of one rank."""
    return x.clone()


class Effects(nn.Module):
    """Has effects on objects of other classes in its forward, and reads what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.state = types.SimpleNamespace(count=0.5, values=[1.0], array=numpy.ones(2))
        self.calls = 0

    def forward(self, x: torch.Tensor, step: types.SimpleNamespace) -> torch.Tensor:
        state = self.state
        state.count += 0.5
        state.count += 0.5  # the address of what it was is used again
        state.array[0] += 1
        self.calls += 1
        if self.calls % 5 == 0:
            state.values.append(0.25)
        h = torch.sin(self.up(x)) * state.count * step.number
        return x + torch.cos(h * sum(state.values)) / float(state.array.sum())


class WithEffects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Effects() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step = types.SimpleNamespace(number=1.0)
        for number, block in enumerate(self.blocks):
            step.number = 1.0 + number
            x = block(x, step)
        return x.square().mean()


def test_effects_come_once_and_objects_are_as_they_were(device_under_test: Device):
    def program(run: Run):
        model = run.module(WithEffects)
        with fitted(run, device_under_test, model) as handle:
            train(run, handle, model, budget=0.0)
        run.check(
            states=[vars(block.state)["values"] for block in model.blocks], counts=[b.state.count for b in model.blocks]
        )

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=1e-9)


class Decays(nn.Module):
    """Writes to a buffer and reads it, for something that nobody needs while its weight is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rate", torch.full((WIDTH,), 0.5))
        self.weight = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rate.mul_(0.9)
        return torch.sin(self.up(x)) + self.rate.rsqrt() * self.weight


@pytest.mark.parametrize("at", [1, 8, 18])
def test_what_cannot_run_again_can_be_asked_for_later(device_under_test: Device, at: int):
    def program(run: Run):
        model = run.module(lambda: Model(Decays))
        with fitted(run, device_under_test, model, on_unfit="warn") as handle, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is asked for later needs more than there is
            for step in range(STEPS):
                if step == at:
                    for block in model.net.blocks:
                        block.weight.requires_grad_(True)
                train(run, handle, model, steps=1, budget=0.0 if step == 12 else None)

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=1e-9)


class FunctionalGradient(nn.Module):
    """Has a transform inside that allows no saved-tensor hooks, and calls a module of its own in it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        slope = torch.func.grad(lambda t: torch.sin(self.down(t)).sum())(h)
        return x + self.down(torch.sin(h * slope) * torch.exp(-h))


def test_a_functional_gradient_inside_of_a_block(device_under_test: Device):
    assert_fitted(device_under_test, FunctionalGradient, budget=0.0)
