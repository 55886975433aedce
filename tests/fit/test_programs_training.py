"""How programs train: turns of models, evaluations, copies and errors in between, and modules that change."""

import contextlib
import copy
import dataclasses
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from devices import Device
from fitted_programs import LEAST, WIDTH, Loop, Mlp, Net, Program, Way, assert_as_stock

pytestmark = pytest.mark.devices("disk", "cuda")
each_way = pytest.mark.parametrize("way", LEAST, ids=map(str, LEAST))

PROGRAMS: dict[str, Program] = {}


def program(train: Program) -> Program:
    PROGRAMS[train.__name__] = train
    return train


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def plain_step(loop: Loop, model: Any, x: torch.Tensor | None = None) -> None:
    """Forward and backward, and a comparison of the gradients that there are."""
    model.zero_grad()
    loss = loss_of(model(loop.batch() if x is None else x))
    loss.backward()
    loop.run.check(gradients=[each.grad for each in model.parameters() if each.grad is not None])
    loop.ends_step(loss=loss.detach())


# Steps that are more than one forward and one backward.


@program
def two_models_take_turns(loop: Loop) -> None:
    maker, judge = loop.make(Net), loop.make(Net)
    optimizers = sgd(maker), sgd(judge)
    for _ in range(16):
        made = functional.pad(maker(loop.batch()), (0, WIDTH - 8))
        optimizers[1].zero_grad()
        (loss_of(judge(loop.batch()) - 1) + loss_of(judge(made.detach()))).backward()
        loop.ends_step(judge)
        optimizers[1].step()
        optimizers[0].zero_grad()
        loss_of(judge(made) - 1).backward()
        loop.ends_step(maker, judge)
        optimizers[0].step()
        judge.zero_grad()


@program
def gradients_are_accumulated_and_the_last_batch_is_smaller(loop: Loop) -> None:
    model = loop.make(Net)
    optimizer = sgd(model)
    for _ in range(14):
        optimizer.zero_grad()
        for size in (4, 4, 1):
            (loss_of(model(loop.batch(size, 8, WIDTH))) / 3).backward()
        loop.ends_step(model)
        optimizer.step()


@program
def a_penalty_on_the_gradient(loop: Loop) -> None:
    model = loop.make(Net)
    optimizer = sgd(model)
    for _ in range(16):
        x = loop.batch().requires_grad_()
        optimizer.zero_grad()
        output = model(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (loss_of(output) + loss_of(gradient)).backward()
        loop.ends_step(model)
        optimizer.step()


@program
def a_search_for_the_worst_input(loop: Loop) -> None:
    model = loop.make(Net)
    optimizer = sgd(model)
    for _ in range(14):
        x = loop.batch()
        shift = torch.zeros_like(x)
        for _ in range(3):
            shift = shift.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(loss_of(model(x + shift)), shift)
            shift = shift + 0.01 * gradient.sign()
        optimizer.zero_grad()
        loss_of(model(x + shift.detach())).backward()
        loop.ends_step(model, shift=shift.detach())
        optimizer.step()


@program
def an_optimizer_that_calls_the_model(loop: Loop) -> None:
    model = loop.make(Net)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    for _ in range(6):
        x = loop.batch()

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(x))
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        loop.ends_step(model, loss=loss.detach())


@program
def transforms_in_the_loss(loop: Loop) -> None:
    model = loop.make(Net)
    optimizer = sgd(model)
    for _ in range(16):
        x = loop.batch()
        optimizer.zero_grad()
        scaled = {name: each * 1.01 for name, each in model.named_parameters()}
        output, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
        other = torch.func.functional_call(model, scaled, (x,))
        (loss_of(model(x)) + loss_of(other) + loss_of(output) + loss_of(tangent)).backward()
        loop.ends_step(model)
        optimizer.step()


# Actions of programs between steps, or between forward and backward.


