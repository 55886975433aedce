"""compile_options(memory=...): what a graph keeps, moves and computes again, as planned when it is compiled."""

import contextlib
import copy
import functools
import json
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._guards import CompileContext, CompileId, compile_context

import torchoffload
from devices import Device
from gradients import Run, assert_same_gradients
from models import Block, Residual, TinyGpt, tokens_and_labels, update
from torchoffload._compile import joint_plan, planned
from torchoffload._compile.joint_graph import JointGraph
from torchoffload._compile.joint_plan import GraphPlan, Room, plan_graph
from torchoffload._compile.planned import Lookup, Memory, PlanNotes, PlansOfCachedGraph, note_lookup
from torchoffload._fit.machine.link import LinkRates
from torchoffload._fit.plan.step import plan_step

PROGRAM = Path(__file__).parent.parent / "support" / "planned_graph_program.py"
ANY_MEMORY = 1 << 40
SLOW_LINK, FAST_LINK = 1e3, 1e15
pytestmark = [pytest.mark.slow]
on_devices = pytest.mark.devices("disk", "simulated-late", "cuda")


@pytest.fixture(autouse=True)
def _compiled_here() -> Iterator[None]:
    """Neither a graph nor a plan of another test is found again."""
    planned._noted.clear()
    with torch._functorch.config.patch(enable_autograd_cache=False), torch._inductor.config.patch(fx_graph_cache=False):
        yield


def compiled(
    function: Callable, backend: str = "aot_eager", *, link: float | None = SLOW_LINK, **memory: Any
) -> Callable:
    """`function` compiled anew; by a plan if `memory=` is given."""
    from functorch.compile import nop
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    if "memory" in memory:
        memory["link_bytes_per_s"] = link
    if backend == "inductor":
        return torch.compile(function, options=torchoffload.compile_options(**memory))
    partition_fn = functools.partial(torchoffload.partition_fn, **memory)
    return torch.compile(function, backend=aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=partition_fn))


def plans() -> list[GraphPlan]:
    """The plans that were made since the test began, in the order of compiling."""
    return [plan for notes in planned._noted.values() for plan in notes.plans]


def again_count(plan: GraphPlan) -> int:
    return sum(len(piece.again) for piece in plan.pieces)


def gpt(depth: int = 3) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = TinyGpt(depth)
    drawn = torch.randint(64, (4, 33))
    return model, (drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())


