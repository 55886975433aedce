"""The operations and bytes of operators, by formulas of our own where torch's are not right, and the time they take."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchoffload._estimate.cards import find_card
from torchoffload._estimate.dry_step import Operator, Setting, dry_step
from torchoffload._estimate.operators import Cost
from torchoffload._estimate.rates import seconds_of

H200 = find_card("H200")


class Calls(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.function(*args)


def operators(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> list[Operator]:
    setting = Setting(loss=lambda output: output.float().sum())
    return dry_step(Calls(function), tuple(each.requires_grad_() for each in args), {}, setting).operators


def flops(name: str, function: Callable[..., torch.Tensor], *args: torch.Tensor) -> list[int]:
    return [each.cost.flops for each in operators(function, *args) if name in str(each.operator)]


def test_a_product_has_two_operations_for_each_pair():
    assert flops("aten.mm", torch.mm, torch.randn(3, 5), torch.randn(5, 7)) == [2 * 3 * 5 * 7] * 3


def test_a_convolution_of_groups_has_as_many_operations_backward_for_each_gradient():
    x, weight = torch.randn(2, 8, 10, 10), torch.randn(8, 1, 3, 3)
    found = flops("convolution", lambda x, weight: F.conv2d(x, weight, padding=1, groups=8), x, weight)
    one = 2 * (2 * 8 * 10 * 10) * 9
    assert found == [one, 2 * one]


def test_a_transposed_convolution():
    x, weight = torch.randn(2, 8, 10, 10), torch.randn(8, 4, 2, 2)
    found = flops("convolution", lambda x, weight: F.conv_transpose2d(x, weight, stride=2), x, weight)
    assert found == [2 * (2 * 8 * 10 * 10) * 4 * 4, 2 * 2 * (2 * 8 * 10 * 10) * 4 * 4]


@pytest.mark.parametrize("is_causal", [False, True])
def test_causal_attention_is_half_and_backward_has_five_products(is_causal: bool):
    heads = [torch.randn(2, 4, 128, 16, dtype=torch.bfloat16) for _ in range(3)]
    found = flops("attention", lambda *heads: F.scaled_dot_product_attention(*heads, is_causal=is_causal), *heads)
    product = 2 * 2 * 4 * 128 * 128 * 16 // (2 if is_causal else 1)
    assert found == [2 * product, 5 * product]


def test_attention_of_grouped_queries_counts_the_heads_of_queries():
    q = torch.randn(1, 8, 64, 16, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 2, 64, 16, dtype=torch.bfloat16) for _ in range(2))
    found = flops("attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), q, k, v)
    assert found[0] == 2 * 2 * 8 * 64 * 64 * 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_grouped_product(dtype: torch.dtype):
    x, weights = torch.randn(32, 16, dtype=dtype), torch.randn(4, 16, 24, dtype=dtype)
    ends = torch.tensor([8, 16, 24, 32], dtype=torch.int32)
    found = flops("_grouped_mm", lambda x, weights: torch._grouped_mm(x, weights, offs=ends), x, weights)
    assert found[0] == 2 * 32 * 16 * 24
    assert len(found) == 3


def test_views_cost_nothing_and_additions_move_bytes():
    x = torch.randn(64, 64)
    costs = {str(each.operator): each.cost for each in operators(lambda x: x.view(-1).reshape(64, 64).t() + 1, x)}
    assert costs["aten.add.Tensor"].nbytes == 2 * x.nbytes
    assert not any("view" in name for name, cost in costs.items() if cost.nbytes)


def test_an_embedding_reads_the_rows_that_it_returns():
    table, rows = nn.Embedding(10_000, 8), torch.zeros(4, dtype=torch.long)
    trace = dry_step(table, (rows,), {}, Setting(loss=lambda output: output.sum()))
    cost = next(each.cost for each in trace.operators if "embedding." in str(each.operator))
    assert cost.nbytes == 2 * 4 * 8 * 4


def cost(kind: str = "product", *, flops: int = 0, nbytes: int = 1, smallest: int = 4096, **more: object) -> Cost:
    return Cost(kind, flops, nbytes, smallest, more.pop("dtype", torch.bfloat16), **more)  # type: ignore[arg-type]


def test_an_operator_takes_as_long_as_the_slowest_of_computing_memory_and_launch():
    launch = seconds_of(cost("other"), H200)
    assert 1e-6 < launch < 1e-5
    assert seconds_of(cost("other", nbytes=48 * 10**9), H200) == pytest.approx(0.01 / 0.75)
    assert seconds_of(cost(flops=10**13), H200) > 10**13 / (H200.half_tflops * 1e12)
    assert seconds_of(cost("other", nbytes=0), H200) == 0


def test_small_products_and_short_attention_are_less_efficient():
    assert seconds_of(cost(flops=10**13, smallest=64), H200) > 3 * seconds_of(cost(flops=10**13), H200)
    short, long = (cost("attention", flops=10**13, smallest=64, length=each) for each in (512, 65_536))
    assert seconds_of(short, H200) > seconds_of(long, H200)


def test_float32_is_slower_and_a_card_without_bfloat16_computes_in_float32():
    full, half = cost(flops=10**13, dtype=torch.float32), cost(flops=10**13)
    assert seconds_of(full, H200) > 10 * seconds_of(half, H200)
    t4 = find_card("T4")
    assert seconds_of(half, t4) == seconds_of(full, t4) > seconds_of(cost(flops=10**13, dtype=torch.float16), t4)
