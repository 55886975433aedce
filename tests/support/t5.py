"""A T5 whose attention is that of transformers 5.17, under any later version of transformers."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["t5_model"]


def permuted_bias_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    *, dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention as in transformers 5.17, which gives T5's position bias on as it lies: a permuted table.

    5.23 makes it contiguous, so that PyTorch has a fused kernel for it.
    """
    if position_bias is not None and mask is None and (module.is_causal if is_causal is None else is_causal):
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if position_bias is not None:
        mask = position_bias if mask is None else torch.where(mask, position_bias, torch.finfo(query.dtype).min)
    output = F.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scaling)
    return output.transpose(1, 2).contiguous(), None


def t5_model(**options: Any) -> nn.Module:
    """A T5 with such attention."""
    from transformers import AttentionInterface, AttentionMaskInterface, T5Config, T5ForConditionalGeneration
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("permuted_bias", permuted_bias_attention)
    AttentionMaskInterface.register("permuted_bias", sdpa_mask)
    config = T5Config(
        use_cache=False, decoder_start_token_id=0, pad_token_id=0, attn_implementation="permuted_bias", **options
    )
    return T5ForConditionalGeneration(config)
