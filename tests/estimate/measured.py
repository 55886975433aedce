"""Training steps that were measured on an H200, and the models in question: real sizes, on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from subjects import _DiT
from t5 import t5_model
from workloads import WORKLOADS, Workload, llama_config

__all__ = ["MEASURED", "Made", "Measured"]

META = torch.device("meta")


@dataclass
class Made:
    """A model and its call.

    Attributes
    ----------
    model : nn.Module
        The model, on the meta device, in training mode.
    args, kwargs : tuple, dict
        The arguments of its call.
    layers : str
        The class of the layers that were checkpointed by hand.
    options : dict
        More arguments of ``estimate``.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    layers: tuple[str, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """A step that was measured: forward and backward without an optimizer, with gradients that are there.

    Attributes
    ----------
    make : callable
        Makes the model.
    saved_gib : float or None
        The memory at the loss beside weights and gradients. None: only the peak was noted.
    plain_gib, plain_ms : float
        The peak of the plain step, and its time.
    checkpointed_gib, checkpointed_ms : float or None
        With each layer in a checkpoint; None if that was not measured.
    is_tuned_on : bool
        Whether the efficiencies of ``rates.py`` were tuned on it.
    source : str
        The file or page that has the figures.
    """

    make: Callable[[], Made]
    saved_gib: float | None
    plain_gib: float
    plain_ms: float
    checkpointed_gib: float | None
    checkpointed_ms: float | None
    is_tuned_on: bool
    source: str


def built(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with META:
            return make().train()
    finally:
        torch.set_default_dtype(before)


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.empty(batch, length, dtype=torch.long, device=META)


def image(batch: int, side: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(batch, 3, side, side, dtype=dtype, device=META)


def llama(workload: Workload) -> Callable[[], Made]:
    def make() -> Made:
        from transformers import LlamaForCausalLM

        model = built(lambda: LlamaForCausalLM(llama_config(workload)), torch.bfloat16)
        data = tokens(workload.batch, workload.tokens)
        return Made(model, (), {"input_ids": data, "labels": data}, ("LlamaDecoderLayer",), {})

    return make


def mixture() -> Made:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=32_000, hidden_size=2048, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=32,
        num_key_value_heads=8, num_local_experts=8, max_position_embeddings=4096, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = built(lambda: MixtralForCausalLM(config), torch.bfloat16)
    return Made(model, (), {"input_ids": tokens(4, 4096), "labels": tokens(4, 4096)}, ("MixtralDecoderLayer",), {})


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=1024, n_layer=24, n_head=16, n_positions=1024, use_cache=False, attn_implementation="sdpa"
    )
    model = built(lambda: GPT2LMHeadModel(config), torch.float32)
    data = tokens(16, 1024)
    return Made(model, (), {"input_ids": data, "labels": data}, ("GPT2Block",), {"autocast": "bfloat16"})


def vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, num_labels=1000,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = built(lambda: ViTForImageClassification(config), torch.bfloat16)
    labels = torch.empty(128, dtype=torch.long, device=META)
    return Made(model, (image(128, 224, torch.bfloat16),), {"labels": labels}, ("ViTLayer",), {})


def dit() -> Made:
    model = built(lambda: _DiT(2048, 16, 14, 64), torch.bfloat16)
    noisy = torch.empty(1, 32_768, 64, dtype=torch.bfloat16, device=META)
    condition = torch.empty(1, 2048, dtype=torch.bfloat16, device=META)
    target = torch.zeros(1, 32_768, 64, dtype=torch.bfloat16)
    return Made(model, (noisy, condition), {}, ("_DiTBlock",), {"loss": lambda output: F.mse_loss(output, target)})


def convnext() -> Made:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[192, 384, 768, 1536], depths=[3, 3, 27, 3], num_labels=1000)
    model = built(lambda: ConvNextForImageClassification(config), torch.bfloat16)
    labels = torch.empty(128, dtype=torch.long, device=META)
    return Made(model, (image(128, 224, torch.bfloat16),), {"labels": labels}, ("ConvNextLayer",), {})


def resnet() -> Made:
    from transformers import ResNetConfig, ResNetForImageClassification

    model = built(lambda: ResNetForImageClassification(ResNetConfig(num_labels=1000)), torch.float32)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = True
    images = image(384, 224, torch.float32).to(memory_format=torch.channels_last)
    labels = torch.empty(384, dtype=torch.long, device=META)
    return Made(model, (images,), {"labels": labels}, ("ResNetBottleNeckLayer",), {"autocast": "bfloat16"})


def whisper() -> Made:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=1024, encoder_layers=16, decoder_layers=16, encoder_attention_heads=16, decoder_attention_heads=16,
        encoder_ffn_dim=4096, decoder_ffn_dim=4096, use_cache=False,
    )  # fmt: skip
    model = built(lambda: WhisperForConditionalGeneration(config), torch.bfloat16)
    features = torch.empty(24, 80, 3000, dtype=torch.bfloat16, device=META)
    kwargs = {"input_features": features, "labels": tokens(24, 448)}
    return Made(model, (), kwargs, ("WhisperEncoderLayer", "WhisperDecoderLayer"), {})


