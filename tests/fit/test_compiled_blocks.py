"""Blocks that are compiled, in each way that PyTorch has, are blocks as wholes: kept, moved, or called again."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional

import torchoffload
from torchoffload._fit.block.whole import COMPILED_CALL
from torchoffload._pytorch import compiled_calls
from torchoffload._pytorch.compiled_calls import add_call_hooks, keep_call_hooks, remove_call_hooks

WIDTH, ROOM, STEPS = 32, 1 << 40, 14


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor | None = None) -> torch.Tensor:
        h = self.down(functional.gelu(self.up(self.norm(x))))
        return x + self.drop(h if scale is None else h * scale)


class Model(nn.Module):
    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.times = times

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            for _ in range(self.times):
                x = layer(x, scale=scale)
        return self.last(x).float().square().mean()


def in_place(model: nn.Module, backend: str) -> None:
    for layer in model.layers:
        layer.compile(backend=backend, fullgraph=True)


def as_another_module(model: nn.Module, backend: str) -> None:
    for number, layer in enumerate(model.layers):
        model.layers[number] = torch.compile(layer, backend=backend, fullgraph=True)


def by_forward(model: nn.Module, backend: str) -> None:
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True)


def a_part(model: nn.Module, backend: str) -> None:
    for layer in model.layers:
        layer.up = torch.compile(layer.up, backend=backend)


def a_linear_part_in_place(model: nn.Module, backend: str) -> None:
    for layer in model.layers:
        layer.up.compile(backend=backend)


WAYS = {each.__name__: each for each in (in_place, as_another_module, by_forward, a_part, a_linear_part_in_place)}


def train(
    model: nn.Module,
    *,
    steps: int = STEPS,
    lengths: tuple[int, ...] = (8,),
    scales: bool = False,
    autocast: bool = False,
    between: Callable[[], None] = lambda: None,
) -> list[Any]:
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for step in range(steps):
        x = torch.randn(lengths[step % len(lengths)], WIDTH)
        scale = torch.rand(WIDTH) if scales else None
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x, scale=scale)
        between()
        loss.backward()
        results.append([loss.detach().clone(), *(each.grad.clone() for each in model.parameters())])
        optimizer.step()
        optimizer.zero_grad()
    return results


def is_same(one: list[Any], other: list[Any]) -> bool:
    return all(
        torch.equal(a, b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)
    )


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compare(
    way: str, tmp_path: Any, *, moves: bool, backend: str = "aot_eager", times: int = 1, **run: Any
) -> torchoffload.Fitted:
    """Train with as little memory as a plan can do with, beside stock compiled: bits, graphs, and what is left."""
    torch.manual_seed(1)
    base = Model(times)
    model = copy.deepcopy(base)
    WAYS[way](model, backend)
    expected = train(model, **run)
    graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    counters.clear()
    model = copy.deepcopy(base)
    WAYS[way](model, backend)
    compiled = [layer._compiled_call_impl for layer in model.layers]
    forwards = [layer.__dict__.get("forward") for layer in model.layers]
    options: dict[str, Any] = (
        {"tier": "disk", "disk_dir": str(tmp_path), "min_offload_size": 0, "recompute": False}
        if moves
        else {"move": False}
    )
    handle = torchoffload.fit(model, ROOM, **options)
    was_planned = False

    def take_the_least() -> None:
        nonlocal was_planned
        if handle.phase == "settled" and not was_planned:
            was_planned = True
            handle.replan(int(handle.frontier()[0].memory_bytes / 0.96) + 1)

    got = train(model, between=take_the_least, **run)
    assert is_same(got, expected)
    assert was_planned, handle.report()
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]
    assert all(f"layers.{number}" in handle._driver.names.values() for number in range(4))
    plan = handle.plan
    assert (plan.moved_bytes > 0) is moves, handle.report()
    assert (plan.recompute_s > 0) is not moves, handle.report()
    handle.remove()
    assert all(layer._compiled_call_impl is each for layer, each in zip(model.layers, compiled, strict=True))
    assert all(layer.__dict__.get("forward") is each for layer, each in zip(model.layers, forwards, strict=True))
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
    return handle


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_compiled_blocks_have_the_bits_of_stock(way: str, moves: bool, tmp_path: Any):
    handle = compare(way, tmp_path, moves=moves)
    assert (COMPILED_CALL,) in handle._driver.operators


class ReadsOnly(Block):
    """Saves nothing of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor | None = None) -> torch.Tensor:
        return self.drop(self.down(torch.sin(self.up(x * 0.9))))


