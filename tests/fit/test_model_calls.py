"""Steps are followed by whichever module the loop calls: what contains the model, the model, or what is inside."""

import contextlib
import copy
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import torchoffload
from devices import Device
from fitted_models import options_of
from gradients import Run, assert_same_gradients, execute
from planned_blocks import WIDTH
from torchoffload._fit.choosing.dry_run import DryRunError

pytestmark = pytest.mark.devices("disk", "cuda")

ROOM, STEPS = 1 << 50, 24


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.exp(torch.sin(self.up(x))))


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = Backbone(), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(x)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x)).square().mean()


def whole(model: Model, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def by_a_method(model: Model, x: torch.Tensor) -> torch.Tensor:
    return model.loss(x)


def part_by_part(model: Model, x: torch.Tensor) -> torch.Tensor:
    return model.head(model.backbone(x)).square().mean()


def layer_by_layer(model: Model, x: torch.Tensor) -> torch.Tensor:
    for layer in model.backbone.layers:
        x = layer(x)
    return model.head(x).square().mean()


CALLS: dict[str, Callable[[Model, torch.Tensor], torch.Tensor]] = {
    each.__name__: each for each in (whole, by_a_method, part_by_part, layer_by_layer)
}


@pytest.mark.parametrize("move", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_a_step_is_followed_whatever_is_called(device_under_test: Device, call: str, move: bool):
    def program(run: Run):
        model = run.module(Model)
        options = options_of(device_under_test) if move else {"move": False}
        handle = None if run.stock else torchoffload.fit(model, ROOM, **options)
        was_planned, all_fits = False, False
        for _ in range(STEPS):
            loss = CALLS[call](model, run.tensor(4, 8, WIDTH))
            loss.backward()
            run.check(loss=loss.detach(), gradients={name: each.grad for name, each in model.named_parameters()})
            model.zero_grad()
            if handle is not None and handle.phase == "settled" and not was_planned:
                frontier = handle.frontier()
                least = int(frontier[0].memory_bytes / 0.96) + 1
                was_planned, all_fits = True, frontier[-1].memory_bytes <= least
                handle.replan(least)
        if handle is not None:
            assert was_planned, handle.report()
            assert handle.phase == "settled", handle.report()
            # Beside cuBLAS's workspaces of 64 MiB the plan that keeps everything may fit in this, too.
            assert handle.plan.moved_bytes + handle.plan.recompute_s > 0 or all_fits, handle.report()
            names = set(handle._driver.called.names)
            assert names >= {f"backbone.layers.{number}" for number in range(4)}
            handle.remove()
        run.check(hooks=sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()))

    if move:
        assert_same_gradients(program, device=device_under_test, min_moved_fraction=1e-9)
    else:
        stock = execute(program, device_under_test, stock=True)
        assert "exception" not in stock
        assert execute(program, device_under_test, stock=False) == stock


def test_calls_of_parts_before_one_backward_are_one_step(device_under_test: Device):
    model = Model().to(device_under_test.torch_device)
    begun: list[Any] = []
    with torchoffload.fit(model, ROOM, move=False, blocks="backbone.layers.*") as handle:
        begins = handle._driver.call_begins
        handle._driver.call_begins = lambda inputs: (begun.append(inputs), begins(inputs))[1]
        for _ in range(3):
            layer_by_layer(model, torch.randn(4, 8, WIDTH, device=device_under_test.torch_device)).backward()
        assert len(begun) == 3
        model(torch.randn(4, 8, WIDTH, device=device_under_test.torch_device))
        assert len(begun) == 4


def test_evaluation_and_calls_in_backward_are_no_steps(device_under_test: Device):
    model = Model().to(device_under_test.torch_device)
    x = torch.randn(4, 8, WIDTH, device=device_under_test.torch_device)
    begun: list[Any] = []
    with torchoffload.fit(model, ROOM, move=False, blocks="backbone.layers.*") as handle:
        handle._driver.call_begins = begun.append
        with torch.no_grad():
            part_by_part(model, x)
        y = x.clone().requires_grad_()
        y.register_hook(lambda gradient: gradient + 0 * model.backbone(gradient.detach()).detach())
        y.sum().backward()
    assert not begun


class Interrupted(Layer):
    interrupts = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.interrupts:
            raise KeyboardInterrupt
        return super().forward(x)


@pytest.mark.parametrize("call", ["whole", "part_by_part", "layer_by_layer"])
def test_steps_go_on_after_a_call_that_was_interrupted(device_under_test: Device, call: str):
    model = Model()
    model.backbone.layers = nn.ModuleList(Interrupted() for _ in range(4))
    model.to(device_under_test.torch_device)
    with torchoffload.fit(model, ROOM, move=False) as handle:
        model.backbone.layers[0].interrupts = True
        with pytest.raises(KeyboardInterrupt):
            CALLS[call](model, torch.randn(4, 8, WIDTH, device=device_under_test.torch_device))
        model.backbone.layers[0].interrupts = False
        for _ in range(STEPS):
            CALLS[call](model, torch.randn(4, 8, WIDTH, device=device_under_test.torch_device)).backward()
        assert handle.phase == "settled", handle.report()


@pytest.mark.parametrize("at", [0, 1, 2, 12])
@pytest.mark.parametrize("scouts", [False, True])
@pytest.mark.filterwarnings("error:torchoffload")
def test_an_interrupted_call_leaves_no_hooks_that_are_taken_for_the_users(
    device_under_test: Device, at: int, scouts: bool
):
    """The hooks on saved tensors of the block that was interrupted are still there as the next call begins."""
    model = nn.Sequential(*(Interrupted() for _ in range(4))).to(device_under_test.torch_device)
    with pytest.MonkeyPatch.context() as patch:
        if scouts:
            patch.setattr("torchoffload._fit.choosing.dry_run.dry_run", _no_dry_run)
        with torchoffload.fit(model, ROOM, recompute=False, **options_of(device_under_test)) as handle:
            for step in range(2 * STEPS):
                model[2].interrupts = step == at
                with pytest.raises(KeyboardInterrupt) if step == at else contextlib.nullcontext():
                    model(torch.randn(4, 8, WIDTH, device=device_under_test.torch_device)).square().mean().backward()
            assert handle.phase == "settled", handle.report()
            assert "others have hooks" not in handle.report()


def _no_dry_run(*_arguments: Any) -> Any:
    raise DryRunError("the test wants none")


@pytest.fixture
def alone():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.devices("disk")
@pytest.mark.parametrize("fits_inner", [False, True])
def test_the_model_may_be_called_by_way_of_ddp(alone, device_under_test: Device, fits_inner: bool):
    torch.manual_seed(0)
    model = Model()
    stock = copy.deepcopy(model)
    ddp = DistributedDataParallel(model)
    with torchoffload.fit(model if fits_inner else ddp, ROOM, move=False) as handle:
        for step in range(STEPS):
            x = torch.randn(4, 8, WIDTH, generator=torch.Generator().manual_seed(step))
            for each in (ddp, stock):
                each.zero_grad()
                each(x).backward()
            assert all(
                torch.equal(one.grad, other.grad)
                for one, other in zip(model.parameters(), stock.parameters(), strict=True)
            )
        assert handle.phase == "settled"
        assert set(handle._driver.called.names) >= {f"backbone.layers.{number}" for number in range(4)}


@pytest.mark.devices("disk")
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_model_that_is_compiled_whole_after_fit_is_told_of_once(device_under_test: Device, fullgraph: bool):
    torch._dynamo.reset()
    model = Model()
    with torchoffload.fit(model, ROOM, move=False) as handle:
        compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
        with pytest.warns(UserWarning, match="a call of Model became a part of a region of torch.compile"):
            compiled(torch.randn(4, 8, WIDTH)).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            compiled(torch.randn(4, 8, WIDTH)).backward()
        assert torch._dynamo.utils.counters["graph_break"] == {}
        assert handle.phase == "survey"
    torch._dynamo.reset()


@pytest.mark.devices("disk")
@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_that_was_compiled_whole_is_one_block(device_under_test: Device, in_place: bool):
    torch._dynamo.reset()
    torch.manual_seed(0)
    inner = Model()
    stock = copy.deepcopy(inner)
    if in_place:
        inner.compile(backend="aot_eager")
        stock.compile(backend="aot_eager")
        model, other = inner, stock
    else:
        model, other = torch.compile(inner, backend="aot_eager"), torch.compile(stock, backend="aot_eager")
    with torchoffload.fit(model, ROOM, move=False) as handle:
        for step in range(STEPS):
            x = torch.randn(4, 8, WIDTH, generator=torch.Generator().manual_seed(step))
            for each in (model, other):
                each.zero_grad()
                each(x).backward()
            assert all(
                torch.equal(one.grad, two.grad) for one, two in zip(inner.parameters(), stock.parameters(), strict=True)
            )
        assert len(handle._driver.names) == 1
        assert handle.phase == "settled", handle.report()
    torch._dynamo.reset()


def test_remove_takes_all_hooks_away_and_a_copy_has_none_that_work(device_under_test: Device):
    model = Model().to(device_under_test.torch_device)
    handle = torchoffload.fit(model, ROOM, move=False)
    twin = copy.deepcopy(model)
    x = torch.randn(4, 8, WIDTH, device=device_under_test.torch_device)
    handle._driver.call_begins = types.MethodType(lambda *_: pytest.fail("it is told of a copy"), handle)
    part_by_part(twin, x).backward()
    handle.remove()
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
