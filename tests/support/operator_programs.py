"""operator_programs.py: programs that call operators in all ways that a mode may see differently than it should.

Each takes a leaf of 4 x 8 and returns tensors. None keeps anything between two calls.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {}


def program(function: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    PROGRAMS[function.__name__] = function
    return function


def linear(bias: bool = True) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Linear(8, 8, bias)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin() * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cos() * 2


@torch.library.custom_op("torchoffload_operator_mode::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return x.clone().mul_(3)


@triple.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


triple.register_autograd(lambda _, gradient: gradient * 3)


@torch.library.custom_op("torchoffload_operator_mode::fill", mutates_args={"into"})
def fill(x: torch.Tensor, into: torch.Tensor) -> None:
    into.copy_(x)


@program
def autocast(x):
    with torch.autocast("cpu", torch.bfloat16):
        return linear()(x)


@program
def attention(x):
    return F.scaled_dot_product_attention(x, x, x), F.scaled_dot_product_attention(x, x, x, is_causal=True)


@program
def dropout(x):
    return F.dropout(x, 0.5), F.alpha_dropout(x, 0.5), F.rrelu(x, training=True)


@program
def batch_norm(x):
    norm = nn.BatchNorm1d(8)
    y = norm(x)
    return y, norm.eval()(x), norm.running_mean


@program
def in_place_and_views(x):
    y = x * 2
    z = y.add_(1)
    assert z is y
    y[0].zero_()
    y.t().mul_(2)
    y.narrow(0, 0, 2).relu_()
    return y, y[2:].unsqueeze(0)


@program
def into_a_given_output(x):
    out = torch.empty(4, 4)
    result = torch.mm(x.detach(), x.detach().t(), out=out)
    assert result is out
    return result


@program
def several_results(x):
    values, order = x.max(1)
    mean, deviation = torch.var_mean(x)
    return values, order, mean, deviation, *torch.split(x, [1, 3]), *torch.unbind(x), *torch.sort(x, stable=True)


@program
def factories(x):
    return (
        torch.empty(3).fill_(1) + torch.zeros(3) + torch.arange(3) + torch.randn(3),
        torch.ones_like(torch.full((3,), 2.0)) + torch.tensor([1.0, 2.0, 3.0]),
        torch.rand(3, generator=torch.Generator().manual_seed(1)),
        torch.randperm(5),
    )


@program
def arguments_of_all_types(x):
    y = x.to(torch.float64, memory_format=torch.contiguous_format).sum(dtype=torch.float32)
    z = torch.nn.functional.pad(x, (1, 1), "constant", 0.5)[..., 1::2, [0, 2]]
    w = torch.where(x > 0, x, -1.5)
    w[:, torch.tensor([0])] = 2.0
    return y, z, w, x.norm(float("inf")), torch.clamp(x, min=None, max=1), x.to("cpu", torch.bool), 2**x, 1 - x


@program
def missing_tensors(x):
    return linear(bias=False)(x), F.layer_norm(x, [8]), F.batch_norm(x, None, None, training=True)


@program
def custom_function(x):
    return Twice.apply(x)


@program
def custom_operators(x):
    into = torch.zeros(4, 8)
    fill(x.detach(), into)
    return triple(x), into


@program
def vmap(x):
    return torch.func.vmap(lambda row: torch.sin(row) * row)(x.detach())


@program
def func_grad(x):
    return torch.func.grad(lambda t: (torch.sin(t) * t).sum())(x.detach())


@program
def functional_call(x):
    module = linear()
    return torch.func.functional_call(module, {"weight": module.weight * 2}, (x,))


@program
def backward_inside(x):
    y = (x.exp() * x.sigmoid()).sum()
    return torch.autograd.grad(y, x)


@program
def backward_twice_inside(x):
    (first,) = torch.autograd.grad(x.exp().sum(), x, create_graph=True)
    return first, *torch.autograd.grad(first.sum(), x, retain_graph=True)


@program
def flop_counter_inside(x):
    with FlopCounterMode(display=False) as mode:
        y = linear()(x)
    return y, torch.tensor(mode.get_total_flops())


@program
def wrapper_subclass(x):
    y = torch.sin(TwoTensor(x.detach(), x.detach() * 2)) * 2
    return y.a, y.b


@program
def jagged(x):
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)], layout=torch.jagged)
    return torch.sin(nested).values()


@program
def conjugate(x):
    z = torch.ones(3, dtype=torch.cfloat).conj()
    return torch.sin(z) * z, z.imag.neg()


@program
def fake_tensors(x):
    with FakeTensorMode() as mode:
        y = torch.sin(torch.empty(3)) @ torch.ones(3)
    return torch.ones(1) * (mode.from_tensor(torch.ones(2)) * 2).dim() + y.dim()


@program
def without_gradients(x):
    with torch.no_grad():
        return linear()(x)


@program
def in_inference(x):
    with torch.inference_mode():
        y = linear()(x.detach())
    return y.sum().item() * torch.ones(1)


@program
def on_another_thread(x):
    results: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: results.append(torch.sin(x.detach())))
    thread.start()
    thread.join()
    return results[0] + 1


@program
def sparse(x):
    return torch.sparse.mm(torch.eye(4).to_sparse(), x)


@program
def traced(x):
    graph = make_fx(lambda t: torch.sin(t) * 2)(x.detach())
    return graph(x)


@program
def a_checkpoint(x):
    return checkpoint(lambda t: torch.sin(t) * t, x, use_reentrant=False)


@program
def recurrent(x):
    layer = nn.LSTM(8, 8, 2, dropout=0.5)
    return layer(x.unsqueeze(0))[0], nn.GRU(8, 8)(x.unsqueeze(0))[0]


@program
def multi_head_attention(x):
    return nn.MultiheadAttention(8, 2)(x, x, x)[0]


@program
def convolution(x):
    return F.conv1d(x.unsqueeze(0), torch.ones(2, 4, 3), padding=1), F.max_pool1d(x.unsqueeze(0), 2)


@program
def default_device(x):
    with torch.device("cpu"):
        return torch.ones(2) + 1


@program
def hooks_of_saved_tensors(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
        return x.exp().tanh()


@program
def embedding(x):
    return F.embedding(torch.tensor([1, 2]), x), F.one_hot(torch.tensor([1, 2]), 4), F.cross_entropy(x, torch.arange(4))


@program
def quantized(x):
    return torch.dequantize(torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8))


@program
def foreach_and_lists(x):
    torch._foreach_add_(list(y := [x.detach().clone(), x.detach() * 2]), 1.0)
    return torch.cat(y), torch.stack(y), torch.einsum("ij,kj->ik", x, x), torch.block_diag(x, x)


@program
def empty_results(x):
    return x[:0].sum(), torch.nonzero(torch.zeros(3)), torch._assert_async(torch.ones(1))
