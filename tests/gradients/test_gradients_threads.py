"""Two threads, streams that are not the default one, and the garbage collector inside a pack."""

import gc
import queue
import threading
from collections.abc import Callable

import pytest
import torch

from devices import Device
from gradients import Run, assert_same_gradients, eager_collector
from models import TinyGpt, mlp, tokens_and_labels


def in_threads(*works: Callable[[], None]) -> None:
    """Runs each in a thread of its own, and raises here what one of them raised."""
    errors = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


@pytest.mark.parametrize("one_context", [True, False], ids=["one-context", "a-context-each"])
def test_two_models_on_two_threads(device_under_test: Device, one_context: bool):
    def program(run: Run):
        models = [run.module(TinyGpt) for _ in range(2)]
        batches = [[tokens_and_labels(run) for _ in range(4)] for _ in models]
        context = run.offload()

        def train(index: int) -> None:
            for batch in batches[index]:
                with context if one_context else run.offload():
                    loss = models[index](*batch)
                loss.backward()

        in_threads(lambda: train(0), lambda: train(1))
        return models

    assert_same_gradients(program, device=device_under_test)


def test_backward_runs_on_another_thread(device_under_test: Device):
    def program(run: Run):
        models = [mlp(run) for _ in range(2)]
        inputs = [[run.leaf(16, 32) for _ in range(5)] for _ in models]
        losses: queue.Queue = queue.Queue()

        def forward(index: int) -> None:
            for x in inputs[index]:
                with run.offload():
                    loss = models[index](x).square().sum()
                losses.put(loss)

        def backward() -> None:
            for _ in range(10):
                losses.get(timeout=30).backward()

        in_threads(lambda: forward(0), lambda: forward(1), backward)
        return [[x.grad for x in each] for each in inputs]

    assert_same_gradients(program, device=device_under_test)


def test_forward_on_a_thread_that_is_gone_before_backward(device_under_test: Device):
    def program(run: Run):
        model, x, losses = mlp(run), run.leaf(16, 32), []

        def forward() -> None:
            with run.offload():
                losses.append(model(x).square().sum())

        for _ in range(3):
            in_threads(forward)
        for loss in losses:
            loss.backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test)


def test_a_thread_ends_inside_the_context_with_copies_pending(device_under_test: Device):
    def program(run: Run):
        model, x, losses = mlp(run), run.leaf(16, 32), []

        def forward() -> None:
            context = run.offload()
            context.__enter__()  # never left: the thread is gone with its hooks
            losses.append(model(x).exp().sum())

        for _ in range(2):
            in_threads(forward)
        for loss in losses:
            loss.backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5)


def test_saved_tensors_are_read_by_two_threads_at_once(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(64, 64)
        with run.offload():
            outputs = [x.exp() for _ in range(8)]
            outputs = [y.sin() for y in outputs]
        seen: list[list[torch.Tensor]] = [[], []]

        def read(index: int) -> None:
            for _ in range(3):
                for y in outputs if index else reversed(outputs):
                    seen[index].append(y.grad_fn._saved_self + 0)

        in_threads(lambda: read(0), lambda: read(1))
        sum(outputs).sum().backward()
        return x.grad, seen

    assert_same_gradients(program, device=device_under_test)


def test_graphs_are_dropped_on_another_thread_while_one_packs(device_under_test: Device):
    def program(run: Run):
        x, dropped = run.leaf(32, 32), queue.Queue()

        def forward() -> None:
            for _ in range(12):
                with run.offload():
                    dropped.put(x.exp().sin().exp())
            dropped.put(None)

        def drop() -> None:
            while dropped.get(timeout=30) is not None:
                pass

        in_threads(forward, drop)
        with run.offload():
            y = x.exp()
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test)


class Cycle:
    """Garbage that only the collector finds, holding a graph with handles."""

    def __init__(self, graph: torch.Tensor) -> None:
        self.graph = graph
        self.itself = self


def test_handles_die_inside_a_pack(device_under_test: Device):
    def program(run: Run):
        model, x = mlp(run), run.leaf(16, 32)
        for _ in range(4):
            with run.offload():
                garbage = Cycle(model(x).exp())
            del garbage  # its handles die when the collector happens to run, which the next packs make it do
            with run.offload(), eager_collector():
                loss = model(x).square().sum()
                Cycle(model(x))
                loss = loss + model(x * 2).sum()
            with eager_collector():
                loss.backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test)


def test_handles_die_inside_a_backward_of_their_own_kind(device_under_test: Device):
    def program(run: Run):
        model, x = mlp(run), run.leaf(16, 32)
        for _ in range(3):
            with run.offload():
                cycles = [Cycle(model(x)) for _ in range(3)]
                loss = model(x).exp().sum()
            del cycles
            with eager_collector():
                loss.backward(retain_graph=True)
                loss.backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test)


def test_a_collection_inside_pack_runs_a_whole_other_step(device_under_test: Device):
    """A finalizer that the collector runs may itself pack and unpack."""

    class StepInFinalizer:
        def __init__(self, step: Callable[[], None]) -> None:
            self.step, self.itself = step, self

        def __del__(self) -> None:
            self.step()

    def program(run: Run):
        model, x, other = mlp(run), run.leaf(16, 32), run.leaf(32, 32)

        def step() -> None:
            with run.offload():
                y = other.exp().sin()
            y.sum().backward()

        for _ in range(2):
            StepInFinalizer(step)
            with run.offload(), eager_collector():
                loss = model(x).square().sum()
            loss.backward()
            gc.collect()
        return model, x.grad, other.grad

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.devices("simulated-late", "simulated-early", "simulated-seeded", "cuda")
def test_forward_backward_and_allocation_on_three_streams(device_under_test: Device):
    def program(run: Run):
        forward, backward, other = (new_stream(run) for _ in range(3))
        model = mlp(run)
        for _ in range(2):
            with on_stream(run, other):
                x = run.leaf(16, 32)
                scale = run.tensor(16, 32)
            wait_stream(run, forward, other)
            with on_stream(run, forward), run.offload():
                loss = ((model(x) * scale).exp() * x).sum()
            wait_stream(run, backward, forward)
            with on_stream(run, backward):
                loss.backward()
            wait_stream(run, None, forward)
            wait_stream(run, None, backward)
            run.check(model=model, gradient=x.grad)
            wait_stream(run, other, None)

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.devices("simulated-late", "simulated-early", "simulated-seeded", "cuda")
def test_a_saved_tensor_is_read_on_another_stream_and_dropped_at_once(device_under_test: Device):
    def program(run: Run):
        side = new_stream(run)
        x = run.leaf(32, 32)
        with run.offload():
            y = x.exp().sin()
        wait_stream(run, side, None)
        with on_stream(run, side):
            copied = y.grad_fn._saved_self + 1
            again = y.grad_fn._saved_self * 2
        wait_stream(run, None, side)
        run.check(copied=copied, again=again)
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=4096)


def new_stream(run: Run):
    return run.simulation.new_stream() if run.simulation else torch.cuda.Stream()


def on_stream(run: Run, stream):
    return run.simulation.stream(stream) if run.simulation else torch.cuda.stream(stream)


def wait_stream(run: Run, waiter, producer) -> None:
    """None is the stream that is current."""
    if run.simulation:
        current = run.simulation.current_stream()
        (waiter or current).wait_stream(producer or current)
    else:
        current = torch.cuda.current_stream()
        (waiter or current).wait_stream(producer or current)