@program
def an_evaluation_between_forward_and_backward(loop: Loop) -> None:
    def drop(block: Any, h: torch.Tensor) -> torch.Tensor:
        return functional.dropout(torch.sin(h), 0.2, block.training)

    model = loop.make(lambda: Net(lambda: Mlp(drop)))
    optimizer = sgd(model)
    for _ in range(16):
        optimizer.zero_grad()
        loss = loss_of(model(loop.batch()))
        model.eval()
        with torch.inference_mode():
            loop.run.check(evaluated=model(loop.batch(2, 8, WIDTH)).clone())
        model.train()
        loss.backward()
        loop.ends_step(model)
        optimizer.step()


class Cached(Mlp):
    """Keeps its inputs, while it is evaluated."""

    cache: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.sin(self.up(x))
        if not self.training:
            self.cache = h if self.cache is None else torch.cat([self.cache, h], 1)
            h = self.cache.mean(1, keepdim=True).expand_as(h)
        return x + self.down(torch.tanh(h))


@program
def a_generation_between_steps(loop: Loop) -> None:
    model = loop.make(lambda: Net(Cached))
    for _ in range(16):
        plain_step(loop, model)
        model.eval()
        with torch.inference_mode():
            for _ in range(3):
                output = model(loop.batch(4, 1, WIDTH))
        loop.run.check(generated=output.clone())
        model.train()
        for block in model.blocks:
            block.cache = None


@program
def copies_and_pickles_of_the_fitted_model(loop: Loop) -> None:
    model = loop.make(Net)
    optimizer = sgd(model)
    for step in range(16):
        optimizer.zero_grad()
        loss = loss_of(model(loop.batch()))
        if step in (2, 9):
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            others = torch.load(file, weights_only=False), copy.deepcopy(model)
            for other in others:
                loss_of(other(loop.batch())).backward()
                loop.run.check(of_copy=[each.grad for each in other.parameters()])
        loss.backward()
        loop.ends_step(model)
        optimizer.step()


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


class Returns(Net):
    def forward(self, x: torch.Tensor) -> Any:
        hidden = [self.first(x)]
        for block in self.blocks:
            hidden.append(block(hidden[-1]))
        return Output(self.head(hidden[-1]), tuple(hidden))


@program
def all_hidden_states_in_a_dataclass(loop: Loop) -> None:
    model = loop.make(Returns)
    optimizer = sgd(model)
    for _ in range(16):
        optimizer.zero_grad()
        output = model(loop.batch())
        (loss_of(output.logits) + sum(map(loss_of, output.hidden))).backward()
        loop.ends_step(model)
        optimizer.step()


# Models that change, or share.


@program
def half_of_the_blocks_are_frozen_for_a_while(loop: Loop) -> None:
    model = loop.make(Net)
    for step in range(40):
        if step in (10, 24):
            for each in (model.first, *model.blocks[:2]):
                each.requires_grad_(step == 24)
        plain_step(loop, model)


