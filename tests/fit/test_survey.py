"""What a survey says of a step, and what several ranks say of theirs together."""

import copy
import dataclasses
import gc
import weakref

import pytest
import torch
from torch import nn

import torchoffload
from fitted_models import Wide, fitted_on
from planned_blocks import BLOCKS, WIDTH
from simulated_allocator import SimulatedAllocator
from torchoffload._fit.choosing.structure import find_blocks
from torchoffload._fit.model import fitted_model
from torchoffload._fit.model.fitted_model import FittedModel
from torchoffload._fit.survey.measured import HostTimes, Measured, MeasuredKind, together


class Shares(nn.Module):
    """What its blocks are given, the module before them is given as well."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Identity()
        self.blocks = nn.ModuleList(BLOCKS["transformer"]() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("count", [2, 3])
def test_the_input_of_a_block_counts_also_where_another_module_was_given_it(count: int):
    model = Shares()
    model.blocks = model.blocks[:count]
    with torchoffload.fit(model, 1 << 50, move=False) as handle:
        for _ in range(3):
            model(torch.randn(4, 8, WIDTH, requires_grad=True)).backward()
        step = handle._driver.step
        assert step is not None
        of_blocks = [step.kinds[call.kind] for call in step.calls][-1]
        assert of_blocks.ways[0].input_bytes == 4 * 8 * WIDTH * 4


class Normed(nn.Module):
    """The output of its norm is not saved, and the statistics are, which the same operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.norm(self.layer(x)))


def test_a_block_that_computes_nothing_again_keeps_what_autograd_saves():
    model = nn.Sequential(*(Normed() for _ in range(3)))
    with torchoffload.fit(model, 1 << 50, move=False) as handle:
        for _ in range(3):
            model(torch.randn(4, 8, WIDTH, requires_grad=True)).square().mean().backward()
        driver = handle._driver
        assert driver.step is not None
        [kind] = driver.step.kinds
        [known] = driver._kinds.values()
        [plain] = [way for way in kind.ways if way.is_plain]
    assert kind.kept_bytes(plain) == known.all_saved_bytes
    # The input, the linear layer's output, relu's result, and two statistics for each of 8 channels.
    assert known.all_saved_bytes == 4 * (3 * 4 * 8 * WIDTH + 2 * 8)


def test_a_call_on_another_thread_that_returns_while_a_plan_is_made_is_left_out(monkeypatch: pytest.MonkeyPatch):
    model, late = nn.Sequential(*(Normed() for _ in range(3))), []
    note_surveyed, surveyed_step = FittedModel._note_surveyed, fitted_model.surveyed_step

    def beside_an_open_call(self, survey, last):
        late.append(copy.copy(survey.calls[-1]))
        late[0].returned = None
        survey.calls.append(late[0])
        note_surveyed(self, survey, last)

    def while_it_returns(survey, *more):
        found = surveyed_step(survey, *more)
        late[0].returned = survey.calls[0].returned
        return found

    monkeypatch.setattr(FittedModel, "_note_surveyed", beside_an_open_call)
    monkeypatch.setattr(fitted_model, "surveyed_step", while_it_returns)
    with torchoffload.fit(model, 1 << 50, move=False) as handle:
        for _ in range(3):
            model(torch.randn(4, 8, WIDTH, requires_grad=True)).square().mean().backward()
        assert late
        assert len(handle._driver.step.calls) == len(handle._driver.called.modules) == 3


def test_blocks_are_what_is_repeated_and_what_stands_beside_it():
    model = Shares()
    assert find_blocks(model) == [model.before, *model.blocks]
    alone = nn.Sequential(nn.Linear(4, 4))
    assert find_blocks(alone) == [alone]


KIND = MeasuredKind(
    structure="a", obstacle=None, durations_ns=(5, 7), sizes=(10, 20), forward_s=1.0, backward_s=2.0,
    host=HostTimes(0.1, 0.2), input_bytes=30,
)  # fmt: skip
MEASURED = Measured(
    kinds=(KIND,), calls=((0, 100, 200), (0, 110, None)), times_s=(0.1, 0.2, 0.3), loss_bytes=50, other_bytes=60,
    fixed={"weights": 5},
)  # fmt: skip