class AddsInPlace(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ReadsOnly() for _ in range(4))

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x += layer(x)
        return self.last(x).float().square().mean()


@pytest.mark.parametrize("moves", [False, True])
def test_a_residual_stream_that_is_added_to_in_place_is_copied(moves: bool, tmp_path: Any):
    torch.manual_seed(1)
    model = AddsInPlace()
    fitted = copy.deepcopy(model)
    in_place(model, "aot_eager")
    expected = train(model)
    torch._dynamo.reset()
    in_place(fitted, "aot_eager")
    options: dict[str, Any] = (
        {"tier": "disk", "disk_dir": str(tmp_path), "min_offload_size": 0} if moves else {"move": False}
    )
    handle = torchoffload.fit(fitted, ROOM, **options)

    def take_the_least() -> None:
        if handle.phase == "settled" and handle.plan.recompute_s == 0:
            handle.replan(int(handle.frontier()[0].memory_bytes / 0.96) + 1)

    assert is_same(train(fitted, between=take_the_least), expected)
    assert handle.plan.recompute_s > 0, handle.report()
    assert "writes to arguments of a ReadsOnly after its forward" in handle.report()


@pytest.mark.parametrize("moves", [False, True])
def test_those_of_inductor_as_well(moves: bool, tmp_path: Any):
    compare("in_place", tmp_path, moves=moves, backend="inductor")


@pytest.mark.parametrize(
    "run",
    [{"scales": True}, {"autocast": True}, {"times": 2}, {"lengths": (8, 12, 5), "steps": 30}],
    ids=["keywords", "autocast", "called twice", "lengths"],
)
def test_whatever_they_are_called_with(run: dict[str, Any], tmp_path: Any):
    compare("in_place", tmp_path, moves=False, **run)


def test_what_they_save_is_counted_as_stock_saves_it(tmp_path: Any):
    """Inductor allocates past PyTorch's dispatcher: by the operators that are seen it would be nothing."""
    model = Model()
    in_place(model, "inductor")
    with torchoffload.fit(model, ROOM, move=False) as handle:
        train(model, steps=5)
        saved = {handle._driver.names[block]: nbytes for block, nbytes in handle._driver.saves}
    assert saved["layers.1"] >= 8 * WIDTH * 4 * 6  # what gelu and two products need, at the least


@pytest.mark.parametrize("dry_run_fails", [True, False])
def test_blocks_that_are_compiled_in_place_are_chosen(dry_run_fails: bool, tmp_path: Any):
    """Also by a scouting call, which hooks inside of the compiled code would not be told of."""

    class Hesitant(Model):
        def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
            if dry_run_fails and x.detach().numpy().sum() > 1e9:  # a run without data has none
                return x
            return super().forward(x, scale)

    torch._dynamo.reset()
    model = Hesitant()
    in_place(model, "aot_eager")
    with torchoffload.fit(model, ROOM, tier="disk", disk_dir=tmp_path) as fitted:
        for _ in range(STEPS):
            model(torch.randn(64, WIDTH)).backward()
        assert {f"layers.{number}" for number in range(4)} <= set(fitted._driver.names.values())
        report = fitted.report()
        assert fitted.phase == "settled", report
        assert "save other bytes than a dry run" not in report
        assert any("a dry run of the model failed" in each for each in fitted._driver.notes) is dry_run_fails, report
    assert not any(compiled_calls.runs_hooks_around_call(layer) for layer in model.layers)
    torch._dynamo.reset()


