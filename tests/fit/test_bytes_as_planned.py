"""No plan takes more bytes than it is predicted to, however late copies come, and whatever the loop calls."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import torchoffload
from devices import Device
from fitted_models import Adversaries, Wide
from planned_blocks import WIDTH
from torchoffload._fit.machine.link import LinkRates
from torchoffload._fit.model.turns import windows_of
from torchoffload._fit.plan.step import Step, least_plan, plan_step, plan_steps
from torchoffload._fit.plan.trials import Trial

simulated = pytest.importorskip("simulated", reason="the simulated device is in the test build alone")

pytestmark = pytest.mark.devices("simulated-late", "simulated-early")

RATES = (3e7, 3e8)  # of the link, in bytes per second
PARTS = (0.0, 0.1, 0.3, 0.6)
MOST_STEPS = 40


class Whole(nn.Module):
    """Blocks that the loop calls through the model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Wide(3, 2) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


class Parts(Whole):
    """Blocks that the loop calls by themselves: each call has a tape of its own."""

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


class Descends(Wide):
    """Asks for a gradient in its forward, whose graph is a part of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(self.down(torch.tanh(self.up(x))).sum(), x, create_graph=True)
        return super().forward(x) - 0.1 * slope


class Descending(Whole):
    """The blocks of these numbers ask for gradients."""

    def __init__(self, *which: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Descends(3, 2) if each in which else Wide(3, 2) for each in range(6)))


class Forces(Whole):
    """Asks for a gradient through all of its blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        energy = self.blocks(x).square().mean()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy + force.square().mean()


class SmallFirst(Whole):
    """A model that is called with a part of the batch before the whole."""

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self(x[:16]) + self(x)