class Lora(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.down, self.up = layer, nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        self.to(layer.weight.device)
        nn.init.constant_(self.down.weight, 0.01)
        nn.init.constant_(self.up.weight, 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


@program
def adapters_that_come_later(loop: Loop) -> None:
    model = loop.make(Net)
    for step in range(40):
        for block in model.blocks:
            if step == 12:
                block.up = Lora(block.up)
            if step == 20:
                block.up.layer.requires_grad_(False)
        plain_step(loop, model)


@program
def blocks_that_are_replaced_from_the_first_step_on(loop: Loop) -> None:
    model = loop.make(Net)
    for step in range(36):
        if step in (1, 2, 9, 20):
            model.blocks[step % 4] = loop.run.module(Mlp)
        plain_step(loop, model)


@program
def blocks_that_come_and_go(loop: Loop) -> None:
    """Also while an output of theirs waits for its backward, and while gradients accumulate."""
    model = loop.make(Net)
    for step in range(40):
        if step in (3, 16):
            model.blocks.append(loop.run.module(Mlp))
        if step in (7, 24):
            del model.blocks[0]
        loss = model(loop.batch()).float().square().mean()
        if step in (5, 20):
            model.blocks[1] = loop.run.module(Mlp)
        loss.backward()
        loop.ends_step(model, loss=loss.detach())
        if step % 3 == 2:
            model.zero_grad()


@program
def hooks_that_come_later(loop: Loop) -> None:
    model = loop.make(Net)
    for step in range(24):
        if step == 5:
            model.blocks[1].register_forward_hook(lambda _module, _inputs, output: output * 0.5)
        if step == 8:
            model.blocks[2].register_full_backward_hook(lambda _module, given, _of_output: (given[0] * 2,))
        if step == 11:
            model.blocks[0].up.register_forward_pre_hook(lambda _module, inputs: (inputs[0] + 1,))
        if step == 14:
            model.blocks[3].down.weight.register_hook(lambda gradient: gradient * 3)
        plain_step(loop, model)


class Tied(Net):
    """One embedding for both ends, one weight of two blocks, and one block called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.blocks[3] = self.blocks[1]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.through(self.embedding(tokens)), self.embedding.weight)


@program
def weights_and_blocks_that_are_tied(loop: Loop) -> None:
    model = loop.make(Tied)
    for step in range(16):
        plain_step(loop, model, (torch.arange(32, device=loop.device).view(4, 8) + step) % 16)


class Streams(Mlp):
    def forward(self, one: Any, other: Any = None) -> Any:
        one = one + torch.sin(self.up(other * 0.9))
        return other + self.down(one * 0.8), one


class TwoStreams(Net):
    """Writes to the outputs of blocks, and gives them to the next ones."""

    def through(self, x: torch.Tensor) -> torch.Tensor:
        one, other = x, x * 1.0
        for number, block in enumerate(self.blocks):
            one, other = block(one, other)
            if number == 1:
                one += other
                other[:, :1] = 0
        return one + other


@program
def outputs_that_are_written_to_between_blocks(loop: Loop) -> None:
    loop.train(loop.make(lambda: TwoStreams(Streams)))


@pytest.mark.parametrize("name", PROGRAMS)
@each_way
def test_programs_have_the_bits_of_stock(device_under_test: Device, way: Way, name: str):
    changes = {"half_of_the_blocks_are_frozen_for_a_while"}  # in the end there is room for all
    outcome = assert_as_stock(PROGRAMS[name], device_under_test, way, is_computed_again=name not in changes)
    assert set(outcome.phases) != {"survey"}, outcome.reports


class Raises(Net):
    """A forward that raises between its blocks, or in one, if it is told to."""

    raises_behind = -1

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == self.raises_behind:
                self.raises_behind = -1
                raise ValueError("a bad batch")
        return x


def step_and_try_again(loop: Loop, model: Any, raises_behind: int) -> None:
    x = loop.batch()
    model.raises_behind = raises_behind
    with contextlib.suppress(ValueError):
        model(x)
    plain_step(loop, model, x)


@pytest.mark.parametrize("often", [lambda step: step % 3 == 1, lambda step: step in (12, 19)], ids=["often", "late"])
@each_way
def test_a_forward_that_raises_and_is_made_again_is_no_larger_step(
    device_under_test: Device, way: Way, often: Callable[[int], bool]
):
    """The blocks of the first try counted, so that the plan was for both, and too large for the memory."""

    def train(loop: Loop) -> None:
        model = loop.make(Raises)
        for step in range(24):
            step_and_try_again(loop, model, step % 4 if often(step) else -1)

    outcome = assert_as_stock(train, device_under_test, way)
    assert outcome.phases == ["settled"], outcome.reports
    assert not outcome.warnings


@pytest.mark.parametrize("keeps_all", [False, True])
@each_way
def test_an_output_of_a_part_that_is_kept_and_never_gone_back_through(
    device_under_test: Device, way: Way, keeps_all: bool
):
    """Its backward was awaited for ever, so that no step ended, and fit did nothing without a word."""

    def train(loop: Loop) -> None:
        model, kept = loop.make(Net), []
        for _ in range(24):
            x = loop.batch()
            if not keeps_all:
                del kept[:-1]
            kept.append(model.first(x))
            plain_step(loop, model, x)

    outcome = assert_as_stock(train, device_under_test, way)
    assert outcome.phases == ["settled"], outcome.reports
