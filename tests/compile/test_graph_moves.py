"""Values inside of compiled graphs: with compile_options() they move, and all bits are those of stock compiled."""

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch._dynamo.compiled_autograd
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchoffload
from devices import Device
from gradients import Run, assert_same_gradients
from models import Block, TinyGpt, tokens_and_labels, update
from torchoffload._compile import partition

PROGRAM = Path(__file__).parent.parent / "support" / "cached_graph_program.py"

LONG = "TORCHOFFLOAD_TEST_LONG" in os.environ
SIMULATED = ("disk", "simulated-late", "simulated-seeded")
pytestmark = [pytest.mark.slow, pytest.mark.devices(*SIMULATED)]
on_cuda_too = pytest.mark.devices(*SIMULATED, "cuda")  # where a graph takes seconds to compile


@pytest.fixture(autouse=True)
def _compiled_here() -> Iterator[None]:
    """A graph of another test, or of a run on another device, is not found again."""
    with torch._functorch.config.patch(enable_autograd_cache=False), torch._inductor.config.patch(fx_graph_cache=False):
        yield


@functools.cache
def eager_backend() -> Callable[..., Any]:
    """aot_eager with our partitioner."""
    from functorch.compile import nop
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=torchoffload.partition_fn)


def compiled(run: Run, function: Callable, backend: str = "aot_eager", **options: Any) -> Callable:
    """`function` compiled anew; with our partitioner, unless the run is stock."""
    torch._dynamo.reset()
    if backend == "aot_eager":
        return torch.compile(function, backend="aot_eager" if run.stock else eager_backend(), **options)
    return torch.compile(function, options=None if run.stock else torchoffload.compile_options(), **options)


@contextlib.contextmanager
def counted_moves() -> Iterator[list[int]]:
    """The numbers of values that move in the graphs that are rewritten inside."""
    from torchoffload._compile import rewrite

    counts: list[int] = []
    move = rewrite.move_saved_values

    def moved(*arguments: Any) -> tuple[int, int]:
        count, nbytes = move(*arguments)
        counts.append(count)
        return count, nbytes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewrite, "move_saved_values", moved)
        yield counts


def layers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = (x @ weight).sin().exp() * x.tanh()
    return x


BACKENDS = ["aot_eager", "inductor"]


@pytest.fixture(autouse=True)
def _inductor_takes_seconds(request: pytest.FixtureRequest) -> None:
    """It compiles for one device, unless TORCHOFFLOAD_TEST_LONG is set."""
    name = request.node.name
    is_chosen = "simulated-late" in name or "cuda" in name or LONG
    if "inductor" in name and not is_chosen:
        pytest.skip("inductor takes seconds for each graph")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window_bytes", [0, 1 << 13, 1 << 30])
def test_values_inside_of_a_graph_move(device_under_test: Device, backend: str, window_bytes: int):
    def program(run: Run):
        x, weight = run.leaf(32, 32), run.parameter(32, 32)
        step = compiled(run, layers, backend, fullgraph=True)
        for _ in range(3):
            with run.offload(offload_window_bytes=window_bytes):
                loss = step(x, weight).sum()
            loss.backward()
            run.check(loss=loss, x=x.grad, weight=weight.grad)
        return x.grad, weight.grad

    with counted_moves() as counts:
        stats = assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5)
    assert len(counts) == 1
    assert counts[0] >= 3
    assert stats.bytes_offloaded >= 3 * counts[0] * 32 * 32 * 4
    assert stats.bytes_reloaded > 0


# ---- what a compiler does with memory ----


