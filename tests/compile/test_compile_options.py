"""PyTorch's own memory options beside ours: each acts, and nothing is moved by both."""

import contextlib
import functools
from collections.abc import Callable

import pytest
import torch
from torch._functorch import config as functorch_config
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from devices import Device
from gradients import Run, assert_same_gradients

pytestmark = [pytest.mark.slow, pytest.mark.devices("disk", "cuda")]

WIDTH = 64
NBYTES = WIDTH * WIDTH * 4


def compiled(function: Callable, backend: str = "aot_eager") -> Callable:
    """`function` compiled anew: nothing that another run compiled is found again."""
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True)


def two_layers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    hidden = (x @ weight).sin()
    return (hidden @ weight).tanh().exp() * hidden


# ---- CheckpointPolicy ----


def cpu_offload_policy(name: str, _context, operator, *_arguments, **_keywords) -> CheckpointPolicy:
    is_product = operator is torch.ops.aten.mm.default
    return CheckpointPolicy[name] if is_product else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("policy", ["MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD"])
@pytest.mark.parametrize("mode", ["eager", "aot_eager", "inductor"])
def test_a_checkpoint_policy_of_cpu_offload_moves_nothing_twice(device_under_test: Device, mode: str, policy: str):
    if policy not in CheckpointPolicy.__members__:
        policy = "PREFER_RECOMPUTE"  # the name is new in PyTorch 2.13
    contexts = functools.partial(create_selective_checkpoint_contexts, functools.partial(cpu_offload_policy, policy))

    def program(run: Run):
        x, weight = run.leaf(WIDTH, WIDTH), run.parameter(WIDTH, WIDTH)

        def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return checkpoint(two_layers, x.exp(), weight, use_reentrant=False, context_fn=contexts).sin()

        step = forward if mode == "eager" else compiled(forward, mode)
        with run.offload():
            loss = step(x, weight).sum()
        loss.backward()
        return x.grad, weight.grad

    # At most what no checkpoint would save: x.exp(), both products, two sines, tanh, exp, and sin's operand.
    stats = assert_same_gradients(program, device=device_under_test)
    assert stats.bytes_offloaded <= 8 * NBYTES
    assert stats.records_kept.keys() <= {"parameter", "small", "in_backward"}


# ---- activation offloading in AOT ----

AOT_STREAM_OPTIONS = {
    "separate-stream": {"activation_offload_separate_stream": True},
    "sink-wait": {"activation_offload_separate_stream": True, "activation_offload_sink_wait": True},
}


def mark_products_to_offload(joint: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
        node.meta["should_offload"] = True
    return joint


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("options", AOT_STREAM_OPTIONS.values(), ids=AOT_STREAM_OPTIONS)
def test_what_aot_offloads_on_a_stream_of_its_own_is_not_moved_again(device_under_test: Device, options: dict):
    known = {name: value for name, value in options.items() if hasattr(functorch_config, name)}

    def program(run: Run):
        x, weight = run.leaf(WIDTH, WIDTH), run.parameter(WIDTH, WIDTH)
        chosen = {"enable_activation_offloading": True, "joint_custom_pass": mark_products_to_offload, **known}
        with functorch_config.patch(**chosen), torch._inductor.config.patch(force_disable_caches=True):
            block = compiled(two_layers)
            for _ in range(3):
                with run.offload():
                    loss = block(x, weight).sum()
                loss.backward()
                run.check(gradient=x.grad)
        return x.grad, weight.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.3, kept_reason="device")


# ---- saved-tensor hooks that AOT inlines ----


def hooks_of_graphs() -> saved_tensors_hooks:
    """Hooks that are graphs: AOT traces them into what it compiles, and keeps every other hook away from it."""
    pack = torch.fx.symbolic_trace(lambda tensor: tensor.to(torch.bfloat16))
    unpack = torch.fx.symbolic_trace(lambda tensor: tensor.to(torch.float32))
    return saved_tensors_hooks(pack, unpack)


def hooks_that_change_nothing() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


@pytest.mark.parametrize("mode", ["donated", "no_static", "all"])
def test_hooks_that_aot_inlines_inside_the_context_keep_what_their_region_saves(device_under_test: Device, mode: str):
    def program(run: Run):
        x, weight = run.leaf(WIDTH, WIDTH), run.parameter(WIDTH, WIDTH)
        with functorch_config.patch(saved_tensors_hooks_filtering_mode=mode):
            block = compiled(two_layers)
            with run.offload():
                hidden = x.exp()
                with hooks_of_graphs():
                    hidden = block(hidden, weight)
                loss = hidden.exp().sum()
            loss.backward()
        return x.grad, weight.grad

    # What both exp save; the region's tensors are in bfloat16 where they were.
    assert_same_gradients(program, device=device_under_test, moved_bytes=2 * NBYTES)


@pytest.mark.parametrize("mode", ["donated", "no_static", "all"])
def test_the_context_inside_hooks_that_aot_would_inline_moves_what_the_region_saves(
    device_under_test: Device, mode: str
):
    """The innermost hooks win; a region compiled with hooks inlined is not the one that runs under ours."""

    def program(run: Run):
        x, weight = run.leaf(WIDTH, WIDTH), run.parameter(WIDTH, WIDTH)
        with functorch_config.patch(saved_tensors_hooks_filtering_mode=mode):
            block = compiled(two_layers)
            with hooks_of_graphs():
                block(x, weight).sum().backward()
                with hooks_that_change_nothing() if run.stock else contextlib.nullcontext(), run.offload():
                    loss = block(x, weight).sum()
                loss.backward()
            run.check(gradient=x.grad)
            block(x, weight).sum().backward()
        return x.grad, weight.grad

    # x, its product, the sine, tanh and exp: in float32.
    assert_same_gradients(program, device=device_under_test, moved_bytes=5 * NBYTES)


# ---- what the partitioner recomputes ----

PARTITIONER_OPTIONS = {
    "budget-0": {"activation_memory_budget": 0.0},
    "budget-0.5": {"activation_memory_budget": 0.5},
    "aggressive": {"aggressive_recomputation": True},
    "views": {"recompute_views": True},
    "no-donation": {"donated_buffer": False},
}


@pytest.mark.parametrize("options", PARTITIONER_OPTIONS.values(), ids=PARTITIONER_OPTIONS)
def test_the_partitioners_options_leave_less_to_move_and_all_of_it_moves(device_under_test: Device, options: dict):
    def program(run: Run):
        x, weight = run.leaf(WIDTH, WIDTH), run.parameter(WIDTH, WIDTH)
        with functorch_config.patch(**options), torch._inductor.config.patch(force_disable_caches=True):
            block = compiled(two_layers, "inductor")
            for _ in range(2):
                with run.offload():
                    loss = block(x, weight).sum()
                loss.backward()
                run.check(gradient=x.grad)
        return x.grad, weight.grad

    stats = assert_same_gradients(program, device=device_under_test, min_moved_fraction=1.0)
    assert stats.bytes_offloaded <= 2 * 4 * NBYTES