class MicroBatches(nn.Module):
    """Micro-batches whose backwards come in the order of their forwards, the first one behind ``ahead`` forwards.

    ``shapes``: of the blocks. ``calls``: what the loop calls for each micro-batch: the model, its blocks one by one, or
    the second half of them one by one.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], calls: Sequence[str], ahead: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Wide(*shape) for shape in shapes))
        self.calls, self.ahead = calls, ahead

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)

    def loss(self, called: str, x: torch.Tensor) -> torch.Tensor:
        if called == "model":
            return self(x).square().mean()
        for block in list(self.blocks)[len(self.blocks) // 2 if called == "half" else 0 :]:
            x = block(x)
        return x.square().mean()

    def step(self, x: torch.Tensor) -> torch.Tensor:
        waiting: list[torch.Tensor] = []
        for number, called in enumerate(self.calls):
            if len(waiting) == self.ahead:
                waiting.pop(0).backward()
            waiting.append(self.loss(called, x * (number + 1)))
        while len(waiting) > 1:
            waiting.pop(0).backward()
        return waiting.pop()


class Retains(nn.Module):
    """Several backwards through the same blocks: ``heads``, whether heads are blocks, too, and how many there are."""

    def __init__(self, heads: Sequence[type[nn.Module]]) -> None:
        super().__init__()
        self.body = nn.Sequential(*(Wide(3, 2) for _ in range(4)))
        self.heads = nn.ModuleList(Wide(3, 2) if head is Wide else head() for head in heads)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        *others, last = [head(y).square().mean() for head in self.heads]
        for loss in others:
            loss.backward(retain_graph=True)
        return last


class Drops(Wide):
    """With dropout and batch normalization, whose results differ each time."""

    def __init__(self, times: int, depth: int) -> None:
        super().__init__(times, depth)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(torch.tanh(self.norm(super().forward(x))), 0.1)


class Keeps(Whole):
    """Its only backward retains the graph, as some loops ask for without need."""

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().step(x)
        loss.backward(retain_graph=True)
        return loss.detach().requires_grad_()


class Stages(nn.Module):
    """Two stages of a pipeline that the loop calls apart: micro-batches have their backwards in the second one alone.

    That of the first stage follows, behind the next micro-batch's forward there.
    """

    def __init__(self, first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]], count: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(*(Wide(*shape) for shape in shapes)) for shapes in (first, second))
        self.count = count

    def step(self, x: torch.Tensor) -> torch.Tensor:
        made = [self.first(x), self.first(x * 2)]
        given = [each.detach().requires_grad_() for each in made]
        for number in range(self.count):
            self.second(given[number]).square().mean().backward()
            if len(made) < self.count:
                made.append(self.first(x * (len(made) + 1)))
                given.append(made[-1].detach().requires_grad_())
            gradient = given[number].grad
            if number == self.count - 1:
                break
            made[number].backward(gradient)
            made[number] = given[number] = torch.empty(0)
        assert gradient is not None
        return (made[-1] * gradient).sum()


SMALL = [(3, 1)]


@contextlib.contextmanager
def settled(
    model: nn.Module, simulation: Any, monkeypatch: pytest.MonkeyPatch, step: Callable[[], object]
) -> Iterator[Any]:
    """Fit the model on a simulated device, take steps until a plan has settled, and yield the driver."""
    meter = simulated.SimulationMeter(simulation)
    monkeypatch.setattr("torchoffload._fit.model.fit.meter_for", lambda _device: meter)
    rates = LinkRates(2e8, 2e8, 1e-5)
    monkeypatch.setattr("torchoffload._fit.model.fitted_model.measure_link", lambda *_: rates)
    with torchoffload.fit(model, 1 << 40, min_offload_size=0) as handle:
        for _ in range(MOST_STEPS):
            step()
            if handle.phase == "settled":
                break
        assert handle.phase == "settled"
        yield handle._driver


def train(model: Any) -> None:
    model.step(torch.randn(64, 8, WIDTH, requires_grad=True)).backward()
    model.zero_grad()


def most_bytes_of(surveyed: Step) -> int:
    """The most bytes of a step that keeps all that it saves."""
    most = plan_step(dataclasses.replace(surveyed, may_move=False), 1 << 60)
    assert most is not None
    return most.peak_bytes


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(Whole, id="the model"),
        pytest.param(SmallFirst, id="a small call before a large one"),
        pytest.param(Parts, id="its parts"),
        pytest.param(lambda: Descending(0, 3), id="gradients inside of the first block and another"),
        pytest.param(lambda: Descending(1, 2, 4), id="gradients inside of blocks"),
        pytest.param(Forces, id="a gradient at the end of forward"),
        pytest.param(Adversaries, id="a generator before its critic"),
        pytest.param(lambda: Adversaries(order="judge first"), id="a critic before its generator"),
        pytest.param(lambda: Adversaries(views=3), id="a critic that judges three times"),
        pytest.param(lambda: Adversaries(is_one=True), id="both through one module"),
        pytest.param(lambda: MicroBatches([(6, 4), (6, 4), *SMALL * 3], ["model"] * 3, 2), id="by turns"),
        pytest.param(lambda: MicroBatches([(3, 4), *SMALL * 5], ["model"] * 3, 2), id="by turns, small ends"),
        pytest.param(lambda: MicroBatches([(3, 4), *SMALL * 5], ["model"] * 4, 2), id="by turns, for longer"),
        pytest.param(lambda: MicroBatches([(6, 4), (6, 4), (3, 2)], ["parts"] * 2, 2), id="first in, first out"),
        pytest.param(lambda: MicroBatches([(1, 1), (3, 1)], ["model", "half", "model"], 3), id="late and silent"),
        pytest.param(
            lambda: MicroBatches([(2, 2), (9, 4), (1, 1)], ["half", "half", "half", "model"], 4), id="late alone moves"
        ),
        pytest.param(lambda: Retains([nn.Identity, nn.Identity]), id="two losses of one output"),
        pytest.param(lambda: Retains([Wide, Wide, Wide]), id="three heads, one after the other"),
        pytest.param(Keeps, id="one backward that retains its graph"),
        pytest.param(lambda: Stages([(9, 4)] * 2, [(1, 1)] * 2, 4), id="stages, large and small"),
    ],
)
def test_a_step_takes_no_more_than_planned(
    make: Callable[[], Any], device_under_test: Device, monkeypatch: pytest.MonkeyPatch
):
    with device_under_test.scope() as simulation:
        torch.manual_seed(0)
        model = make()
        with settled(model, simulation, monkeypatch, lambda: train(model)) as driver:
            surveyed = driver.step
            least_bytes, most_bytes = least_plan(surveyed).peak_bytes, most_bytes_of(surveyed)
            moved_bytes = 0
            # At the highest rate a plan moves all that may move.
            all_rates = (*RATES, 3e10) if isinstance(model, Retains | Keeps) else RATES
            for rate, part in itertools.product(all_rates, PARTS):
                planned_for = dataclasses.replace(surveyed, out_bytes_per_s=rate, in_bytes_per_s=rate)
                memory_bytes = int(least_bytes + part * (most_bytes - least_bytes))
                for plan in plan_steps([planned_for.of_blocks], memory_bytes):
                    trial = Trial(planned_for, plan)
                    driver._follow_settled(trial, trial.peak_bytes)
                    moved_bytes += plan.moved_bytes
                    train(model)  # the order of the tapes is learned
                    simulation.take_peak_bytes()
                    train(model)
                    assert driver._followed.plan.calls == plan.calls
                    assert simulation.take_peak_bytes() <= trial.peak_bytes, (rate, part)
            assert moved_bytes > 0


def assert_bytes_as_planned(driver: Any, surveyed: Step, part: float, step: Callable[[], int], steps: int) -> None:
    """Assert that none of so many steps takes more than a plan in so much more than the least memory says."""
    least_bytes = least_plan(surveyed).peak_bytes
    plan = plan_step(surveyed, least_bytes + int(part * least_bytes))
    assert plan is not None
    trial = Trial(surveyed, plan)
    driver._follow_settled(trial, trial.peak_bytes)
    step()  # the order of the tapes is learned
    assert max(step() for _ in range(steps)) <= trial.peak_bytes
    assert driver._followed.plan.calls == plan.calls


def test_more_micro_batches_than_in_the_surveyed_step_take_no_more_than_planned(
    device_under_test: Device, monkeypatch: pytest.MonkeyPatch
):
    counts = itertools.cycle([2, 3, 4, 3, 5])
    with device_under_test.scope() as simulation:
        torch.manual_seed(0)
        model = MicroBatches([(6, 4), (1, 1), (3, 2)], [], 2)

        def step() -> int:
            model.calls = ["model"] * next(counts)
            simulation.take_peak_bytes()
            train(model)
            return simulation.take_peak_bytes()

        with settled(model, simulation, monkeypatch, step) as driver:
            assert len(list(itertools.chain(driver.step.calls, *driver.step.between))) < 5 * 3
            for part in PARTS[1:]:
                assert_bytes_as_planned(driver, driver.step, part, step, 5)


def test_a_plan_for_a_retained_graph_reloads_ahead_as_far_as_there_is_room(
    device_under_test: Device, monkeypatch: pytest.MonkeyPatch
):
    with device_under_test.scope() as simulation:
        torch.manual_seed(0)
        model = Retains([nn.Identity, nn.Identity])
        with settled(model, simulation, monkeypatch, lambda: train(model)) as driver:
            surveyed = dataclasses.replace(driver.step, out_bytes_per_s=3e10, in_bytes_per_s=3e10)
            least_bytes, most_bytes = least_plan(surveyed).peak_bytes, most_bytes_of(surveyed)
            plan = plan_step(surveyed, least_bytes + int(0.9 * (most_bytes - least_bytes)))
            assert plan is not None
            planned_bytes = [call.reload_bytes for call in plan.calls]
            assert max(planned_bytes) > 0
            room = surveyed.room_ahead(plan)
            room -= min(plan.loss_window_bytes, room // 2)
            windows = windows_of(Trial(surveyed, plan), driver.called.modules)
            given_bytes = [each.reload_bytes for calls in windows.values() for each in calls[:-1]]
            assert sorted(given_bytes) == sorted(min(room, nbytes) for nbytes in planned_bytes)
            assert max(given_bytes) > 0


class TakesTurns(nn.Module):
    """Every second step has more backwards than others: through a graph that is retained, or through later calls."""

    def __init__(self, *, retains: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(*(Wide(3, 2) for _ in range(4)))
        self.retains, self.steps = retains, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        first = self(x)
        if self.retains and self.steps % 2:
            first.backward(retain_graph=True)
        for number in range(0 if self.retains else 1 + self.steps % 2):
            self(x * (number + 2)).backward()
        return first


@pytest.mark.parametrize("retains", [True, False])
def test_steps_that_take_turns_take_no_more_than_planned_for_those_with_more_backwards(
    retains: bool, device_under_test: Device, monkeypatch: pytest.MonkeyPatch
):
    with device_under_test.scope() as simulation:
        torch.manual_seed(0)
        model = TakesTurns(retains=retains)

        def step() -> int:
            simulation.take_peak_bytes()
            train(model)
            return simulation.take_peak_bytes()

        with settled(model, simulation, monkeypatch, step) as driver:
            surveyed = driver.step
            assert surveyed.late
            assert surveyed.between_bytes > 0
            for rate, part in itertools.product(RATES, PARTS):
                planned_for = dataclasses.replace(surveyed, out_bytes_per_s=rate, in_bytes_per_s=rate)
                assert_bytes_as_planned(driver, planned_for, part, step, 4)


def test_a_retained_graph_takes_one_input_more_in_the_least_memory(
    device_under_test: Device, monkeypatch: pytest.MonkeyPatch
):
    """A replay drops the storages that it reloaded, and the values that it made, though the nodes drop nothing."""
    peaks = []
    for retains in (False, True):
        with device_under_test.scope() as simulation:
            torch.manual_seed(0)
            model = Whole()

            def step(model: Whole = model, retains: bool = retains) -> None:
                model.step(torch.randn(64, 8, WIDTH, requires_grad=True)).backward(retain_graph=retains)
                model.zero_grad()

            with settled(model, simulation, monkeypatch, step) as driver:
                peaks.append(least_plan(driver.step).peak_bytes)
    assert peaks[1] <= peaks[0] + 64 * 8 * WIDTH * 4


@pytest.mark.parametrize("part", PARTS[1:])
def test_a_graph_that_is_retained_without_a_plan_for_it_holds_no_values_of_blocks_that_are_computed_again(
    part: float, device_under_test: Device, monkeypatch: pytest.MonkeyPatch
):
    with device_under_test.scope() as simulation:
        torch.manual_seed(0)
        model = Whole()
        model.blocks = nn.Sequential(*(Drops(3, 2) for _ in range(6)))

        def gradients(*, retains: bool) -> list[torch.Tensor]:
            torch.manual_seed(1)
            loss = model.step(torch.randn(64, 8, WIDTH, requires_grad=True))
            if retains:
                loss.backward(retain_graph=True)
            loss.backward()
            found = [each.grad.clone() for each in model.parameters() if each.grad is not None]
            model.zero_grad()
            return found

        stock = gradients(retains=True)
        with settled(model, simulation, monkeypatch, lambda: train(model)) as driver:
            surveyed = driver.step
            again = dataclasses.replace(
                surveyed,
                may_move=False,
                kinds=tuple(
                    dataclasses.replace(kind, ways=tuple(way for way in kind.ways if not way.is_plain))
                    for kind in surveyed.kinds
                ),
            )
            least_bytes = least_plan(again).peak_bytes
            plan = plan_step(again, int(least_bytes * (1 + part)))
            assert plan is not None
            assert plan.kept_bytes > 0
            driver._follow_settled(Trial(again, plan), plan.peak_bytes)
            gradients(retains=False)
            simulation.take_peak_bytes()
            found = gradients(retains=True)
            assert simulation.take_peak_bytes() <= plan.peak_bytes + 64 * 8 * WIDTH * 4
        assert all(torch.equal(a, b) for a, b in zip(found, stock, strict=True))