def one_cheap_value_twice(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`hot` is cheap, saved, and read by two products: inductor would make it once for each of them."""
    y = x @ weight
    hot = torch.nn.functional.gelu(y)
    return (hot @ weight).sin() * (hot.t() @ weight).cos()


def reused_memory(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Chains of values of one size, each dead early: inductor gives the memory of each to a later one."""
    for _ in range(4):
        y = (x.cos().sigmoid() @ weight).tanh().exp()
        x = ((y @ weight).sigmoid() @ weight).sin()
    return x


def written_behind(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A saved value is written over behind its last reader, if a compiler thinks that nobody needs it."""
    y = (x @ weight).exp()
    z = y.sin() @ weight
    index = torch.arange(8, device=x.device)
    w = y.index_add(0, index, z[:8])
    return w.scatter_add(1, torch.zeros(32, 1, dtype=torch.long, device=x.device), z[:, :1]).tanh() @ weight


def in_channels_last(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Inductor chooses other strides for convolutions and the operators around them."""
    image = x.reshape(1, 4, 16, 16)
    kernel = weight.reshape(-1)[: 4 * 4 * 9].reshape(4, 4, 3, 3)
    image = torch.nn.functional.conv2d(image, kernel, padding=1).relu()
    image = torch.nn.functional.group_norm(image, 2).sigmoid()
    image = torch.nn.functional.conv2d(image, kernel, padding=1).tanh() * image
    return ((image.reshape(32, 32) @ weight).sin() @ weight).tanh() @ weight


def views_of_one_buffer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    q, k, v = (x @ weight.repeat(1, 3)).view(32, 3, 32).unbind(1)
    attended = ((q @ k.t()).softmax(-1) @ v).t()
    return attended.sin() * attended.exp()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window_bytes", [0, 1 << 30])
@pytest.mark.parametrize(
    "function",
    [one_cheap_value_twice, reused_memory, written_behind, in_channels_last, views_of_one_buffer],
    ids=lambda function: function.__name__,
)
def test_memory_that_a_compiler_uses_again(
    device_under_test: Device, backend: str, function: Callable, window_bytes: int
):
    """Copies are late on the simulated device: each sees the contents of its source as it is waited for."""

    def program(run: Run):
        x, weight = run.leaf(32, 32), run.parameter(32, 32)
        step = compiled(run, function, backend, fullgraph=True)
        for _ in range(2):
            with run.offload(offload_window_bytes=window_bytes):
                loss = step(x, weight).sum()
            loss.backward()
            run.check(loss=loss, x=x.grad, weight=weight.grad)
        return x.grad, weight.grad

    with counted_moves() as counts:
        assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.1)
    assert counts[0] > 0


def kept_by_the_context(run: Run, **options: Any) -> Any:
    return run.offload(budget_bytes=3 * 32 * 32 * 4, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore:torchoffload. the budget")
def test_a_value_that_its_context_keeps_is_copied_before_its_memory_is_used_again(
    device_under_test: Device, backend: str
):
    """The budget has room for three values; the others stay on the device, while the graph reuses their memory."""

    def program(run: Run):
        x, weight = run.leaf(32, 32), run.parameter(32, 32)
        step = compiled(run, reused_memory, backend, fullgraph=True)
        for _ in range(2):
            with kept_by_the_context(run):
                loss = step(x, weight).sum()
            loss.backward()
            run.check(loss=loss, x=x.grad, weight=weight.grad)
        return x.grad, weight.grad

    assert_same_gradients(program, device=device_under_test, kept_reason="tier_full", min_moved_fraction=0.05)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("around", ["nothing", "NoOpManager", "checkpoint"])
def test_a_graph_that_was_compiled_to_move_runs_under_other_hooks(device_under_test: Device, backend: str, around: str):
    def program(run: Run):
        x, weight = run.leaf(32, 32), run.leaf(32, 32)
        step = compiled(run, reused_memory, backend, fullgraph=True)
        for turn in range(4):
            is_moved = turn % 2 == 0
            call = functools.partial(checkpoint, step, use_reentrant=False) if around == "checkpoint" else step
            with run.offload() if is_moved else run.noop() if around == "NoOpManager" else contextlib.nullcontext():
                loss = (step if is_moved else call)(x, weight).sum()
            loss.backward()
            run.check(loss=loss, x=x.grad, weight=weight.grad)
        return x.grad, weight.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5)


# ---- graphs that are used more than once, or never ----


@on_cuda_too
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_is_retained(device_under_test: Device, backend: str):
    def program(run: Run):
        x, weight = run.leaf(32, 32), run.parameter(32, 32)
        with torch._functorch.config.patch(donated_buffer=False):
            step = compiled(run, reused_memory, backend, fullgraph=True)
            with run.offload():
                loss = step(x, weight).sum()
            for retain in (True, True, False):
                loss.backward(retain_graph=retain)
                run.check(x=x.grad, weight=weight.grad)
            with run.raising("again"):
                loss.backward()
        return x.grad, weight.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5)