def step_of(model: nn.Module, *data: torch.Tensor, backend: str = "aot_eager", **memory: Any) -> tuple[float, list]:
    """The loss and the gradients of one compiled step from the same random numbers."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    loss = compiled(model, backend, **memory)(*data)
    loss.backward()
    return loss.item(), [parameter.grad for parameter in model.parameters()]


def stock_peak_bytes(model: nn.Module, *data: torch.Tensor) -> int:
    """What the stock plan takes, as it is predicted."""
    step_of(model, *data, memory=ANY_MEMORY)
    (plan,) = plans()
    planned._noted.clear()
    return plan.stock_peak_bytes


# ---- plans ----


def test_with_enough_memory_the_plan_is_pytorchs_own():
    model, data = gpt()
    stock = step_of(model, *data)
    planned_step = step_of(model, *data, memory=ANY_MEMORY)
    (plan,) = plans()
    assert plan.saved is None
    assert not plan.releases
    assert again_count(plan) == 0
    assert plan.predicted_peak_bytes == plan.stock_peak_bytes
    torch.testing.assert_close(planned_step, stock, rtol=0, atol=0)


def test_in_less_memory_blocks_are_computed_again():
    model, data = gpt()
    stock = step_of(model, *data)
    memory = int(0.75 * stock_peak_bytes(model, *data))
    loss, gradients = step_of(model, *data, memory=memory)
    plan = plans()[-1]
    assert plan.fits
    assert plan.predicted_peak_bytes <= memory < plan.stock_peak_bytes
    assert plan.predicted_s > plan.stock_s
    assert again_count(plan) > 0
    assert loss == stock[0]
    torch.testing.assert_close(gradients, stock[1])


def saved_bytes(loss: torch.Tensor, model: nn.Module, data: tuple[torch.Tensor, ...]) -> int:
    """The bytes of the memory that a compiled forward has saved, without its inputs."""
    inputs = {each.untyped_storage()._cdata for each in (*model.parameters(), *model.buffers(), *data)}
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in loss.grad_fn.saved_tensors}
    return sum(nbytes for storage, nbytes in storages.items() if storage not in inputs)


@pytest.mark.parametrize("share", [1.0, 0.7])
def test_the_predicted_bytes_are_those_that_the_graph_saves(share: float):
    model, data = gpt()
    memory = int(share * stock_peak_bytes(model, *data))
    loss = compiled(model, memory=memory)(*data)
    assert saved_bytes(loss, model, data) == plans()[-1].held_bytes


@pytest.fixture(scope="module")
def joint() -> JointGraph:
    """The joint graph of a small language model."""
    graphs = []
    with pytest.MonkeyPatch.context() as patch:
        plan = joint_plan.plan_graph
        patch.setattr(joint_plan, "plan_graph", lambda joint, room: graphs.append(joint) or plan(joint, room))
        model, data = gpt()
        step_of(model, *data, memory=ANY_MEMORY)
    return graphs[0]


@pytest.mark.parametrize(("rate", "graphs"), [(None, 1), (1e9, 1), (1e10, 3)])
def test_more_memory_is_never_slower(joint: JointGraph, rate: float | None, graphs: int):
    """And the peak is within the memory wherever that of any plan is."""
    link = None if rate is None else LinkRates(rate, rate, 1e-6)
    room = functools.partial(Room, graphs=graphs, link=link, least_moved_bytes=256, reload_window_bytes=0)
    stock = plan_graph(joint, room(ANY_MEMORY))
    least = plan_graph(joint, room(1))
    assert not least.fits
    span = stock.predicted_peak_bytes - least.predicted_peak_bytes
    found = [plan_graph(joint, room(least.predicted_peak_bytes + span * part // 8)) for part in range(10)]
    assert all(plan.fits for plan in found)
    for part, plan in enumerate(found):
        assert plan.predicted_peak_bytes <= least.predicted_peak_bytes + span * part // 8
    times = [plan.predicted_s for plan in found]
    assert times == sorted(times, reverse=True)
    assert times[-1] == stock.predicted_s == stock.stock_s
    assert len(set(times)) > 3
    assert bool(least.releases) == (link is not None)


@pytest.mark.parametrize("rate", [None, 1e8, 1e9, 1e12])
def test_no_plan_takes_less_time_than_its_bound(joint: JointGraph, rate: float | None):
    """By which the search ends before it has reckoned all plans."""
    link = None if rate is None else LinkRates(rate, rate, 1e-6)
    planner = joint_plan._Planner(joint, Room(ANY_MEMORY, link=link, least_moved_bytes=256, sets_reload_window=True))
    stock = plan_step(planner._step, ANY_MEMORY)
    assert stock is not None
    bounds = []
    for plan in planner._others(stock):
        candidates = list(planner._candidates(plan))
        assert candidates
        bounds += [planner._least_s(plan) / each.step_s for each in candidates]
    assert max(bounds) <= 1
    assert max(bounds) > 0.9  # else it would end no search


def test_equal_blocks_are_planned_once(monkeypatch: pytest.MonkeyPatch):
    planned_kinds = []
    frontier = joint_plan.core.block_frontier

    class Counted:
        def __getattr__(self, name: str) -> Any:
            return getattr(torchoffload._core.core, name)

        @staticmethod
        def block_frontier(groups: list, draws: list) -> Any:
            planned_kinds.append(len(groups))
            return frontier(groups, draws)

    monkeypatch.setattr(joint_plan, "core", Counted())
    model, data = gpt(depth=6)
    step_of(model, *data, memory=ANY_MEMORY)
    (plan,) = plans()
    assert [piece.name.rpartition(".")[2] for piece in plan.pieces] == ["", *"012345", ""]
    assert len(planned_kinds) <= 3  # the first and the last block may differ in what they hand on


# ---- bits, on devices ----


@on_devices
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_values_that_a_plan_moves_have_their_bits(
    device_under_test: Device, backend: str, monkeypatch: pytest.MonkeyPatch
):
    """Nothing may be computed again here: then a compiler fuses what it fuses without a plan."""
    monkeypatch.setattr(JointGraph, "is_planable", lambda _joint, _piece: False)
    if backend == "inductor" and device_under_test.name == "disk":
        pytest.skip("inductor takes seconds for each graph")

    def program(run: Run):
        model = run.module(lambda: TinyGpt(2))
        data = tokens_and_labels(run, 4, 32)
        memory = {} if run.stock else {"memory": int(0.8 * stock_peak_bytes(model, *data))}
        model.zero_grad(set_to_none=True)
        step = compiled(model, backend, link=FAST_LINK, **memory)
        for _ in range(2):
            with run.offload(reload_window_bytes=0, learn=False):
                loss = step(*data)
            loss.backward()
            run.check(loss=loss, gradients=[parameter.grad for parameter in model.parameters()])
            update(model)

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.05)
    (plan,) = plans()
    assert plan.fits
    assert len(plan.releases) > 1
    assert again_count(plan) == 0


@on_devices
def test_the_link_is_measured_with_real_copies(device_under_test: Device, monkeypatch: pytest.MonkeyPatch):
    """A graph is partitioned while tensors are fake, and a copy of a fake tensor takes no time."""
    measure_link, made = planned.measure_link, []

    def measured(*arguments: Any) -> LinkRates:
        made.append(type(torch.empty(1)))
        return measure_link(*arguments)

    monkeypatch.setattr(planned, "measure_link", measured)
    planned._measured_link.cache_clear()
    with device_under_test.scope(), device_under_test.context() as context:
        x = torch.ones(64, 64, device=device_under_test.torch_device, requires_grad=True)
        compiled(lambda x: x.sin().exp().sum(), link=None, memory="1GiB")(x)
        options = context.options
    assert made == [torch.Tensor]
    if device_under_test.name == "cuda":
        rates = planned._measured_link(planned.planned_device(), options)
        alone = measure_link(planned.planned_device(), options)
        assert 0.5 < rates.out_bytes_per_s / alone.out_bytes_per_s < 2
        assert 0.5 < rates.in_bytes_per_s / alone.in_bytes_per_s < 2


@pytest.mark.devices("disk")
@pytest.mark.parametrize("learn", [True, False])
def test_a_context_that_learns_is_warned_of_if_a_plan_moves_values(
    device_under_test: Device, learn: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(JointGraph, "is_planable", lambda _joint, _piece: False)
    model, data = gpt(depth=2)
    step = compiled(model, link=FAST_LINK, memory=int(0.8 * stock_peak_bytes(model, *data)))
    with warnings.catch_warnings(record=True) as caught, device_under_test.context(learn=learn):
        warnings.simplefilter("always")
        step(*data).backward()
    (plan,) = plans()
    assert plan.releases
    assert any("learn=False" in str(each.message) for each in caught) == learn


class Stack(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual(64) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class ThreeRegions(nn.Module):
    """Dynamo makes one region of the second and third stack."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.rest = Stack(6), Stack(6), Stack(6), Stack(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        call = torch.compiler.nested_compile_region(lambda stack, x: stack(x))
        for stack in (self.one, self.two, self.three):
            x = call(stack, x)
        return self.rest(x).square().mean()


