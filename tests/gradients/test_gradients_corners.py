"""Corners of PyTorch: tracers, checkers, modes, custom operators, hooks of a graph."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from devices import Device
from gradients import Run, assert_same_gradients
from models import mlp

# ---- checkers, Jacobians, batched gradients ----


def test_gradcheck_inside_the_context(device_under_test: Device):
    def program(run: Run):
        x, w = run.leaf(6, 5, dtype=torch.float64), run.leaf(5, 6, dtype=torch.float64)

        def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ w).exp()

        with run.offload():
            return (
                torch.autograd.gradcheck(function, (x, w), check_forward_ad=True, check_batched_grad=True),
                torch.autograd.gradcheck(function, (x, w), fast_mode=True),
                torch.autograd.gradgradcheck(function, (x, w), check_batched_grad=True),
            )

    # Each backward stands inside the context: what it packs stays, and what it asks for at once is still pending.
    reasons = ("in_backward", "pending")
    assert_same_gradients(program, device=device_under_test, kept_reason=reasons, min_moved_fraction=0.3)


def test_batched_gradients(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            y = (x.sin() * x).exp()
        return torch.autograd.grad(y, x, grad_outputs=run.tensor(5, 32, 32), is_grads_batched=True)

    assert_same_gradients(program, device=device_under_test)


def test_jacobians_and_hessians_inside_the_context(device_under_test: Device):
    def program(run: Run):
        x, w = run.leaf(8), run.leaf(8, 8)
        functional = torch.autograd.functional

        def function(x: torch.Tensor) -> torch.Tensor:
            return (w @ x).sin().exp()

        with run.offload():
            return (
                functional.jacobian(function, x),
                functional.jacobian(function, x, vectorize=True),
                functional.hessian(lambda x: function(x).sum(), x),
                functional.hvp(lambda x: function(x).sum(), x, x),
                functional.jvp(function, x, x),
            )

    assert_same_gradients(program, device=device_under_test, kept_reason="in_backward", min_moved_fraction=0.3)


# ---- modes, tracers, the profiler ----


class Counting(TorchDispatchMode):
    """Counts the operators that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is not torch.ops.aten.detach.default  # autograd's own, more of them under any hooks
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_around_and_inside(device_under_test: Device):
    def program(run: Run):
        x, w = run.leaf(32, 32), run.leaf(32, 32)
        with FlopCounterMode(display=False) as flops, Counting() as around, run.offload():
            with Counting() as inside:
                y = ((x @ w).sin() * x).exp()
            z = y.square()
            z.sum().backward()
        return x.grad, w.grad, flops.get_total_flops(), around.count, inside.count

    # z asks for y at once: backward follows straight.
    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.7)


@pytest.mark.devices("disk", "cuda")
def test_the_profiler_around_the_context(device_under_test: Device):
    def program(run: Run):
        x, w = run.leaf(32, 32), run.leaf(32, 32)
        with torch.profiler.profile(record_shapes=True, profile_memory=True):
            with run.offload():
                y = ((x @ w).sin() * x).exp()
            y.sum().backward()
        return x.grad, w.grad

    assert_same_gradients(program, device=device_under_test)


def test_a_traced_function_trains_inside_the_context(device_under_test: Device):
    def program(run: Run):
        x, w = run.leaf(32, 32), run.leaf(32, 32)
        with run.offload():
            traced = torch.jit.trace(lambda x, w: (x * w).sin().exp(), (x, w), check_trace=False)
            y = traced(x, w)
        y.sum().backward()
        return x.grad, w.grad

    assert_same_gradients(program, device=device_under_test)


def test_export_inside_the_context(device_under_test: Device):
    """The exported graph is the same one, operator by operator, and what it computes trains."""

    def program(run: Run):
        model, x = mlp(run), run.leaf(16, 32)
        with run.offload():
            exported = torch.export.export(model, (x,))
            y = exported.module()(x).exp()
        run.check(graph=str(exported.graph))
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.3)


def test_fake_tensors_inside_the_context(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            y = (x * x).exp()
            with FakeTensorMode():
                fake = torch.empty(8, 8, requires_grad=True)
                (fake * fake).exp().sum().backward()
        y.sum().backward()
        return fake.grad.shape, x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=2 * 4096, kept_reason="layout")