def test_a_graph_with_donated_buffers_is_retained(device_under_test: Device):
    def program(run: Run):
        x, weight = run.leaf(32, 32), run.parameter(32, 32)
        step = compiled(run, reused_memory, "inductor", fullgraph=True)
        with run.offload():
            first = step(x, weight).sum()
        first.backward()  # compiles a backward that is given buffers
        with run.offload():
            loss = step(x, weight).sum()
        with run.raising("retained"):
            loss.backward(retain_graph=True)
        with run.raising("once_more"):
            loss.backward()
        return x.grad, weight.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_forwards_come_before_two_backwards_and_one_graph_is_dropped(device_under_test: Device, backend: str):
    def program(run: Run):
        x, weight = run.leaf(32, 32), run.parameter(32, 32)
        step = compiled(run, layers, backend, fullgraph=True)
        with run.offload():
            losses = [step(x * scale, weight).sum() for scale in (1, 2, 3)]
        del losses[1]
        for loss in losses:
            loss.backward()
            run.check(x=x.grad, weight=weight.grad)
        with run.offload():
            losses = [step(x * scale, weight).sum() for scale in (1, 2)]
        for loss in reversed(losses):
            loss.backward()
        return x.grad, weight.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5)


# ---- programs ----


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.first(x).relu(), 0.3)
        return nn.functional.dropout(self.second(hidden), 0.2).sin() + torch.rand_like(x)


@on_cuda_too
@pytest.mark.parametrize("backend", BACKENDS)
def test_random_numbers_are_those_of_stock(device_under_test: Device, backend: str):
    def program(run: Run):
        model, x = run.module(Dropping), run.leaf(32, 32)
        step = compiled(run, model, backend, fullgraph=True)
        for seed in range(3):
            torch.manual_seed(seed)
            with run.offload():
                loss = step(x).square().sum()
            loss.backward()
            run.check(loss=loss, x=x.grad, model=model)
        return model

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.3)


@on_cuda_too
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_a_language_model_trains(device_under_test: Device, backend: str, how: str):
    def program(run: Run):
        model = run.module(TinyGpt)
        tokens, labels = tokens_and_labels(run)
        if how == "whole":
            step = compiled(run, model, backend, fullgraph=True)
        else:
            step = model
            for number, block in enumerate(model.blocks):
                model.blocks[number] = compiled(run, block, backend, fullgraph=True)
        for _ in range(3):
            with run.offload():
                loss = step(tokens, labels)
            loss.backward()
            run.check(loss=loss, model=model)
            update(model)
        return model

    with counted_moves() as counts:
        assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5)
    assert sum(counts) > 5


@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes_change(device_under_test: Device, backend: str):
    def program(run: Run):
        weight = run.parameter(32, 32)
        step = compiled(run, layers, backend, fullgraph=True)
        for rows in (24, 16, 40, 24):
            x = run.leaf(rows, 32)
            torch._dynamo.mark_dynamic(x, 0)
            with run.offload():
                loss = step(x, weight).sum()
            loss.backward()
            run.check(loss=loss, gradient=x.grad)
        return weight.grad

    with counted_moves() as counts:
        assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5)
    assert len(counts) == 1, "one graph serves all shapes"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_breaks(device_under_test: Device, backend: str):
    def broken(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = layers(x, weight)
        torch._dynamo.graph_break()
        return layers(x, weight).tanh()

    def program(run: Run):
        x, weight = run.leaf(32, 32), run.parameter(32, 32)
        step = compiled(run, broken, backend)
        for _ in range(2):
            with run.offload():
                loss = step(x, weight).sum()
            loss.backward()
        return x.grad, weight.grad

    with counted_moves() as counts:
        assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5)
    assert len(counts) == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_inside_of_a_graph(device_under_test: Device, backend: str):
    """Its input moves, and the values that it computes again in backward are no saved values."""

    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = (x.exp() @ weight).sin()
        x = checkpoint(layers, x, weight, use_reentrant=False)
        return checkpoint(layers, x @ weight, weight, use_reentrant=False).cos()

    def program(run: Run):
        x, weight = run.leaf(32, 32), run.parameter(32, 32)
        step = compiled(run, forward, backend, fullgraph=True)
        for _ in range(2):
            with run.offload():
                loss = step(x, weight).sum()
            loss.backward()
        return x.grad, weight.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5)