def test_around_a_region_that_moves_values_nothing_moves_and_that_is_told(tmp_path: Path):
    torch.manual_seed(0)
    model, x = ThreeRegions(), torch.randn(512, 64)
    model(x).backward()
    stock = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    options = {"tier": "disk", "disk_dir": str(tmp_path), "min_offload_size": 0, "learn": False}
    torchoffload.reset_stats()
    with torchoffload.OffloadActivations(**options), pytest.warns(UserWarning, match="torchoffload: ") as warned:
        loss = compiled(model, memory="3.6MiB", link=1e13)(x)
    *inner, outer = plans()  # PyTorch 2.9 makes a region of each stack
    kept_bytes = torchoffload.stats().bytes_kept["planned"]
    loss.backward()
    assert any(plan.releases for plan in inner)
    assert not outer.releases
    kept_values = {piece.name: piece.kept_bytes for piece in outer.pieces}
    assert kept_bytes >= kept_values["rest.layers.0"] + kept_values["rest.layers.1"] > 0
    assert sum("a region (torch.compiler.nested_compile_region)" in str(each.message) for each in warned) == 1
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], stock, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")  # one byte is too little
@pytest.mark.parametrize("memory", [1, ANY_MEMORY])
def test_the_inputs_of_graphs_stay_only_if_there_is_room(memory: int, tmp_path: Path):
    """The input of a layer that is compiled alone is a value of the step, which a context may move."""
    layers = [Residual(64) for _ in range(6)]
    functions = [compiled(layer, link=FAST_LINK, memory=memory, graphs=6) for layer in layers]
    options = {"tier": "disk", "disk_dir": str(tmp_path), "min_offload_size": 0, "learn": False}
    windows = {"offload_window_bytes": 0, "reload_window_bytes": 0}
    x = torch.randn(512, 64)
    torchoffload.reset_stats()
    with torchoffload.OffloadActivations(**options, **windows):
        y = x
        for function in functions:
            y = function(y)
    stats = torchoffload.stats()
    y.sum().backward()
    if memory == 1:
        assert stats.bytes_offloaded >= 4 * x.nbytes
    else:
        assert stats.bytes_offloaded == 0
        assert stats.bytes_kept["planned"] >= 6 * x.nbytes