@pytest.mark.slow
@pytest.mark.devices("disk", "cuda")
def test_control_flow_operators(device_under_test: Device):
    def program(run: Run):
        torch.compiler.reset()
        x, w, rows = run.leaf(32, 32), run.leaf(32, 32), run.leaf(4, 32, 32)
        with run.offload():
            y = torch.cond(x.sum() > 0, lambda x: (x.sin() * x).exp(), lambda x: (x.cos() * x).exp(), (x,))
            z = torch._higher_order_ops.map(lambda row, w: (row @ w).sin(), rows, w)
            loss = y.square().sum() + z.square().sum()
        loss.backward()
        return x.grad, w.grad, rows.grad

    assert_same_gradients(program, device=device_under_test, kept_reason="layout")


# ---- custom operators ----


def test_a_custom_operator_with_its_own_backward(device_under_test: Device):
    def multiply(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x * w).sin()

    def setup(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, w, output = ctx.saved_tensors
        return gradient * output * w, gradient * output * x

    name = f"torchoffload_tests::multiply_{device_under_test.name.replace('-', '_')}"
    operator = torch.library.custom_op(name, multiply, mutates_args=())
    operator.register_autograd(backward, setup_context=setup)

    def program(run: Run):
        x, w = run.leaf(32, 32), run.leaf(32, 32)
        with run.offload():
            y = operator(x, w).exp()
        y.sum().backward()
        return x.grad, w.grad

    # x, w, the operator's result, and that of exp.
    assert_same_gradients(program, device=device_under_test, moved_bytes=4 * 4096)


def test_out_variants_and_foreach_write_to_what_was_saved(device_under_test: Device):
    def program(run: Run):
        x, buffer, other = run.leaf(32, 32), run.tensor(32, 32), run.tensor(32, 32)
        with run.offload():
            first = (x * buffer).exp()
            torch.add(run.tensor(32, 32), 1, out=buffer)
            second = (x * buffer).sin()
            third = x * other
            torch._foreach_add_([other], 1.0)
        for name, y in (("first", first), ("second", second), ("third", third)):
            with run.raising(name):
                y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test)


# ---- hooks and edges of the graph ----


def test_hooks_on_tensors_and_nodes_and_gradient_edges(device_under_test: Device):
    def program(run: Run):
        x, w = run.leaf(32, 32), run.leaf(32, 32)
        seen = []
        x.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.sum()))
        with run.offload():
            h = x * w
            h.retain_grad()
            y = h.exp()
            y.register_hook(lambda gradient: gradient * 3)
            y.grad_fn.register_prehook(lambda gradients: (gradients[0] * 2,))
        both = torch.autograd.graph.register_multi_grad_hook((h, y), lambda given: seen.extend(g.sum() for g in given))
        edge = torch.autograd.graph.get_gradient_edge(y)
        y.sum().backward(retain_graph=True)
        both.remove()  # it knows no torch.autograd.grad
        gradients = torch.autograd.grad(edge, (x, w), run.tensor(32, 32))
        return x.grad, w.grad, h.grad, gradients, seen

    assert_same_gradients(program, device=device_under_test)


def test_what_was_saved_is_read_and_used_again(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            y = x.exp()
            z = y * y
        with run.offload():
            q = y.grad_fn._saved_result.sin() + z.grad_fn._saved_self.exp()
        (q.sum() + z.sum()).backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test)


def test_mutation_that_pytorch_allows_inside_the_context(device_under_test: Device):
    """`allow_mutation_on_saved_tensors` has hooks of its own: the innermost win."""

    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload():
            y = (x * x).exp()
            y = y.sin()
            with torch.autograd.graph.allow_mutation_on_saved_tensors():
                b = x * 2
                z = (b * b).exp()
                b.sin_()
                z.sum().backward()
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test)


def test_checkpoint_with_dropout_keeps_its_random_state(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 32)
        torch.manual_seed(3)
        with run.offload():
            y = checkpoint(lambda t: F.dropout(t.exp(), 0.3) @ t, x, use_reentrant=False)
            z = y.square()
        z.mean().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.3)