def test_ranks_plan_for_the_largest_of_their_numbers():
    other_kind = dataclasses.replace(
        KIND, durations_ns=(6, 1), sizes=(1, 40), forward_s=0.5, backward_s=3.0, host=HostTimes(0.3, 0.1),
        input_bytes=7, obstacle="it may not",
    )  # fmt: skip
    other = dataclasses.replace(
        MEASURED, kinds=(other_kind,), calls=((0, 90, None), (0, 120, 5)), times_s=(0.2, 0.1, 0.4), loss_bytes=70,
        other_bytes=6, fixed={"weights": 8},
    )  # fmt: skip
    both = together([MEASURED, other])
    assert both.kinds[0] == MeasuredKind(
        structure="a", obstacle="it may not", durations_ns=(6, 7), sizes=(10, 40), forward_s=1.0, backward_s=3.0,
        host=HostTimes(0.3, 0.2), input_bytes=30,
    )  # fmt: skip
    assert both.calls == ((0, 100, 200), (0, 120, 5))
    assert (both.times_s, both.loss_bytes, both.other_bytes) == ((0.2, 0.2, 0.4), 70, 60)
    assert both.fixed == {"weights": 8}


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(MEASURED, kinds=(dataclasses.replace(KIND, structure="b"),)),
        dataclasses.replace(MEASURED, calls=MEASURED.calls[:1]),
    ],
)
def test_ranks_with_different_blocks_are_told_so(other: Measured):
    with pytest.raises(RuntimeError, match="group=None"):
        together([MEASURED, other])


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_an_operator_that_raises_while_its_block_is_surveyed_is_an_error_as_ever(steps: int):
    """PyTorch calls operators without the GIL, also where an exception passes what was noted of their times."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    with torchoffload.fit(model, 1 << 50, move=False):
        for _ in range(steps):
            model(torch.randn(4, WIDTH)).sum().backward()
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.randn(4, WIDTH + 1))
        for _ in range(4):
            model(torch.randn(4, WIDTH)).sum().backward()


@pytest.mark.parametrize("room", [100, 300, 900])
def test_a_block_that_runs_out_of_memory_while_it_is_surveyed_is_an_error(room: int):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    with SimulatedAllocator(1.0, room << 10) as allocator, torchoffload.fit(model, 1 << 50, move=False):
        with pytest.raises(torch.OutOfMemoryError):
            model(torch.randn(8 * room, WIDTH))
        assert allocator.ooms > 0


@pytest.mark.parametrize("step", range(14))
def test_a_block_may_be_replaced_between_any_two_steps(step: int):
    """While the model is surveyed, while plans are tried, and once a plan is settled on: the new one has its place."""
    model = nn.Sequential(*(Normed() for _ in range(4)))
    with SimulatedAllocator() as allocator, fitted_on(model, allocator, 1 << 40) as handle:
        for number in range(30):
            if number == step:
                model[1] = Normed()
            model(torch.randn(4, 8, WIDTH, requires_grad=True)).square().mean().backward()
        assert handle.phase == "settled", handle.report()
        assert dict(handle._driver.names) == {block: str(number) for number, block in enumerate(model)}
        assert "blocks were replaced or deleted (1)" in handle.report()
        assert "left alone" not in handle.report()


class Descends(Wide):
    """Asks for a gradient in its forward, as an energy-based layer does."""

    kind = "create_graph"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = x if self.kind == "create_graph" else x.detach().requires_grad_()
        energy = self.down(torch.tanh(self.up(start))).sum()
        match self.kind:
            case "create_graph":
                slope = torch.autograd.grad(energy, start, create_graph=True)[0]
            case "no graph":
                slope = torch.autograd.grad(energy, start)[0]
            case _:
                torch.autograd.backward(energy, inputs=[start])
                slope = start.grad
        return super().forward(x) - 0.1 * slope


class Descending(nn.Module):
    def __init__(self, kind: str, *, in_all: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Descends(8, 1) if in_all or number == 0 else Wide(8, 1) for number in range(6))
        self.blocks[0].kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.filterwarnings("error:torchoffload")
@pytest.mark.parametrize("in_all", [False, True])
@pytest.mark.parametrize("kind", ["create_graph", "no graph", "backward"])
def test_a_gradient_inside_of_a_block_ends_no_step(kind: str, in_all: bool):
    """It is no backward of the step: all later blocks are surveyed, and planned, and the step ends behind them."""
    model, finished = Descending(kind, in_all=in_all), []
    with torchoffload.fit(model, 1 << 50, move=False, blocks="blocks.*") as handle:
        driver = handle._driver
        note, driver.step_finished = driver.step_finished, lambda step: (finished.append(step), note(step))
        for _ in range(20):
            model(torch.randn(16, 8, WIDTH)).backward()
        assert handle.phase == "settled", handle.report()
        assert [number for number, name in enumerate(driver.names.values()) if name in driver.called.names] == [
            *range(6)
        ]
        assert {each.block_count for each in finished} == {6}
        assert {each.blocks_bytes for each in finished} == {6 * 16 * 8 * WIDTH * 4}
        assert not driver.step.late


def test_what_a_gradient_inside_of_a_block_was_given_is_freed_without_the_garbage_collector():
    model, alive = Descending("create_graph", in_all=True), []
    for block in model.blocks:
        block.register_forward_hook(lambda _module, args, output: alive.extend(map(weakref.ref, (*args, output))))
    with torchoffload.fit(model, 1 << 50, move=False, blocks="blocks.*"):
        gc.collect()
        gc.disable()
        try:
            for _ in range(6):
                model(torch.randn(16, 8, WIDTH)).backward()
            assert not any(each() is not None for each in alive)
        finally:
            gc.enable()
