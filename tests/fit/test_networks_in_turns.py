"""fit on networks that are trained in turns, each in steps of its own: none of them runs out of memory."""

import copy
import functools
import gc
import itertools
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from devices import Device
from fitted_models import Wide, fitted_on, options_of
from planned_blocks import WIDTH
from simulated_allocator import SimulatedAllocator

WGAN_CRITIC_STEPS = 3


class Images(nn.Module):
    """Makes eight large inputs of a small one, as a generator makes images of noise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.expand(8, 8, WIDTH).contiguous()


class Networks(nn.Module):
    """A generator and its critic. ``is_one``: the loop calls them by way of this module, and else by themselves."""

    def __init__(self, *, is_one: bool = False) -> None:
        super().__init__()
        self.generator = nn.Sequential(Images(), *(Wide(3, 2) for _ in range(6)))
        self.critic = nn.Sequential(*(Wide(3, 2) for _ in range(4)))
        self.is_one = is_one

    def forward(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(name)(x)

    def make(self) -> torch.Tensor:
        noise = torch.randn(1, 1, WIDTH)
        return self("generator", noise) if self.is_one else self.generator(noise)

    def judge(self, x: torch.Tensor) -> torch.Tensor:
        return self("critic", x) if self.is_one else self.critic(x)


def dcgan(model: Networks) -> None:
    model.critic.zero_grad()
    model.judge(torch.randn(8, 8, WIDTH)).square().mean().backward()
    made = model.make()
    model.judge(made.detach()).square().mean().backward()
    model.generator.zero_grad()
    model.judge(made).square().mean().backward()


def wgan(model: Networks, *, detaches: bool) -> None:
    for _ in range(WGAN_CRITIC_STEPS):
        model.critic.zero_grad()
        with torch.set_grad_enabled(detaches):
            made = model.make()
        (model.judge(torch.randn(8, 8, WIDTH)).mean() - model.judge(made.detach()).mean()).backward()
    model.generator.zero_grad()
    model.judge(model.make()).mean().backward()


def relativistic(model: Networks) -> None:
    model.zero_grad()
    made, real = model.make(), torch.randn(8, 8, WIDTH)
    (model.judge(real) - model.judge(made.detach())).square().mean().backward()
    model.critic.zero_grad()
    (model.judge(made) - model.judge(real)).square().mean().backward()


def keeps_samples(model: Networks, numbers: Any, kept: list[torch.Tensor]) -> None:
    relativistic(model)
    if next(numbers) % 5 == 4:
        kept[:] = [model.make()[:1]]


LOOPS: dict[str, Callable[[], Callable[[Networks], None]]] = {
    "dcgan": lambda: dcgan,
    "wgan": lambda: functools.partial(wgan, detaches=False),
    "wgan that detaches": lambda: functools.partial(wgan, detaches=True),
    "relativistic": lambda: relativistic,
    "keeps samples": lambda: functools.partial(keeps_samples, numbers=itertools.count(), kept=[]),
}


def reserved(model: Networks, train: Callable[[Networks], None], *, is_checkpointed: bool) -> int:
    """What the loop reserves, with each block in a checkpoint or as it is."""
    blocks = [each for each in model.modules() if isinstance(each, Wide)]
    for each in blocks if is_checkpointed else ():
        forward: Any = Wide.forward.__get__(each)
        each.forward = functools.partial(checkpoint, forward, use_reentrant=False)  # type: ignore[method-assign]
    with SimulatedAllocator(1.1) as allocator:
        allocator.hold([*model.parameters()])
        for _ in range(12):
            train(model)
            gc.collect()
    for each in blocks:
        vars(each).pop("forward", None)
    model.zero_grad()
    return allocator.most_reserved_bytes


# If one module calls both networks, nothing tells before the critic is called that a sample has made the step longer.
CASES = [(loop, is_one) for loop in LOOPS for is_one in (False, True) if (loop, is_one) != ("keeps samples", True)]


@pytest.mark.parametrize("part", [0.05, 0.3, 0.7])
@pytest.mark.parametrize(("loop", "is_one"), CASES)
def test_no_step_runs_out_of_memory(loop: str, part: float, is_one: bool):
    torch.manual_seed(0)
    model = Networks(is_one=is_one)
    least, stock = (reserved(model, LOOPS[loop](), is_checkpointed=each) for each in (True, False))
    memory_bytes, train = int(least + part * (stock - least)), LOOPS[loop]()
    with (
        SimulatedAllocator(1.1, memory_bytes) as allocator,
        fitted_on(model, allocator, memory_bytes) as handle,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", UserWarning)
        allocator.hold([*model.parameters()])
        for _ in range(30):
            train(model)
            gc.collect()
        assert handle.phase == "settled", handle.report()
        assert allocator.most_reserved_bytes <= memory_bytes


def trained(model: Networks, train: Callable[[Networks], None], steps: int = 20) -> list[torch.Tensor]:
    torch.manual_seed(1)
    optimizers = [torch.optim.Adam(each.parameters()) for each in (model.generator, model.critic)]
    for _ in range(steps):
        train(model)
        for each in optimizers:
            each.step()
    return [*model.parameters()]


@pytest.mark.parametrize("is_one", [False, True], ids=["by themselves", "by one module"])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.devices("disk")
def test_the_weights_are_those_of_stock(loop: str, is_one: bool, moves: bool, device_under_test: Device):
    """In half of the memory, with other plans in other steps."""
    torch.manual_seed(0)
    model = Networks(is_one=is_one)
    stock, train = copy.deepcopy(model), LOOPS[loop]()
    memory_bytes = reserved(model, LOOPS[loop](), is_checkpointed=False) // 2
    options = options_of(device_under_test) | {"move": moves, "on_unfit": "warn"}
    with SimulatedAllocator(1.1) as allocator, fitted_on(model, allocator, memory_bytes, **options):
        allocator.hold([*model.parameters()])
        found = trained(model, train)
    expected = trained(stock, LOOPS[loop]())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def settled(model: Networks, memory_bytes: int, train: Callable[[Networks], None], **options: Any) -> str:
    with (
        SimulatedAllocator(1.1, memory_bytes) as allocator,
        fitted_on(model, allocator, memory_bytes, **options) as handle,
    ):
        allocator.hold([*model.parameters()])
        for _ in range(30):
            train(model)
            gc.collect()
        return str(handle.report())


def test_report_tells_of_the_steps_that_no_plan_was_tried_for():
    torch.manual_seed(0)
    model, train = Networks(), LOOPS["wgan"]()
    least, stock = (reserved(model, train, is_checkpointed=each) for each in (True, False))
    report = settled(model, (least + stock) // 2, train)
    assert "Steps that begin with critic" in report or "Steps that begin with generator" in report
    assert "fit does nothing" not in report


def test_a_plan_of_a_file_is_for_the_steps_that_it_was_made_for(tmp_path: Path):
    """The other steps are surveyed then."""
    torch.manual_seed(0)
    model, train = Networks(), LOOPS["wgan"]()
    least, stock = (reserved(model, train, is_checkpointed=each) for each in (True, False))
    memory_bytes, path = least + (stock - least) // 10, tmp_path / "plan.json"
    with SimulatedAllocator(1.1, memory_bytes) as allocator, fitted_on(model, allocator, memory_bytes) as handle:
        allocator.hold([*model.parameters()])
        for _ in range(20):
            train(model)
            gc.collect()
        handle.save(path)
    model.zero_grad()
    report = settled(model, memory_bytes, train, plan=path)
    assert "Steps that begin with" in report
    assert "fit does nothing" not in report


def drops_layers(model: Networks, rng: random.Random) -> None:
    """Calls the blocks one by one, and leaves some out, as LayerDrop does."""
    model.zero_grad()
    x = torch.randn(8, 8, WIDTH)
    for block in model.critic:
        x = x if rng.random() < 0.3 else block(x)
    if x.requires_grad:
        x.square().mean().backward()


def trains_later_at_random(model: Networks, rng: random.Random) -> None:
    """The generator's backward comes behind no, one or two steps of the critic, or not at all."""
    model.zero_grad()
    made = model.make()
    for _ in range(rng.randint(0, 2)):
        model.judge(made.detach()).mean().backward()
        model.critic.zero_grad()
    if rng.random() < 0.6:
        model.judge(made).mean().backward()


