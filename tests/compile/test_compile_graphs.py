"""torch.compile with mode="reduce-overhead": CUDA graphs whose memory stays, and whose replays come out as stock's.

What its regions save lies in the memory of a graph tree, which may not be let go of: see Note [Memory of graph trees]
in csrc/device/cuda_graph_pools.h. What eager operators save beside them moves.
"""

import contextlib
from collections.abc import Callable

import pytest
import torch
from test_compile_buffers import compiled, overwritten

import torchoffload
from devices import Device
from gradients import Run, assert_same_gradients
from models import Block, TinyGpt, tokens_and_labels, update

pytestmark = [pytest.mark.slow, pytest.mark.devices("cuda")]


def forget_graphs() -> None:
    """The outputs that a tree keeps for its next replay hold what they came from."""
    torch._dynamo.reset()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one for each CUDA graph that the tree of "reduce-overhead" records."""
    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

    graphs: list[str] = []
    record_function = CUDAGraphTreeManager.record_function

    def counted(*arguments, **keywords):
        graphs.append("recorded")
        return record_function(*arguments, **keywords)

    monkeypatch.setattr(CUDAGraphTreeManager, "record_function", counted)
    return graphs


@pytest.mark.parametrize("window", [0, None], ids=["least", "default"])
def test_reduce_overhead_over_steps(device_under_test: Device, recorded: list, window: int | None):
    """Warm-up, recording and replay."""

    def program(run: Run):
        model, x = run.module(lambda: TinyGpt(depth=1)), run.leaf(64, 64)
        step = compiled(model, mode="reduce-overhead")
        for _ in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            with run.offload(offload_window_bytes=window):
                loss = step(*tokens_and_labels(run)) + x.exp().sum()
            loss.backward()
            run.check(loss=loss, step=model)
            update(model)
        forget_graphs()
        return model

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.1, kept_reason="borrowed")
    assert recorded, "nothing was recorded: the test shows nothing"


def test_reduce_overhead_with_two_forwards_alive(device_under_test: Device, recorded: list):
    """The second forward must not be replayed into memory that the first one's backward needs."""

    def program(run: Run):
        x, weight = run.leaf(512, 512), run.parameter(512, 512)
        block = compiled(overwritten, mode="reduce-overhead")
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            with run.offload():
                losses = [block((x * scale).sin(), weight).sum() for scale in (1, 2)]
            for loss in reversed(losses):
                loss.backward()
            run.check(x=x.grad, weight=weight.grad)
            x.grad = weight.grad = None  # the next step writes over them
        forget_graphs()

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.1, kept_reason="borrowed")
    assert recorded, "nothing was recorded: the test shows nothing"


def six_steps(run: Run, block: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor) -> None:
    """Each calls the same graph three times, so that a gradient waits for its summands while the tree goes on."""
    for scale in range(1, 7):
        y = [block((x + part).sin() * scale, weight).mul(1e-3).sin().sum() for part in range(3)]
        (y[0] * 2 + y[1] + y[2]).backward()
        run.check(x=x.grad, weight=weight.grad)
        x.grad = weight.grad = None


@pytest.mark.parametrize("window", [0, None], ids=["least", "default"])
def test_reduce_overhead_inside_one_entry(device_under_test: Device, recorded: list, window: int | None):
    """Gradients wait for their summands inside autograd while the tree goes on: it must not record anew there.

    With what it saved moved, and come back elsewhere, the third step's gradient of the weight was wrong by 5%.
    """

    def program(run: Run):
        x, weight = run.leaf(512, 512), run.parameter(512, 512)
        block = compiled(overwritten, mode="reduce-overhead")
        with run.offload(offload_window_bytes=window):
            six_steps(run, block, x, weight)
        forget_graphs()

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.1, kept_reason="borrowed")
    assert recorded, "nothing was recorded: the test shows nothing"


@pytest.mark.two_gpus
def test_reduce_overhead_on_a_device_that_is_not_the_current_one(device_under_test: Device, recorded: list):
    """The tree's memory is that other device's, whose segments have to be looked at too."""
    other = torch.device("cuda:1")

    def program(run: Run):
        assert torch.cuda.current_device() == 0
        x, weight = (run.tensor(512, 512).to(other).requires_grad_() for _ in range(2))
        block = compiled(overwritten, mode="reduce-overhead")
        with run.offload():
            six_steps(run, block, x, weight)
        forget_graphs()

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.1, kept_reason="borrowed")
    assert recorded, "nothing was recorded: the test shows nothing"


def test_reduce_overhead_for_each_block_of_an_eager_model(device_under_test: Device, recorded: list):
    def program(run: Run):
        torch._dynamo.reset()
        blocks = [run.module(Block) for _ in range(3)]
        for block in blocks:
            block.compile(mode="reduce-overhead")
        x = run.leaf(2, 16, 32)
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            with run.offload():
                y = x
                for block in blocks:
                    y = block(y.sin())
                loss = y.square().sum()
            loss.backward()
            run.check(loss=loss, x=x.grad, blocks=blocks)
            for tensor in (x, *(parameter for block in blocks for parameter in block.parameters())):
                tensor.grad = None
        forget_graphs()

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.01, kept_reason="borrowed")
    assert recorded, "nothing was recorded: the test shows nothing"


def test_reduce_overhead_records_no_more_graphs_once_warm(device_under_test: Device, recorded: list):
    """One forward and one backward graph, replayed for ever, with us as without."""

    def graphs_after(steps: int, context: Callable[[], contextlib.AbstractContextManager]) -> list[int]:
        run = Run(device_under_test, stock=True, context=None)
        x, weight = run.leaf(512, 512), run.parameter(512, 512)
        block, counts, before = compiled(overwritten, mode="reduce-overhead"), [], len(recorded)
        for _ in range(steps):
            torch.compiler.cudagraph_mark_step_begin()
            with context():
                loss = block(x, weight).sum()
            torch.autograd.grad(loss, (x, weight))
            counts.append(len(recorded) - before)
        return counts

    assert graphs_after(8, contextlib.nullcontext)[-1] == 2
    torchoffload.reset_stats()
    assert graphs_after(8, device_under_test.context)[-1] == 2
    assert torchoffload.stats().bytes_kept["borrowed"] > 0
