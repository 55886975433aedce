"""The models and shapes that the benchmarks train: Llamas made from a configuration, with random tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Workload:
    """A Llama's shape and its batch. ``checkpointed``: each decoder layer keeps its input only."""

    hidden: int
    intermediate: int
    layers: int
    batch: int
    tokens: int
    checkpointed: bool = False
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 32_000


WORKLOADS = {
    "A": Workload(hidden=2048, intermediate=8192, layers=16, batch=4, tokens=4096),
    "B": Workload(hidden=4096, intermediate=14336, layers=6, batch=2, tokens=8192),
    "C": Workload(hidden=2048, intermediate=8192, layers=4, batch=1, tokens=65536),
    "D": Workload(hidden=2048, intermediate=8192, layers=8, batch=1, tokens=65536, checkpointed=True),
}


def parse_workload(text: str) -> Workload:
    """Read a name of ``WORKLOADS``, with changes if wanted: ``A``, ``A:layers=2``, ``B:tokens=4096,checkpointed=1``."""
    name, _, changes = text.partition(":")
    if name not in WORKLOADS:
        raise ValueError(f"no workload {name!r}: choose from {', '.join(WORKLOADS)}")
    workload = WORKLOADS[name]
    known = {field.name for field in fields(Workload)}
    for change in filter(None, changes.split(",")):
        field, equals, value = change.partition("=")
        if field not in known or not equals or not value.isdecimal():
            raise ValueError(f"{change!r} is not FIELD=NUMBER with a field out of {', '.join(sorted(known))}")
        workload = replace(workload, **{field: type(getattr(workload, field))(int(value))})
    return workload


def llama_config(workload: Workload, **more: object) -> Any:
    """Make the configuration of transformers; ``more`` are fields of it."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=workload.vocabulary,
        hidden_size=workload.hidden,
        intermediate_size=workload.intermediate,
        num_hidden_layers=workload.layers,
        num_attention_heads=workload.heads,
        num_key_value_heads=workload.kv_heads,
        max_position_embeddings=workload.tokens,
        attn_implementation="sdpa",
        use_cache=False,
        **more,
    )


def build_model(workload: Workload, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """Make the model in training mode: weights drawn on the device from torch's seed, gradients allocated and zero."""
    from transformers import LlamaForCausalLM

    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = LlamaForCausalLM(llama_config(workload))
    finally:
        torch.set_default_dtype(default_dtype)
    model.to(device).train()
    if workload.checkpointed:
        enable_checkpointing(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def enable_checkpointing(model: torch.nn.Module, **options: object) -> None:
    """Have each decoder layer keep its input only; ``options`` are those of transformers, under either of its names."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(**options)


def random_tokens(workload: Workload, device: torch.device) -> torch.Tensor:
    """Draw int64 tokens of shape (batch, tokens), from a seed of their own."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(workload.vocabulary, (workload.batch, workload.tokens), generator=generator).to(device)