def test_hooks_of_others_may_copy_what_a_graph_saves_that_moves_nothing(tmp_path: Path):
    """A context is entered as the graph is compiled. Later the graph runs under other hooks."""
    model, data = gpt()
    step = compiled(model, memory=ANY_MEMORY)
    with torchoffload.OffloadActivations(tier="disk", disk_dir=tmp_path, min_offload_size=0, learn=False):
        step(*data).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    (plan,) = plans()
    assert not plan.releases
    assert torchoffload.stats().bytes_kept["planned"] > 0
    model.zero_grad(set_to_none=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().numpy(), torch.from_numpy):
        loss = step(*data)
    loss.backward()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected, rtol=0, atol=0)


def test_inductor_computes_again_within_the_tolerance_of_fusion():
    model, data = gpt(depth=1)
    stock = step_of(model, *data, backend="inductor")
    with pytest.warns(UserWarning, match="too little for a compiled graph"):
        ours = step_of(model, *data, backend="inductor", memory=1)
    assert again_count(plans()[0]) > 0
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-6)


# ---- what is never computed again ----


class Dropping(nn.Module):
    """Blocks with dropout behind each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Sequential(nn.Linear(16, 32), nn.Tanh()), nn.Dropout(0.3),
                                                  nn.Sequential(nn.Linear(32, 16), nn.GELU()), nn.Dropout(0.3))
                                    for _ in range(3))  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore:torchoffload. 1 B is too little")
def test_the_gradient_of_dropout_is_that_of_the_forward_that_ran(backend: str):
    """Backward has the masks of forward: the loss changes along a direction as its gradient says.

    Masks that were drawn again would make the gradient that of another function.
    """
    torch.manual_seed(0)
    model = Dropping().double()
    x = torch.randn(256, 16, dtype=torch.double)
    direction = [torch.randn_like(parameter) for parameter in model.parameters()]
    step = compiled(model, backend, memory=1)

    def loss_at(distance: float) -> torch.Tensor:
        with torch.no_grad():
            for parameter, along in zip(model.parameters(), direction, strict=True):
                parameter += distance * along
        torch.manual_seed(7)
        loss = step(x).square().mean()
        with torch.no_grad():
            for parameter, along in zip(model.parameters(), direction, strict=True):
                parameter -= distance * along
        return loss

    torch.manual_seed(7)
    loss = step(x).square().mean()
    state = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), state)
    slope = sum((parameter.grad * along).sum() for parameter, along in zip(model.parameters(), direction, strict=True))
    measured = (loss_at(1e-6) - loss_at(-1e-6)) / 2e-6
    (plan,) = plans()
    assert again_count(plan) > 0
    assert not any("rand" in name or "dropout" in name or "bernoulli" in name for piece in plan.pieces
                   for name in piece.again)  # fmt: skip
    torch.testing.assert_close(slope, measured.detach(), rtol=1e-6, atol=1e-8)


@torch.library.custom_op("torchoffload_joint_plan::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    calls.append(x.shape)
    return x.exp()


calls: list[Any] = []
counted.register_fake(torch.empty_like)
counted.register_autograd(lambda ctx, gradient: gradient * ctx.saved_tensors[0],
                          setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output))  # fmt: skip


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(counted(block.norm_mlp(x)))
        return x.square().mean()


@pytest.mark.filterwarnings("ignore:torchoffload. 1 B is too little")
def test_operators_of_others_run_once():
    torch.manual_seed(0)
    step = compiled(Counting(), memory=1)
    calls.clear()
    step(torch.randn(2, 64, 32)).backward()
    assert again_count(plans()[0]) > 0
    assert len(calls) == 2


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)), nn.ReLU()) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


@pytest.mark.filterwarnings("ignore:torchoffload. 1 B is too little")
def test_statistics_that_forward_writes_are_not_read_again():
    torch.manual_seed(0)
    model, x = Normalized(), torch.linspace(-1, 1, 2 * 4 * 16 * 16).reshape(2, 4, 16, 16)
    stock = step_of(model, x)
    statistics = [buffer.clone() for buffer in model.buffers()]
    torch.manual_seed(0)
    model = Normalized()
    ours = step_of(model, x, memory=1)
    assert again_count(plans()[0]) > 0
    torch.testing.assert_close(ours, stock)
    torch.testing.assert_close(list(model.buffers()), statistics, rtol=0, atol=0)


def test_shapes_that_change_follow_one_plan():
    model, data = gpt()
    memory = int(0.75 * stock_peak_bytes(model, *data))
    step = compiled(model, memory=memory)
    for tokens in (32, 24, 17):
        drawn = torch.randint(64, (4, tokens + 1))
        inputs = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
        for each in inputs:
            torch._dynamo.mark_dynamic(each, 1)
        model.zero_grad()
        step(*inputs).backward()
        ours = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        model(*inputs).backward()
        torch.testing.assert_close(ours, [parameter.grad for parameter in model.parameters()], rtol=1e-4, atol=1e-6)
    assert again_count(plans()[0]) > 0


# ---- several graphs ----


class Broken(nn.Module):
    """Two graphs with a break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = TwoBlocks(), TwoBlocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).square().mean()


class TwoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_two_graphs_share_the_memory():
    torch.manual_seed(0)
    model, x = Broken(), torch.randn(4, 32, 32)
    step_of(model, x, memory=ANY_MEMORY, graphs=2)
    stock = [plan.stock_peak_bytes for plan in plans()]
    assert len(stock) == 2
    planned._noted.clear()
    memory = max(stock) * 3 // 4
    step_of(model, x, memory=memory, graphs=2)
    first, second = plans()
    assert again_count(first) > 0
    assert again_count(second) > 0
    assert max(first.predicted_peak_bytes, second.predicted_peak_bytes) <= memory
    assert first.held_bytes + second.held_bytes < memory
    assert "one of 2" in torchoffload.report()


def test_more_graphs_than_were_named_are_told():
    model, x = Broken(), torch.randn(2, 8, 32)
    with pytest.warns(UserWarning, match=r"2 graphs were compiled .* give compile_options\(memory=..., graphs=2\)"):
        step_of(model, x, memory=ANY_MEMORY)


# ---- what is told ----


@pytest.mark.filterwarnings("ignore:torchoffload. 1 B is too little")
def test_report_tells_the_plan_of_each_block():
    model, data = gpt()
    step_of(model, *data, memory=1)
    text = torchoffload.report()
    assert "compiled graph 0, for 1 B: predicted peak" in text
    found = re.search(r"blocks\.0: ([\d.]+) KiB kept, 0 B moved, computed again in .* ms: (.*)", text)
    assert found is not None
    assert "addmm" in found[2]


def test_report_joins_blocks_with_the_same_plan():
    model, data = gpt(depth=4)
    step_of(model, *data, memory=ANY_MEMORY)
    assert re.search(r"blocks\.0 to 3: ([\d.]+) KiB kept, 0 B moved \(each\)", torchoffload.report())


def test_too_little_memory_inside_of_a_context_is_not_told_to_move(tmp_path: Path):
    model, data = gpt(depth=1)
    step = compiled(model, memory=1)
    with (
        pytest.warns(UserWarning, match="too little for a compiled graph") as caught,
        torchoffload.OffloadActivations(tier="disk", disk_dir=tmp_path, min_offload_size=0),
    ):
        step(*data)
    assert "compile inside of an OffloadActivations" not in str(caught[0].message)


