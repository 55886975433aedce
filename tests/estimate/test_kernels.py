"""Attention that no fused kernel of a GPU takes, and encoder-decoders with it: an estimate saves what a step saves."""

import functools
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

import torchoffload
from torchoffload._estimate.dry_step import Setting, dry_step
from torchoffload._estimate.kernels import _attention_by_math

MATH = torch.ops.aten._scaled_dot_product_attention_math


def heads(
    dtype: torch.dtype, *, length: int = 24, size: int = 16, groups: int = 4
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A query, a key, a value, and a bias of each head that lies as a permuted table."""
    torch.manual_seed(0)
    query = torch.randn(2, 4, length, size, dtype=dtype, requires_grad=True)
    key, value = (torch.randn(2, groups, 40, size, dtype=dtype, requires_grad=True) for _ in range(2))
    return query, key, value, torch.randn(length, 40, 4, dtype=dtype, requires_grad=True).permute(2, 0, 1).unsqueeze(0)


def saved_sizes(function: functools.partial[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    found: dict[int, int] = {}
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor.untyped_storage())
        found[held[-1]._cdata] = held[-1].nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function()
    return output, sorted(found.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", ["none", "bias", "bool", "causal"])
@pytest.mark.parametrize("groups", [4, 2])
def test_attention_by_math_computes_and_saves_as_pytorchs(dtype: torch.dtype, mask: str, groups: int):
    query, key, value, bias = heads(dtype, groups=groups)
    given = {"bias": bias, "bool": torch.ones(24, 40, dtype=torch.bool).tril()}.get(mask)
    is_causal, has_groups = mask == "causal", groups != 4
    ours, our_sizes = saved_sizes(
        functools.partial(_attention_by_math, query, key, value, given, 0.0, is_causal, 0.5, has_groups)
    )
    additive = given
    if mask == "bool":  # scaled_dot_product_attention makes it a sum before it calls the operator
        additive = torch.zeros(24, 40, dtype=dtype).masked_fill_(~given, float("-inf"))
    operator = functools.partial(MATH, query, key, value, additive, 0.0, is_causal, scale=0.5, enable_gqa=has_groups)
    theirs, their_sizes = saved_sizes(lambda: operator()[0])
    torch.testing.assert_close(ours, theirs)
    assert our_sizes == their_sizes


PERMUTED = object()


def attention_saves(length: int, size: int, *, dropout: float = 0.0, bias: object = PERMUTED) -> int:
    """The bytes that a dry step of attention saves."""

    class Attention(nn.Module):
        def forward(self, query, key, value, bias):
            return F.scaled_dot_product_attention(query, key, value, bias, dropout)

    *arguments, permuted = heads(torch.bfloat16, length=length, size=size)
    arguments.append(permuted if bias is PERMUTED else bias)
    setting = Setting(loss=lambda output: output.float().sum())
    return dry_step(Attention(), tuple(arguments), {}, setting).saved_bytes


def test_dropout_of_attention_by_math_has_a_mask_of_one_byte_and_a_result_of_four():
    weights = 2 * 4 * 24 * 40
    assert attention_saves(24, 16, dropout=0.1) - attention_saves(24, 16) == weights * (1 + 4)


def test_heads_that_the_efficient_kernel_cannot_read_go_by_math():
    """It wants heads of a multiple of 8 in bfloat16; flash attention, without a mask, pads them."""
    weights_bytes = 4 * 2 * 4 * 1024 * 40
    bias = torch.zeros(1, 4, 1024, 40, dtype=torch.bfloat16)
    assert attention_saves(1024, 12, bias=bias) >= weights_bytes
    assert attention_saves(1024, 16, bias=bias) < weights_bytes
    assert attention_saves(1024, 12, bias=None) < weights_bytes


@pytest.mark.parametrize(("attention", "dtype"), [("permuted_bias", torch.bfloat16), ("eager", torch.float32)])
def test_a_t5_is_estimated_to_save_what_the_counters_of_a_step_say(attention: str, dtype: torch.dtype, tmp_path: Path):
    """Without dropout, whose masks are larger on a CPU."""
    pytest.importorskip("transformers")
    from t5 import t5_model

    sizes = {
        "vocab_size": 200,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "num_decoder_layers": 1,
    }
    model = t5_model(**sizes, dropout_rate=0.0).to(dtype)
    model.set_attn_implementation(attention)
    batch = {"input_ids": torch.randint(2, 200, (4, 96)), "labels": torch.randint(2, 200, (4, 40))}
    estimated = dry_step(model, (), batch, Setting()).saved_bytes
    torchoffload.reset_stats()
    with torchoffload.OffloadActivations(tier="disk", disk_dir=tmp_path, learn=False, min_offload_size=0, model=model):
        loss = model(**batch).loss
    loss.backward()
    counted = torchoffload.stats()
    kept = sum(nbytes for reason, nbytes in counted.bytes_kept.items() if reason != "parameter")
    assert estimated == pytest.approx(counted.bytes_offloaded + kept, rel=0.02)
