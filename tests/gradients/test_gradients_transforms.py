"""Checkpointing, torch.compile, functorch, and tensors that are no plain ones."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from devices import Device
from gradients import Run, assert_same_gradients
from models import TinyGpt, mlp, tokens_and_labels, update


@pytest.mark.parametrize("backward", ["inside", "after"])
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_offloading_around_checkpointed_blocks(device_under_test: Device, use_reentrant: bool, backward: str):
    def program(run: Run):
        blocks, x = [mlp(run) for _ in range(3)], run.leaf(16, 32)
        for _ in range(2):
            with run.offload():
                y = x
                for block in blocks:
                    y = checkpoint(block, y, use_reentrant=use_reentrant)
                loss = y.square().sum()
                if backward == "inside":
                    loss.backward()
            if backward == "after":
                loss.backward()
        return *blocks, x.grad

    # Inside, what the recomputation packs is packed by a graph task, and stays.
    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.9 if backward == "after" else 0.05)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_offloading_inside_a_checkpointed_block(device_under_test: Device, use_reentrant: bool):
    def program(run: Run):
        model, x = mlp(run), run.leaf(16, 32)

        def block(y: torch.Tensor) -> torch.Tensor:
            with run.offload():
                return model(y).sin()

        loss = checkpoint(block, x, use_reentrant=use_reentrant).exp().sum()
        loss.backward()
        return model, x.grad

    # The recomputation's packs are a graph task's, and stay; non-reentrant, the first forward's hooks are ours.
    kept = {"moved_bytes": 0, "kept_reason": "in_backward"} if use_reentrant else {"min_moved_fraction": 0.2}
    assert_same_gradients(program, device=device_under_test, **kept)


def test_offloading_around_and_inside_nested_checkpoints_with_dropout(device_under_test: Device):
    def program(run: Run):
        model = run.module(lambda: nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.3), nn.GELU()))
        x = run.leaf(16, 32)

        def inner(y: torch.Tensor) -> torch.Tensor:
            with run.offload():
                return model(y)

        def outer(y: torch.Tensor) -> torch.Tensor:
            return checkpoint(inner, model(y), use_reentrant=False) * y

        with run.offload():
            loss = checkpoint(outer, x.exp(), use_reentrant=False).sum()
        loss.backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False], ids=["context-inside", "context-outside"])
def test_a_compiled_module(device_under_test: Device, inside: bool):
    def program(run: Run):
        torch._dynamo.reset()
        model = run.module(lambda: TinyGpt(depth=1))
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(3):
            if inside:
                with run.offload():
                    loss = compiled(*tokens_and_labels(run))
                loss.backward()
            else:
                with run.offload():
                    compiled(*tokens_and_labels(run)).exp().backward()
            run.check(loss=loss if inside else None, step=model)
            update(model)
        return model

    # A compiled region packs as one operator: its copies leave at exp's pack. Backward's own packs stay.
    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.9 if inside else 0.5)


@pytest.mark.slow
@pytest.mark.devices("disk", "cuda")
def test_a_module_compiled_by_inductor(device_under_test: Device):
    def program(run: Run):
        torch._dynamo.reset()
        model = mlp(run)
        compiled = torch.compile(model)
        x = run.leaf(16, 32)
        for _ in range(2):
            with run.offload():
                loss = compiled(x).square().sum()
            loss.backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test)


def test_vmap_inside_the_context(device_under_test: Device):
    def program(run: Run):
        x, weight = run.leaf(8, 32), run.leaf(32)
        with run.offload():
            y = torch.vmap(lambda row: (row.sin() * weight).exp() * row)(x)
        y.sum().backward()
        return x.grad, weight.grad

    assert_same_gradients(program, device=device_under_test)


def test_forward_mode_inside_the_context(device_under_test: Device):
    def program(run: Run):
        x, tangent = run.leaf(16, 16), run.tensor(16, 16)
        with run.offload(), torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            y = dual.sin().exp()
            run.check(tangent=torch.autograd.forward_ad.unpack_dual(y).tangent)
            y = torch.autograd.forward_ad.unpack_dual(y).primal
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test)


def test_functional_transforms_raise_what_they_raise_under_any_hooks(device_under_test: Device):
    """torch.func.grad refuses saved-tensor hooks; the context is not harmed by that."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)

    def program(run: Run):
        x = run.leaf(32, 32)
        with hooks if run.stock else run.offload(), run.raising("grad"):
            torch.func.grad(lambda value: value.sin().sum())(x)
        with run.offload():
            y = x.exp()
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=4096)


def test_python_subclasses_come_back_as_they_were(device_under_test: Device):
    class Named(torch.Tensor):
        pass

    def program(run: Run):
        x = run.tensor(32, 32).as_subclass(Named).requires_grad_()
        with run.offload():
            y = (x.sin() * x).exp()
        run.check(kind=type(y).__name__)
        y.sum().backward()
        return x.grad.as_subclass(torch.Tensor)

    # The result that exp saves is a plain tensor: its subclass is put on when it is returned.
    assert_same_gradients(program, device=device_under_test, moved_bytes=4096, kept_reason="layout")


def test_inference_tensors_saved_as_constants(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 32)
        with torch.inference_mode():
            mask = run.tensor(32, 32).relu()
        with run.offload():
            with run.raising("saved"):
                (x * mask).sum().backward()
            y = (x * mask.clone()).exp()
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test)


def test_lazy_modules_and_parameter_lists(device_under_test: Device):
    def program(run: Run):
        model = run.module(lambda: nn.Sequential(nn.LazyLinear(32), nn.Tanh(), nn.LazyLinear(8)))
        x = run.leaf(16, 32)
        torch.manual_seed(5)
        with torch.no_grad():
            model(x)
        for _ in range(2):
            with run.offload():
                y = model(x).exp()
            y.sum().backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test)