def test_views_that_a_block_saves(device_under_test: Device):
    def program(run: Run):
        block, x = run.module(Block), run.leaf(2, 16, 32)
        step = compiled(run, block, fullgraph=True)
        for _ in range(2):
            with run.offload():
                loss = step(x).square().sum()
            loss.backward()
        return block, x.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5)


def test_steps_that_learn(device_under_test: Device):
    """Lessons of earlier steps may keep values, each of which has memory of its own then."""

    def program(run: Run):
        x, weight = run.leaf(32, 32), run.parameter(32, 32)
        step = compiled(run, reused_memory, fullgraph=True)
        for _ in range(6):
            with run.offload(learn=True, offload_window_bytes=None, reload_window_bytes=None):
                loss = step(x, weight).sum()
            loss.backward()
            run.check(loss=loss, x=x.grad, weight=weight.grad)
        return x.grad, weight.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
def test_compiled_autograd_takes_values_that_moved(device_under_test: Device, backend: str):
    def program(run: Run):
        x, weight = run.leaf(32, 32), run.parameter(32, 32)
        step = compiled(run, layers, backend)
        for _ in range(2):
            with run.offload():
                loss = step(x, weight).sum()
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
                loss.backward()
            run.check(x=x.grad, weight=weight.grad)
        return x.grad, weight.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5)


# ---- where nothing is rewritten ----


def test_a_graph_that_is_compiled_outside_of_a_context_is_pytorchs_own(device_under_test: Device):
    def program(run: Run):
        x, weight = run.leaf(32, 32), run.parameter(32, 32)
        step = compiled(run, layers, fullgraph=True)
        step(x, weight).sum().backward()
        with run.offload():
            loss = step(x, weight).sum()
        loss.backward()
        return x.grad, weight.grad

    with counted_moves() as counts:
        assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5)
    assert counts == []


@pytest.mark.parametrize("hooks", ["NoOpManager", "checkpoint"])
def test_a_graph_that_is_compiled_under_other_hooks_is_pytorchs_own(device_under_test: Device, hooks: str):
    def program(run: Run):
        x, weight = run.leaf(32, 32), run.leaf(32, 32)  # PyTorch compiles anew if hooks give a Parameter back
        step = compiled(run, layers, fullgraph=True)
        with run.offload():
            y = x.exp()
            if hooks == "checkpoint":
                loss = checkpoint(step, y, weight, use_reentrant=False).sum()
            else:
                with run.noop():
                    loss = step(y, weight).sum()
        loss.backward()
        return x.grad, weight.grad

    with counted_moves() as counts:
        assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5)
    assert counts == []


def test_a_disabled_context_changes_no_graph(monkeypatch: pytest.MonkeyPatch, device_under_test: Device):
    monkeypatch.setenv("TORCHOFFLOAD_DISABLE", "1")
    with counted_moves() as counts, device_under_test.scope():
        x, weight = (torch.rand(32, 32, device=device_under_test.torch_device, requires_grad=True) for _ in range(2))
        torch._dynamo.reset()
        with device_under_test.context():
            torch.compile(layers, backend=eager_backend())(x, weight).sum().backward()
    assert counts == []


def test_a_graph_that_computes_with_the_type_of_tokens_is_left_alone(device_under_test: Device):
    def coarse(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return layers(x, weight).to(torch.float8_e5m2fnuz).to(torch.float32) + layers(x, weight)

    def program(run: Run):
        x, weight = run.leaf(32, 32), run.parameter(32, 32)
        with run.offload():
            loss = compiled(run, coarse, fullgraph=True)(x, weight).sum()
        loss.backward()
        return x.grad, weight.grad

    with counted_moves() as counts:
        assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5)
    assert counts == [0]


# ---- PyTorch's private functions ----