def t5() -> Made:
    model = built(lambda: t5_model(d_model=1024, d_ff=4096, num_layers=16, num_heads=16, d_kv=64), torch.bfloat16)
    return Made(model, (), {"input_ids": tokens(16, 1024), "labels": tokens(16, 512)}, ("T5Block",), {})


_RESULTS = "benchmarks/results/2026-11-{}-h200-fit-{}.json"
_LARGE_HEAD = Workload(hidden=4096, intermediate=14336, layers=6, batch=2, tokens=8192, vocabulary=128_256)
_BY_HAND = "measured on 2026-11-25 on an H200 with torch 2.11, as benchmarks/zoo.py measures"

MEASURED: dict[str, Measured] = {
    "A": Measured(llama(WORKLOADS["A"]), 28.80, 36.82, 283.0, 11.29, 364.1, True, _RESULTS.format(23, "A")),
    "B": Measured(llama(WORKLOADS["B"]), 20.91, 30.67, 328.8, 13.03, 416.2, False, _RESULTS.format(23, "B")),
    "C": Measured(llama(WORKLOADS["C"]), 35.42, 52.44, 876.6, 26.91, 1095.3, True, _RESULTS.format(23, "C")),
    "D": Measured(llama(WORKLOADS["D"]), 61.96, 79.88, 1654.3, None, None, False, _RESULTS.format(23, "D")),
    "large head": Measured(llama(_LARGE_HEAD), None, 51.2, 397.0, 33.6, 482.0, False, _BY_HAND),
    "GPT-2": Measured(gpt2, 36.18, 44.96, 224.5, 13.62, 289.0, False, _RESULTS.format(24, "gpt2")),
    "mixture": Measured(mixture, 17.55, 28.26, 202.0, 13.47, 261.9, False, _RESULTS.format(24, "mixture")),
    "ViT": Measured(vit, 18.67, 20.12, 111.4, 3.36, 143.3, True, _RESULTS.format(24, "vit")),
    "DiT": Measured(dit, 35.23, 39.84, 1057.0, None, None, True, _RESULTS.format(23, "dit")),
    "ConvNeXt": Measured(convnext, None, 21.8, 113.0, 3.7, 144.0, True, _BY_HAND),
    "ResNet": Measured(resnet, None, 16.3, 79.0, 6.8, 110.0, True, _BY_HAND),
    "T5": Measured(t5, None, 72.6, 393.0, 6.9, 571.0, True, _BY_HAND),
    "Whisper": Measured(whisper, None, 34.0, 267.0, 7.1, 345.0, False, _BY_HAND),
}