@pytest.mark.parametrize("train", [drops_layers, trains_later_at_random])
@pytest.mark.parametrize("part", [0.1, 0.4])
def test_no_step_that_differs_at_random_runs_out_of_memory(train: Any, part: float):
    torch.manual_seed(0)
    model = Networks()
    by_hand = [
        reserved(model, functools.partial(train, rng=random.Random(0)), is_checkpointed=each) for each in (True, False)
    ]
    memory_bytes, rng = int(by_hand[0] + part * (by_hand[1] - by_hand[0])), random.Random(0)
    with SimulatedAllocator(1.1, memory_bytes) as allocator, fitted_on(model, allocator, memory_bytes) as handle:
        allocator.hold([*model.parameters()])
        for _ in range(80):
            train(model, rng)
            gc.collect()
        assert handle.phase == "settled", handle.report()


def test_a_network_that_comes_seldom_is_awaited_in_the_end():
    torch.manual_seed(0)
    model = Networks()
    phases, numbers = [], itertools.count()

    def train(model: Networks) -> None:
        model.zero_grad()
        if next(numbers) % 25 == 24:
            model.judge(model.make()).mean().backward()
        else:
            model.judge(torch.randn(8, 8, WIDTH)).mean().backward()

    with SimulatedAllocator(1.1) as allocator, fitted_on(model, allocator, 1 << 40) as handle:
        allocator.hold([*model.parameters()])
        for _ in range(400):
            train(model)
            phases.append(handle.phase)
    assert set(phases[-100:]) == {"settled"}