def differs(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    from torch._functorch import partitioners

    if how == "signature":
        monkeypatch.setattr(partitioners, "min_cut_rematerialization_partition", lambda graph, **keywords: None)
    elif how == "config":
        monkeypatch.delattr(torch._inductor.config, "custom_partitioner_fn")
    else:
        from torch._inductor import custom_graph_pass

        monkeypatch.delattr(custom_graph_pass, "CustomPartitionerFn")


@pytest.mark.devices("disk")
@pytest.mark.parametrize("how", ["signature", "class"])
def test_another_pytorch_is_told_once_and_compiles_as_without_us(
    monkeypatch: pytest.MonkeyPatch, device_under_test: Device, how: str
):
    differs(monkeypatch, how)
    partition._warn_of.cache_clear()
    with pytest.warns(UserWarning, match="partitions graphs in another way than is known here"):
        assert torchoffload.compile_options() == {}
    assert torchoffload.compile_options() == {}  # a second warning would be an error


@pytest.mark.devices("disk")
def test_graphs_that_do_not_fit_together_stay_as_they_are(monkeypatch: pytest.MonkeyPatch, device_under_test: Device):
    partition._warn_of.cache_clear()
    stock = partition._stock_partition

    def renamed(*arguments: Any, **keywords: Any) -> Any:
        forward, backward = stock(*arguments, **keywords)
        for node in backward.graph.find_nodes(op="placeholder"):
            node.name = f"other_{node.name}"
        backward.recompile()
        return forward, backward

    def program(run: Run):
        x, weight = run.leaf(32, 32), run.parameter(32, 32)
        with run.offload():
            loss = compiled(run, layers, fullgraph=True)(x, weight).sum()
        loss.backward()
        return x.grad, weight.grad

    monkeypatch.setattr(partition, "_stock_partition", renamed)
    with pytest.warns(UserWarning, match="backward has no input"):
        assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5)


# ---- caches ----


def cached_run(directory: Path, window_bytes: int) -> tuple[str, int, int]:
    """The gradients' digest, the bytes that moved, and how often PyTorch's partitioner ran, of a process of its own."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(directory), str(window_bytes)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(directory / "cache"), "PYTHONPATH": str(PROGRAM.parent)},
    )
    assert done.returncode == 0, done.stderr
    digest, moved_bytes, partition_count = done.stdout.split()
    return digest, int(moved_bytes), int(partition_count)


@pytest.mark.devices("disk")
def test_a_second_process_partitions_nothing_and_moves_the_same(device_under_test: Device, tmp_path: Path):
    first = cached_run(tmp_path, 0)
    assert first[1] > 0
    assert first[2] == 1
    assert cached_run(tmp_path, 0) == (*first[:2], 0)
    other_window = cached_run(tmp_path, 1 << 30)
    assert other_window == first, "another window is another graph: it is partitioned anew, with the same results"


# ---- random programs ----


class RandomGraph(nn.Module):
    """Random operators on values of one shape, each of which may be read again much later."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = Random(seed)
        self.weights = nn.ParameterList(torch.rand(32, 32) / 8 for _ in range(3))
        self.steps = [(random.randrange(9), random.random(), random.random()) for _ in range(random.randrange(6, 24))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x, x @ self.weights[0]]
        for kind, first, second in self.steps:
            a, b = values[-1 - int(first * 3) % len(values)], values[int(second * len(values))]
            weight = self.weights[int(second * 3)]
            values.append(
                (
                    lambda: (a @ weight).relu(),
                    lambda: a.sin() * b,
                    lambda: nn.functional.dropout(a, 0.2) + b,
                    lambda: a.softmax(-1) @ weight,
                    lambda: (a.t() @ b).tanh(),
                    lambda: nn.functional.layer_norm(a, (32,)) * b.sigmoid(),
                    lambda: torch.cat([a[:, 16:], b[:, :16]], 1).exp().clamp(max=2.0),
                    lambda: a.view(4, 8, 32).transpose(0, 1).reshape(32, 32) - b.mean(0),
                    lambda: torch.where(a > b, a.cos(), b),
                )[kind]()
            )
        return torch.stack([value.square().mean() for value in values]).sum()


@pytest.mark.parametrize(
    ("backend", "seeds"),
    [("aot_eager", range(24 if LONG else 3)), ("inductor", range(100, 124 if LONG else 102))],
)
def test_random_programs(device_under_test: Device, backend: str, seeds: range):
    moved = 0
    for seed in seeds:

        def program(run: Run, seed: int = seed):
            model, x = run.module(lambda: RandomGraph(seed)), run.leaf(32, 32)
            step = compiled(run, model, backend, fullgraph=True)
            losses = []
            for _ in range(2):
                torch.manual_seed(seed)
                with run.offload(offload_window_bytes=(seed % 3) << 13):
                    losses.append(step(x))
            for loss in losses if seed % 2 else reversed(losses):
                loss.backward()
                run.check(loss=loss, x=x.grad, model=model)

        with counted_moves() as counts:
            assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.01)
        moved += sum(counts)
    assert moved > 3 * len(seeds)
