"""Gradients are the same wherever the context is entered and left, and whatever else goes on around it."""

import copy
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from devices import Device
from gradients import Run, assert_same_gradients
from models import TinyGpt, mlp, tokens_and_labels, update


def test_the_context_is_left_after_backward(device_under_test: Device):
    def program(run: Run):
        model, x = mlp(run), run.leaf(16, 32)
        with run.offload():
            model(x).square().sum().backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.devices("disk", "simulated-late", "simulated-early", "simulated-seeded")
def test_the_context_is_left_inside_backward(device_under_test: Device):
    """On CUDA such a hook runs on autograd's own thread, and a context is left on the thread that entered it."""

    def program(run: Run):
        model, x, context = mlp(run), run.leaf(16, 32), run.offload()
        context.__enter__()
        middle = model(x)
        middle.register_hook(lambda gradient: context.__exit__(None, None, None))
        model(middle).square().sum().backward()
        if not run.stock and torch._C._autograd._top_saved_tensors_default_hooks(False):
            # The engine gives the thread its hooks back when a node has run: what was popped in a node is there again.
            torch._C._autograd._pop_saved_tensors_default_hooks()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test)


def test_the_context_is_entered_inside_backward(device_under_test: Device):
    def program(run: Run):
        model, x = mlp(run), run.leaf(16, 32)
        with run.offload():
            middle = model(x)
            loss = model(middle).square().sum()

        def recompute(gradient: torch.Tensor) -> None:
            with torch.enable_grad(), run.offload():
                inner = model(x.detach()).sum()
            inner.backward()

        middle.register_hook(recompute)
        loss.backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.3)


@pytest.mark.parametrize("zeroed", [True, False], ids=["updated", "accumulated"])
def test_the_whole_loop_runs_inside_one_entry(device_under_test: Device, zeroed: bool):
    def program(run: Run):
        model = run.module(TinyGpt)
        with run.offload():
            for _ in range(4):
                model(*tokens_and_labels(run)).backward()
                run.check(step=model)
                if zeroed:
                    update(model)
        return model

    assert_same_gradients(program, device=device_under_test)


def test_forwards_and_backwards_alternate_inside_one_entry(device_under_test: Device):
    def program(run: Run):
        model, x = mlp(run), run.leaf(16, 32)
        with run.offload():
            first = model(x).sin().sum()
            second = model(x * 2).sum()
            second.backward()
            third = model(x * 3).square().sum()
            first.backward()
            third.backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test)


def test_contexts_nest(device_under_test: Device):
    def program(run: Run):
        model, x = mlp(run), run.leaf(16, 32)
        with run.offload():
            y = model(x)
            with run.offload():
                y = model(y)
                with run.offload():
                    y = model(y).sin()
            y = model(y)
        y.square().sum().backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test)


def test_one_context_is_entered_twice_at_once(device_under_test: Device):
    def program(run: Run):
        model, x, context = mlp(run), run.leaf(16, 32), run.offload()
        with context:
            y = model(x)
            with context:
                y = model(y)
            y = model(y)
        y.sum().backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test)


def test_nothing_moves_inside_a_no_op_manager(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            y = x.exp()  # 4096 bytes: the result
            with run.noop():
                y = y.sin() * y.cos()
            z = y.exp()  # 4096 bytes
        z.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=8192)


def test_a_no_op_manager_alone_changes_nothing_and_leaks_nothing(device_under_test: Device):
    def program(run: Run):
        model, x = mlp(run), run.leaf(16, 32)
        with run.noop():
            dropped = model(x).exp()
            loss = model(x).exp().sum()
        del dropped
        loss.backward(retain_graph=True)
        loss.backward()
        with run.offload():
            moved = x.exp()
        moved.sum().backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=16 * 32 * 4)


def test_no_grad_and_evaluation_passes_in_between(device_under_test: Device):
    def program(run: Run):
        model, x = (
            run.module(lambda: torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Dropout(0.5))),
            run.leaf(16, 32),
        )
        for _ in range(3):
            with run.offload():
                with torch.no_grad():
                    run.check(before=model(x))
                model.eval()
                run.check(evaluated=model(x).sin())  # builds a graph that is dropped
                with torch.inference_mode():
                    run.check(inferred=model(x))
                model.train()
                loss = model(x).sin().sum()
            with torch.no_grad():
                run.check(after=model(x))
            loss.backward()
            update(model)
        return model, x.grad

    assert_same_gradients(program, device=device_under_test)


def test_hooks_change_between_forward_and_backward(device_under_test: Device):
    """Another pair of hooks is in force while backward runs, and while a part of the forward runs."""

    def program(run: Run):
        model, x = mlp(run), run.leaf(16, 32)

        def double(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().clone()

        with run.offload():
            y = model(x)
            with torch.autograd.graph.saved_tensors_hooks(double, double):
                y = model(y)
            y = model(y)
        with torch.autograd.graph.saved_tensors_hooks(double, double):
            y.sum().backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test)


def test_save_on_cpu_nests_inside_and_around(device_under_test: Device):
    def program(run: Run):
        model, x = mlp(run), run.leaf(16, 32)
        with torch.autograd.graph.save_on_cpu(), run.offload():
            y = model(x)
            with torch.autograd.graph.save_on_cpu():
                y = model(y)
        y.sum().backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test)


def test_a_context_is_deep_copied_and_pickled_as_its_options(device_under_test: Device):
    def program(run: Run):
        model, x, context = mlp(run), run.leaf(16, 32), run.offload()
        copies = [copy.deepcopy(context), copy.copy(context), pickle.loads(pickle.dumps(context))]
        for each in [context, *copies]:
            with each:
                loss = model(x).exp().sum()
            loss.backward()
        return model, x.grad

    stats = assert_same_gradients(program, device=device_under_test)
    assert stats.records_offloaded % 4 == 0


def test_a_context_that_is_open_can_be_copied(device_under_test: Device):
    def program(run: Run):
        x, context = run.leaf(32, 32), run.offload()
        with context:
            y = x.exp()
            other = copy.deepcopy(context)
            y = y.exp()
        with other:
            y = y.exp()
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=3 * 4096)


def test_a_new_context_each_micro_batch_grows_nothing(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 32)
        for _ in range(40):
            with run.offload():
                y = x.exp().exp()
            (gradient,) = torch.autograd.grad(y.sum(), x)
        return gradient

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=40 * 2 * 4096)
    # Two slots at a time, each of 4096 bytes; a few more may wait for their copies' ends.
    assert stats.peak_slot_bytes <= 8 * 4096


@pytest.mark.parametrize("option", ["use_pin_memory", "use_streams"])
@pytest.mark.devices("simulated-late", "simulated-early", "simulated-seeded", "cuda")
def test_without_pinned_memory_or_streams_of_our_own(device_under_test: Device, option: str):
    def program(run: Run):
        model = run.module(TinyGpt)
        for _ in range(2):
            with run.offload(**{option: False}):
                loss = model(*tokens_and_labels(run))
            loss.backward()
            update(model)
        return model

    assert_same_gradients(program, device=device_under_test)


def test_a_copy_on_the_compute_stream_orders_none_on_ours(device_under_test: Device):
    """Both copies begin at the exit of the inner context: only the second is on offload_stream, and needs a wait."""

    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload(use_streams=False):
            h = x.exp()
            with run.offload():
                y = checkpoint(torch.sin, h, use_reentrant=False)
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=8192)