def trains_with_retained_graphs(model: Networks, which: str) -> None:
    """As a gradient penalty of one network does, which retains the graph of its step."""
    for name in ("critic", "generator"):
        x = torch.randn(8, 8, WIDTH, requires_grad=True) if name == "critic" else torch.randn(1, 1, WIDTH)
        loss = model(name, x).square().mean() if model.is_one else model.get_submodule(name)(x).square().mean()
        if name == which:
            loss.backward(retain_graph=True)
        loss.backward()


@pytest.mark.parametrize("part", [0.2, 0.5])
@pytest.mark.parametrize("is_one", [False, True], ids=["by themselves", "by one module"])
@pytest.mark.parametrize("which", ["critic", "generator"])
def test_a_step_that_takes_more_than_planned_is_planned_for(which: str, is_one: bool, part: float):
    """One of the networks retains its graph in each eighth step, from the settled plan on."""
    torch.manual_seed(0)
    model = Networks(is_one=is_one)
    seldom = functools.partial(trains_with_retained_graphs, which=which)
    least, stock = (reserved(model, seldom, is_checkpointed=each) for each in (True, False))
    memory_bytes = int(least + part * (stock - least))
    with SimulatedAllocator(1.1, 4 * stock) as allocator, fitted_on(model, allocator, memory_bytes) as handle:
        allocator.hold([*model.parameters()])
        peaks = []
        for number in range(96):
            allocator.most_reserved_bytes = 0
            (seldom if number > 24 and number % 8 == 7 else functools.partial(trains_with_retained_graphs, which=""))(
                model
            )
            gc.collect()
            peaks.append(allocator.most_reserved_bytes)
        assert handle.phase == "settled", handle.report()
        assert max(peaks[-17:]) <= memory_bytes, handle.report()
        assert ("more than planned" in handle.report()) == (max(peaks[25:40]) > memory_bytes), handle.report()
