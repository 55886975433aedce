"""What is held, and when it is let go: records, handles, slots and device memory after every end a graph can have."""

import gc
import weakref

import pytest
import torch

import torchoffload
from devices import Device
from functions import Fails, Save
from gradients import Live, Run, assert_same_gradients, settled
from models import mlp


def test_a_graph_dropped_without_backward_gives_everything_back(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 32)
        for _ in range(3):
            with run.offload():
                y = x.exp().exp().exp()
            del y
        with run.offload():
            y = x.exp()
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=(3 * 3 + 1) * 4096)


def test_a_graph_dropped_inside_the_context_gives_everything_back(device_under_test: Device):
    """Its last record is dropped with the copy pending: nothing is read after."""

    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            for _ in range(5):
                y = x.exp().exp()
                del y
            y = x.exp()
        y.sum().backward()
        return x.grad

    # Of the two results of each round the first is out when the second is packed; the second dies pending.
    assert_same_gradients(program, device=device_under_test, moved_bytes=(5 + 1) * 4096)


def test_counters_are_zero_after_backward_and_with_the_loss_still_held(device_under_test: Device):
    with device_under_test.scope():
        live = Live.now()
        x = torch.ones(32, 32, device=device_under_test.torch_device, requires_grad=True)
        with device_under_test.context():
            loss = x.exp().sin().sum()
        held = Live.now()
        assert (held.handles, held.records, held.slots) == (live.handles + 2, live.records + 1, live.slots + 1)
        loss.backward()
        assert settled(live) == live
        del loss


def test_retain_graph_holds_records_until_the_graph_goes(device_under_test: Device):
    with device_under_test.scope():
        live = Live.now()
        x = torch.ones(32, 32, device=device_under_test.torch_device, requires_grad=True)
        with device_under_test.context():
            loss = x.exp().exp().sum()
        for _ in range(3):
            loss.backward(retain_graph=True)
            assert Live.now().records == live.records + 2
            assert Live.now().slots == live.slots + 2
        del loss
        assert settled(live) == live


def test_an_exception_in_forward(device_under_test: Device):
    def program(run: Run):
        x, fails, context = run.leaf(32, 32), [True], run.offload()
        for step in range(3):
            fails[0] = step < 2
            with run.raising("forward"), context:
                y = Fails.apply(x.exp() * 2, "forward", fails)
                y.sin().sum().backward()
            run.check(gradient=x.grad)
        with context:
            y = x.exp()
        y.sum().backward()
        return x.grad

    # On CUDA backward runs on a thread of its own, so what the last operator before it packed is still pending.
    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.8)


def test_an_exception_in_backward(device_under_test: Device):
    def program(run: Run):
        x, fails, context = run.leaf(32, 32), [True], run.offload()
        for step in range(3):
            fails[0] = step < 2
            with context:
                y = Fails.apply(x.exp() * 2, "backward", fails).sin()
            with run.raising("backward"):
                y.sum().backward()
            run.check(gradient=x.grad)
        return x.grad

    assert_same_gradients(program, device=device_under_test)


def test_an_exception_in_backward_inside_the_context_and_backward_again(device_under_test: Device):
    def program(run: Run):
        x, fails = run.leaf(32, 32), [True]
        with run.offload():
            y = Fails.apply(x.exp() * 2, "backward", fails).sin()
            with run.raising("first"):
                y.sum().backward(retain_graph=True)
            fails[0] = False
            y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.6)


def test_an_exception_in_a_hook_of_a_tensor(device_under_test: Device):
    def program(run: Run):
        x, context = run.leaf(32, 32), run.offload()

        def fail(gradient: torch.Tensor) -> None:
            raise KeyError("planted in a hook")

        with context:
            a = x.exp()
            a.register_hook(fail)
            y = a.sin().exp()
        with run.raising("backward"):
            y.sum().backward()
        with context:
            y = x.exp()
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test)


def test_a_base_exception_leaves_the_context_right(device_under_test: Device):
    def program(run: Run):
        x, context = run.leaf(32, 32), run.offload()
        try:
            with context:
                y = x.exp().exp()
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        y.sum().backward()
        with context:
            y = x.exp()
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=3 * 4096)


def test_the_context_dies_before_backward(device_under_test: Device):
    def program(run: Run):
        model, x = mlp(run), run.leaf(16, 32)
        context = run.offload()
        with context:
            y = model(x)
        alive = weakref.ref(context)
        del context
        gc.collect()
        assert run.stock or alive() is None
        y.sum().backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test)


def test_the_model_dies_before_backward(device_under_test: Device):
    def program(run: Run):
        model, x = mlp(run), run.leaf(16, 32)
        with run.offload():
            y = model(x)
        del model
        gc.collect()
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test)


