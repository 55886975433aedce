"""architectures.py: a tiny model of each architecture of transformers, as far as it needs no weights or packages.

A configuration is the class's own with its sizes made small, by the names that configurations share. ``NotMade`` says
why an architecture cannot be made or run so.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["Architecture", "NotMade", "make_architecture", "model_types"]

_SMALL = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embed_dim": 32, "embedding_size": 32, "d_embed": 32,
    "intermediate_size": 48, "ffn_dim": 48, "d_ff": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "n_inner": 48,
    "ffn_hidden_size": 48, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "hidden_dim": 48,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_encoder_layers": 2, "num_decoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "d_head": 8,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 1, "vocab_size": 99, "max_position_embeddings": 64, "n_positions": 64, "sliding_window": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "image_size": 32, "patch_size": 8, "num_channels": 3, "state_size": 4, "time_step_rank": 4,
    "num_mel_bins": 8, "max_source_positions": 30, "max_target_positions": 30, "layerdrop": 0.0,
    "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "use_cache": False, "use_mamba_kernels": False,
}  # fmt: skip
_MOST_PARAMETERS = 6_000_000


class NotMade(Exception):
    """The architecture cannot be made tiny here, or does not run so in stock PyTorch."""


@dataclass
class Architecture:
    """A tiny model and a step of it."""

    model: nn.Module
    loss: Callable[[], torch.Tensor]


def model_types() -> list[str]:
    """Return the names of all architectures that transformers knows a base model of."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(MODEL_MAPPING_NAMES)


# Some architectures want as many heads of keys as of queries, and some no sizes of their own for a head.
_VARIANTS: list[dict[str, Any]] = [{}, {"num_key_value_heads": 4}, {"head_dim": None}]


def _shrink(config: Any, sizes: dict[str, Any], depth: int = 0) -> None:
    for name, value in sizes.items():
        if isinstance(getattr(config, name, None), int | float):
            try:
                setattr(config, name, value)
            except (AttributeError, NotImplementedError, ValueError):
                continue
    if isinstance(getattr(config, "layer_types", None), list):
        count = getattr(config, "num_hidden_layers", 2)
        config.layer_types = [*config.layer_types[: count - 1], config.layer_types[-1]]
    for value in list(vars(config).values()):
        if depth < 2 and hasattr(value, "to_dict") and hasattr(value, "model_type"):
            _shrink(value, sizes, depth + 1)


def make_architecture(model_type: str) -> Architecture:
    """Make a tiny model of a type. NotMade if that cannot be had."""
    failures = []
    for variant in _VARIANTS:
        try:
            return _make(model_type, _SMALL | variant)
        except NotMade as failure:
            failures.append(failure)
    raise failures[0]


def _make(model_type: str, sizes: dict[str, Any]) -> Architecture:
    import transformers

    try:
        config = transformers.AutoConfig.for_model(model_type)
        _shrink(config, sizes)
        with torch.device("meta"):
            count = sum(each.numel() for each in transformers.AutoModel.from_config(config).parameters())
        if count > _MOST_PARAMETERS:
            raise NotMade(f"{count} parameters")
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(config).float().train()
    except NotMade:
        raise
    except Exception as error:
        raise NotMade(f"{type(error).__name__}: {str(error)[:120]}") from error
    accepted = set(inspect.signature(model.forward).parameters)
    failure: Exception | None = None
    for inputs in _possible_inputs(config, accepted):
        architecture = Architecture(model, lambda inputs=inputs: _loss(model(**inputs)))
        try:
            architecture.loss().backward()
        except Exception as error:
            failure = error
            continue
        finally:
            model.zero_grad()
        return architecture
    raise NotMade(f"{type(failure).__name__}: {str(failure)[:120]}")


def _possible_inputs(config: Any, accepted: set[str]) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    words = {
        "input_ids": torch.randint(3, 90, (2, 16), generator=generator),
        "decoder_input_ids": torch.randint(3, 90, (2, 12), generator=generator),
    }
    side = next((each.image_size for each in (config, *vars(config).values()) if hasattr(each, "image_size")), 64)
    side = side if isinstance(side, int) else 64
    groups = [
        ("input_ids", "decoder_input_ids"), ("input_ids",), ("pixel_values",), ("input_ids", "pixel_values"),
        ("input_values",), ("input_features",), ("input_features", "decoder_input_ids"),
    ]  # fmt: skip
    values = {
        **words,
        "pixel_values": torch.randn(2, 3, side, side, generator=generator),
        "input_values": torch.randn(2, 2000, generator=generator),
        "input_features": torch.randn(2, 8, 60, generator=generator),
    }
    return [{name: values[name] for name in group} for group in groups if set(group) <= accepted]


def _loss(output: Any) -> torch.Tensor:
    """Return a number of all floating-point results that a gradient can reach."""
    from torch.utils._pytree import tree_leaves

    tensors = output.to_tuple() if hasattr(output, "to_tuple") else output
    found = [
        each.float().square().mean()
        for each in tree_leaves(tensors)
        if isinstance(each, torch.Tensor) and each.is_floating_point() and each.requires_grad
    ]
    if not found:
        raise ValueError("no result requires a gradient")
    return torch.stack(found).sum()