def test_blocks_that_are_compiled_after_fit_are_wholes_from_the_next_step_on():
    model = Model()
    expected_model = copy.deepcopy(model)
    handle = torchoffload.fit(model, ROOM, move=False)
    train(model, steps=1)
    train(expected_model, steps=1)
    in_place(model, "aot_eager")
    in_place(expected_model, "aot_eager")
    compiled = [layer._compiled_call_impl for layer in model.layers]
    assert is_same(train(model), train(expected_model))
    assert not counters["graph_break"]
    assert not any(layer._forward_hooks for layer in model.layers)
    in_place(model, "eager")  # once more, which takes our hooks away
    in_place(expected_model, "eager")
    again = [layer._compiled_call_impl for layer in model.layers]
    assert is_same(train(model, steps=3), train(expected_model, steps=3))
    handle.remove()
    assert [layer._compiled_call_impl for layer in model.layers] == again != compiled


def test_a_copy_of_a_compiled_block_is_a_plain_module():
    model = Model()
    in_place(model, "aot_eager")
    with torchoffload.fit(model, ROOM, move=False):
        train(model, steps=1)
        twin = copy.deepcopy(model)
        assert all(layer._compiled_call_impl is None for layer in twin.layers)
        assert is_same(train(twin, steps=2), train(twin, steps=2)) is False  # it trains
    assert not any(layer._forward_hooks for layer in twin.layers)


class Statistics(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)


def test_a_compiled_block_that_writes_to_its_buffers_is_not_called_again():
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Model()
        model.layers = nn.ModuleList(Statistics() for _ in range(4))
        in_place(model, "aot_eager")
        models.append(model)
    with torchoffload.fit(models[0], ROOM, move=False) as handle:
        assert is_same(train(models[0]), train(models[1]))
        assert "writes to parameters, buffers or arguments" in handle.report()
    buffers = [list(model.buffers()) for model in models]
    assert all(torch.equal(one, other) for one, other in zip(*buffers, strict=True))


def test_compiled_modules_are_offloaded_by_themselves(tmp_path: Any):
    model = Model()
    expected_model = copy.deepcopy(model)
    in_place(model, "aot_eager")
    in_place(expected_model, "aot_eager")
    options: dict[str, Any] = {"tier": "disk", "disk_dir": str(tmp_path), "min_offload_size": 0}
    with torchoffload.offload_modules(model, "layers.*", **options) as handle:
        assert is_same(train(model, steps=3), train(expected_model, steps=3))
        assert all(row.bytes_offloaded > 0 for row in handle.stats())
    assert not counters["graph_break"]


# The object around a compiled call.


def test_hooks_stand_around_each_other_and_are_told_of_an_exception():
    calls: list[str] = []

    def hooks(name: str) -> tuple[Any, Any]:
        return (
            lambda *_: calls.append(f"{name} enters"),
            lambda _module, _args, output: calls.append(f"{name} leaves{'' if output is not None else ' without'}"),
        )

    class Raises(nn.Module):
        raises = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.raises:
                raise ArithmeticError
            return x + 1

    for compiles in (False, True):
        calls.clear()
        module = Raises()
        if compiles:
            module.compile(backend="eager")
        outer, inner = hooks("outer"), hooks("inner")
        add_call_hooks(module, *outer)
        add_call_hooks(module, *inner)
        module(torch.ones(1))
        expected = ["outer enters", "inner enters", "inner leaves", "outer leaves"]
        assert calls == expected
        module.raises = True
        with pytest.raises(ArithmeticError):
            module(torch.ones(1))
        assert calls[4:] == ["outer enters", "inner enters", "inner leaves without", "outer leaves without"]
        module.raises = False
        remove_call_hooks(module, *outer)
        remove_call_hooks(module, *inner)
        calls.clear()
        module(torch.ones(1))
        assert not calls
        assert not module._forward_hooks


def test_what_stands_around_a_call_does_not_hold_the_module():
    module = nn.Linear(2, 2)
    module.compile(backend="eager")
    add_call_hooks(module, lambda *_: None, lambda *_: None)
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


def test_inside_of_another_compiled_module_the_compiled_call_is_made_as_it_is():
    seen: list[int] = []
    inner = nn.Linear(2, 2)
    inner.compile(backend="eager")
    add_call_hooks(inner, lambda *_: seen.append(1), lambda *_: None)
    outer = torch.compile(nn.Sequential(inner, nn.ReLU()), backend="eager", fullgraph=True)
    outer(torch.ones(1, 2))
    assert not seen
    keep_call_hooks(inner)
    inner(torch.ones(1, 2))
    assert seen
    assert compiled_calls.runs_hooks_around_call(inner)