def test_a_model_and_its_graph_in_a_cycle_are_collected(device_under_test: Device):
    def program(run: Run):
        model, x = mlp(run), run.leaf(16, 32)
        with run.offload():
            model.last = model(x).exp()
            model.last.itself = model
        model.last.sum().backward(retain_graph=True)
        alive = weakref.ref(model)
        run.check(gradient=x.grad)
        del model
        gc.collect()
        assert alive() is None, "the graph, its handles and the model are collectable"

    assert_same_gradients(program, device=device_under_test)


def test_a_result_that_is_saved_makes_no_cycle(device_under_test: Device):
    """exp saves its own result: with the packed tensor itself held, the node would hold itself."""
    with device_under_test.scope():
        live = Live.now()
        gc.collect()
        gc.disable()
        try:
            x = torch.ones(32, 32, device=device_under_test.torch_device, requires_grad=True)
            for options in ({}, {"min_offload_size": 1 << 20}):
                with device_under_test.context(**options):
                    y = x.exp()
                    z = Save.apply(x, lambda unpacked: None, y)
                del y, z
            with torchoffload.NoOpManager():
                y = x.exp()
            alive = weakref.ref(y)
            del y
            assert alive() is None
            assert Live.now().handles == live.handles, "without the collector"
        finally:
            gc.enable()


def test_a_moved_sources_memory_is_free_after_forward(device_under_test: Device):
    if device_under_test.name == "disk":
        pytest.skip("CPU memory is not counted; test_memory_limit.py has the disk tier's")
    with device_under_test.scope() as simulation:
        device = device_under_test.torch_device

        def allocated() -> int:
            return simulation.allocated_bytes() if simulation else torch.cuda.memory_allocated()

        x = torch.ones(64, 1024, device=device, requires_grad=True)
        before = allocated()
        with device_under_test.context(offload_window_bytes=0):
            y = x
            for _ in range(8):
                y = y.sigmoid()
        y = y.sum()
        held = allocated() - before
        assert held < 2 * x.nbytes, f"{held} bytes are held of the {8 * x.nbytes} that were saved"
        y.backward()
        del y
        x.grad = None
        gc.collect()
        assert allocated() == before


def test_reload_buffers_do_not_stay_with_a_retained_graph(device_under_test: Device):
    if device_under_test.name == "disk":
        pytest.skip("CPU memory is not counted")
    with device_under_test.scope() as simulation:

        def allocated() -> int:
            return simulation.allocated_bytes() if simulation else torch.cuda.memory_allocated()

        x = torch.ones(64, 1024, device=device_under_test.torch_device, requires_grad=True)
        x.grad = torch.zeros_like(x)
        with device_under_test.context(offload_window_bytes=0, reload_window_bytes=0):
            y = x
            for _ in range(8):
                y = y.sigmoid()
            y = y.sum()
        before = allocated()
        for _ in range(3):
            y.backward(retain_graph=True)
            assert allocated() - before < 2 * x.nbytes
        del y


def test_five_hundred_steps_end_where_they_began(device_under_test: Device):
    with device_under_test.scope():
        live, device = Live.now(), device_under_test.torch_device
        weight = torch.nn.Parameter(torch.eye(32, device=device))
        x, context, alive = torch.ones(16, 32, device=device), device_under_test.context(), []
        for step in range(500):
            with context if step % 2 else device_under_test.context():
                y = (x @ weight).sin().exp()
                z = (y @ weight.t()).sigmoid()
            alive.append(z.sum())
            if step % 7 == 3:
                alive.clear()
            elif step % 3 == 0:
                alive.pop(len(alive) // 2).backward()
            if step == 100:
                early = torchoffload.stats()
        del y, z
        alive.clear()
        assert settled(live) == live
        stats = torchoffload.stats()
        assert stats.live_tapes == 0
        assert stats.budget_bytes_used == 0
        assert stats.slot_bytes == 0
        assert stats.pinned_bytes <= max(early.pinned_bytes, 64 << 20)


def test_trim_gives_idle_memory_back_and_later_steps_are_right(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(64, 64)
        for _ in range(3):
            with run.offload():
                y = x.exp().exp()
            if not run.stock:
                torchoffload.trim()  # with slots in use
            y.sum().backward()
            if not run.stock:
                torchoffload.trim()
        return x.grad

    torchoffload.trim()
    held_bytes = torchoffload.stats().pinned_bytes  # a test of failing devices loses a slot for good
    assert_same_gradients(program, device=device_under_test, moved_bytes=3 * 2 * 64 * 64 * 4)
    torchoffload.trim()
    if device_under_test.name != "disk":
        assert torchoffload.stats().pinned_bytes == held_bytes
