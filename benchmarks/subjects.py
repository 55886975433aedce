"""What ``fit.py`` trains: the Llamas of ``workloads.py``, and models of other kinds, with a way to compute a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from workloads import Workload, build_model, parse_workload, random_tokens

__all__ = ["OTHER_SUBJECTS", "Subject", "make_subject"]


@dataclass
class Subject:
    """A model that is trained.

    Attributes
    ----------
    model : nn.Module
        The model, its gradients allocated and zero.
    layers : list of nn.Module
        The blocks that ways by hand put into checkpoints.
    loss : callable
        Runs forward, and returns the loss.
    """

    model: nn.Module
    layers: list[nn.Module]
    loss: Callable[[], torch.Tensor]


def _llama(text: str, device: torch.device) -> Subject:
    workload = parse_workload(text)
    model = build_model(workload, device, torch.bfloat16)
    tokens = random_tokens(workload, device)
    layers = list(model.get_submodule("model.layers").children())
    return Subject(model, layers, lambda: model(tokens, labels=tokens).loss)


def _made(make: Callable[[], nn.Module], device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Make a model on its device in training mode, with gradients that are zero."""
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = make()
    finally:
        torch.set_default_dtype(default_dtype)
    model.to(device).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def _mixture(device: torch.device, layers: int = 8, batch: int = 4, tokens: int = 4096) -> Subject:
    """A mixture of experts: 8 of them, of which each token takes 2, so that their loads differ from step to step."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=32_000, hidden_size=2048, intermediate_size=4096, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, num_local_experts=8, max_position_embeddings=tokens, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = _made(lambda: MixtralForCausalLM(config), device, torch.bfloat16)
    data = random_tokens(Workload(2048, 4096, layers, batch, tokens), device)
    blocks = list(model.get_submodule("model.layers").children())
    return Subject(model, blocks, lambda: model(data, labels=data).loss)


def _gpt2(device: torch.device, layers: int = 24, batch: int = 16, tokens: int = 1024) -> Subject:
    """GPT-2 medium in float32 with dropout, under autocast to bfloat16."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=1024, n_layer=layers, n_head=16, n_positions=tokens, use_cache=False, attn_implementation="sdpa"
    )
    model = _made(lambda: GPT2LMHeadModel(config), device, torch.float32)
    data = random_tokens(Workload(1024, 4096, layers, batch, tokens), device)

    def loss() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return model(data, labels=data).loss

    return Subject(model, list(model.get_submodule("transformer.h").children()), loss)


def _vit(device: torch.device, layers: int = 24, batch: int = 128) -> Subject:
    """ViT-L/16 at 224 x 224."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=4096, num_labels=1000,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = _made(lambda: ViTForImageClassification(config), device, torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(batch, 3, 224, 224, generator=generator).to(device, torch.bfloat16)
    labels = torch.randint(1000, (batch,), generator=generator).to(device)
    repeated = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == layers]
    return Subject(model, list(repeated[0]), lambda: model(images, labels=labels).loss)


class _DiTBlock(nn.Module):
    """A block of a diffusion transformer: attention and a perceptron, scaled and shifted by the condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm_2 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.condition = nn.Linear(width, 6 * width)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """Batch, tokens and width; batch and width of the condition."""
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.condition(F.silu(condition))[:, None].chunk(6, -1)
        normed = self.norm_1(x) * (1 + scale_1) + shift_1
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(normed).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        x = x + gate_1 * self.out(attended)
        normed = self.norm_2(x) * (1 + scale_2) + shift_2
        return x + gate_2 * self.down(F.gelu(self.up(normed), approximate="tanh"))


class _DiT(nn.Module):
    def __init__(self, width: int, heads: int, layers: int, channels: int) -> None:
        super().__init__()
        self.first = nn.Linear(channels, width)
        self.blocks = nn.ModuleList(_DiTBlock(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, channels)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, condition)
        return self.head(x)


def _dit(device: torch.device, layers: int = 14, batch: int = 1, tokens: int = 32_768) -> Subject:
    """A diffusion transformer over 32,768 tokens, as for a video."""
    width, channels = 2048, 64
    model = _made(lambda: _DiT(width, 16, layers, channels), device, torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    noisy, target = (
        torch.randn(batch, tokens, channels, generator=generator).to(device, torch.bfloat16) for _ in range(2)
    )
    condition = torch.randn(batch, width, generator=generator).to(device, torch.bfloat16)
    blocks = list(model.get_submodule("blocks").children())
    return Subject(model, blocks, lambda: F.mse_loss(model(noisy, condition), target))


OTHER_SUBJECTS: dict[str, Callable[..., Subject]] = {"mixture": _mixture, "gpt2": _gpt2, "vit": _vit, "dit": _dit}


def make_subject(text: str, device: torch.device) -> Subject:
    """Make a workload such as ``C:layers=2``, or one of ``OTHER_SUBJECTS``, such as ``dit:layers=4``."""
    name, _, changes = text.partition(":")
    if name not in OTHER_SUBJECTS:
        return _llama(text, device)
    more: dict[str, Any] = {}
    for change in filter(None, changes.split(",")):
        field, _, value = change.partition("=")
        more[field] = int(value)
    return OTHER_SUBJECTS[name](device, **more)