def test_the_rates_of_a_card_are_those_of_its_data_sheet(monkeypatch: pytest.MonkeyPatch):
    """PyTorch's own list has no H200, and its guess is a thousandth."""
    properties = SimpleNamespace(name="NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    rates = planned.device_rates.__wrapped__("cuda")
    assert rates.card is not None
    assert rates.card.name == "H200"
    assert rates.flops_per_s == pytest.approx(989.5e12)
    assert 3e12 < rates.bytes_per_s < 4.8e12


def test_too_little_memory_is_told_with_what_is_needed():
    model, data = gpt()
    with pytest.warns(UserWarning, match=r'too little for a compiled graph.*Give memory="[\d.]+KiB"') as caught:
        step_of(model, *data, memory=1)
    (needed,) = re.findall(r'memory="(.*?)"', str(caught[0].message))
    planned._noted.clear()
    step_of(model, *data, memory=needed)
    assert plans()[0].fits


def test_cuda_graphs_keep_the_plan_and_move_nothing(tmp_path: Path):
    """On a CPU inductor captures nothing; the option alone decides."""
    model, data = gpt(depth=1)
    torch._dynamo.reset()
    options = {**torchoffload.compile_options(memory=1, link_bytes_per_s=FAST_LINK), "triton.cudagraphs": True}
    step = torch.compile(model, options=options)
    with (
        pytest.warns(UserWarning, match="compiled with CUDA graphs do not move") as caught,
        torchoffload.OffloadActivations(tier="disk", disk_dir=tmp_path, min_offload_size=0),
    ):
        step(*data)
    assert not any("compile inside of an OffloadActivations" in str(each.message) for each in caught)
    (plan,) = plans()
    assert not plan.releases
    assert again_count(plan) > 0


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"memory": 0.5}, ValueError), ({"memory": "4 apples"}, ValueError), ({"memory": True}, TypeError),
        ({"memory": 100, "graphs": 0}, ValueError), ({"memory": 100, "graphs": 1.5}, TypeError),
        ({"memory": 100, "link_bytes_per_s": 0}, ValueError), ({"memory": 100, "link_bytes_per_s": "1"}, TypeError),
        ({"graphs": 2}, ValueError),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_at_once(given: dict, error: type):
    if torch.cuda.is_available() and given == {"memory": 0.5}:
        pytest.skip("the size of the device is known")
    with pytest.raises(error):
        torchoffload.compile_options(**given)


# ---- caches ----


def trained_with_cache(directory: Path, way: str, memory: int) -> dict[str, Any]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(directory), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(PROGRAM), way, str(memory)]
    found: dict[str, Any] = json.loads(subprocess.check_output(command, env=environment, text=True))
    return found


@pytest.mark.parametrize(
    ("way", "memory", "phase"), [("options", 1, ""), ("fit", 1 << 20, "compiled"), ("fit", 6000, "least memory")]
)
def test_a_second_process_partitions_nothing_and_knows_the_plan(way: str, memory: int, phase: str, tmp_path: Path):
    first, again = (trained_with_cache(tmp_path, way, memory) for _ in range(2))
    assert first["partitioned"] == 1
    assert [line.partition(":")[0].strip() for line in first["report"][-2:]] == ["outside of blocks", "0 to 1"]
    assert first["phase"] == phase
    assert again == {**first, "partitioned": 0}


def test_the_plan_is_a_part_of_the_cache_key():
    given = [{}, {"memory": 1}, {"memory": 2}, {"memory": 2, "graphs": 2}]
    keys = {torchoffload.compile_options(**each)["custom_partitioner_fn"].uuid() for each in given}
    assert len(keys) == len(given)


# ---- notes ----


def noted_plan(peak_bytes: int) -> GraphPlan:
    return GraphPlan((), None, {}, 0, 1.0, peak_bytes, 0, 1.0, peak_bytes, 0, 0, 0, 1 << 40, is_dynamic=False)


@contextlib.contextmanager
def compilation(number: int, *, attempt: int = 0) -> Iterator[None]:
    context = CompileContext(CompileId(frame_id=number, frame_compile_id=0))
    context.attempt = attempt
    with compile_context(context):
        yield


def test_of_an_attempt_that_dynamo_gave_up_no_plan_is_left():
    notes = PlanNotes(Memory(1))
    with compilation(1):
        notes.note(noted_plan(10))
        notes.note(noted_plan(11))
    with compilation(1, attempt=1):
        notes.note(noted_plan(12))
    with compilation(2):
        notes.note(noted_plan(13))
    assert [plan.predicted_peak_bytes for plan in notes.all_plans] == [12, 13]


def test_of_the_graphs_that_were_read_from_the_cache_the_last_one_counts():
    """PyTorch reads graphs until one has the right guards."""
    notes = PlanNotes(Memory(1))
    with compilation(1):
        notes.note(noted_plan(10))  # as of another part of a graph that DDP cuts
        note_lookup(Lookup(notes.memory, in_context=False, notes=notes))
        for peak_bytes in (11, 12):
            read = pickle.loads(pickle.dumps(PlansOfCachedGraph((noted_plan(peak_bytes),))))
        assert copy.deepcopy(read) is read
    assert [plan.predicted_peak_bytes for plan in notes.plans] == [10, 12]
    pickle.loads(pickle.dumps(read))
    assert len(notes.plans) == 2, "nothing is compiled"
