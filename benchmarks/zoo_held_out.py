"""Models of the zoo that joined it after ``fit`` was built: it was not changed for them before their first run.

They differ from the others in their loops as well: an optimizer that allocates more than backward does, several
backwards before it steps, an evaluation between steps, and texts of several lengths.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from zoo_registry import (
    Size,
    ZooModel,
    adamw,
    autocast,
    built,
    draw_tokens,
    dtype_of,
    entry,
    lists_of,
    noise,
    of_class,
)


@entry
def gpt2_with_adam(size: Size, device: torch.device) -> ZooModel:
    """GPT-2 large with weights of 32 bits in small batches: the peak of memory is that of the optimizer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 99}
    config = GPT2Config(**(small if size == "tiny" else {"n_embd": 1280, "n_layer": 36, "n_head": 20}), use_cache=False)
    model = built(lambda: GPT2LMHeadModel(config), device)
    data = draw_tokens(device, config.vocab_size, *((2, 16) if size == "tiny" else (4, 512)))

    def loss(_: int) -> torch.Tensor:
        with autocast(device, wanted=True):
            return model(input_ids=data, labels=data).loss

    return ZooModel(model, lists_of(model, "transformer.h"), loss, adamw(model))


@entry
def opt_with_evaluation(size: Size, device: torch.device) -> ZooModel:
    """OPT with an optimizer, and an evaluation before each third step."""
    from transformers import OPTConfig, OPTForCausalLM

    small = {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 64, "vocab_size": 99,
        "word_embed_proj_dim": 32,
    }  # fmt: skip
    large = {
        "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "ffn_dim": 8192,
        "word_embed_proj_dim": 2048,
    }  # fmt: skip
    config = OPTConfig(**(small if size == "tiny" else large), use_cache=False)
    model = built(lambda: OPTForCausalLM(config), device, dtype_of(size))
    data = draw_tokens(device, 90, *((2, 16) if size == "tiny" else (2, 1024)))

    def loss(step: int) -> torch.Tensor:
        if step % 3 == 2:
            model.eval()
            with torch.no_grad():
                model(input_ids=data, labels=data)
            model.train()
        return model(input_ids=data, labels=data).loss

    return ZooModel(model, lists_of(model, "model.decoder.layers"), loss, adamw(model))


@entry
def t5(size: Size, device: torch.device) -> ZooModel:
    """T5: the first layer of each stack makes the bias that the others share."""
    from transformers import T5Config, T5ForConditionalGeneration

    small = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 99}
    large = {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 12, "num_heads": 16}
    config = T5Config(**(small if size == "tiny" else large), use_cache=False)
    config.decoder_start_token_id = config.pad_token_id = 0
    model = built(lambda: T5ForConditionalGeneration(config), device, dtype_of(size))
    batch, source, target = (2, 16, 8) if size == "tiny" else (16, 512, 256)
    inputs, labels = (draw_tokens(device, 90, batch, length) for length in (source, target))
    layers = lists_of(model, "encoder.block", "decoder.block")
    return ZooModel(model, layers, lambda _: model(input_ids=inputs, labels=labels).loss, adamw(model))


@entry
def vit(size: Size, device: torch.device) -> ZooModel:
    """ViT-L under autocast, with an optimizer."""
    from transformers import ViTConfig, ViTForImageClassification

    small = {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32,
        "patch_size": 8,
    }  # fmt: skip
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    config = ViTConfig(**(small if size == "tiny" else large))
    model = built(lambda: ViTForImageClassification(config), device)
    images = noise(device, torch.float32, *((2, 3, 32, 32) if size == "tiny" else (96, 3, 224, 224)))

    def loss(_: int) -> torch.Tensor:
        with autocast(device, wanted=True):
            return model(pixel_values=images).logits.float().logsumexp(-1).mean()

    return ZooModel(model, of_class(model, "ViTLayer"), loss, adamw(model))


@entry
def deberta(size: Size, device: torch.device) -> ZooModel:
    """DeBERTa: attention with relative positions, of many short operators."""
    from transformers import DebertaV2Config, DebertaV2Model

    relative = {
        "relative_attention": True, "position_buckets": 16, "pos_att_type": ["p2c", "c2p"], "share_att_key": True,
        "norm_rel_ebd": "layer_norm", "position_biased_input": False,
    }  # fmt: skip
    small = {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99,
    }  # fmt: skip
    large = {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
        "vocab_size": 32_000,
    }  # fmt: skip
    config = DebertaV2Config(**relative | (small if size == "tiny" else large | {"position_buckets": 256}))
    model = built(lambda: DebertaV2Model(config), device)
    data = draw_tokens(device, 90, *((2, 16) if size == "tiny" else (8, 512)))

    def loss(_: int) -> torch.Tensor:
        with autocast(device, wanted=True):
            return model(input_ids=data).last_hidden_state.float().square().mean()

    return ZooModel(model, lists_of(model, "encoder.layer"), loss, adamw(model))


@entry
def segformer(size: Size, device: torch.device) -> ZooModel:
    """SegFormer-B5: its head is given the hidden states of all stages, which transformers collects by hooks."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    small = {
        "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4],
        "decoder_hidden_size": 16,
    }  # fmt: skip
    large = {
        "hidden_sizes": [64, 128, 320, 512], "depths": [3, 6, 40, 3], "decoder_hidden_size": 768, "num_labels": 150,
    }  # fmt: skip
    config = SegformerConfig(**(small if size == "tiny" else large))
    model = built(lambda: SegformerForSemanticSegmentation(config), device)
    images = noise(device, torch.float32, *((2, 3, 64, 64) if size == "tiny" else (8, 3, 512, 512)))

    def loss(_: int) -> torch.Tensor:
        with autocast(device, wanted=True):
            return model(pixel_values=images).logits.float().square().mean()

    return ZooModel(model, of_class(model, "SegformerLayer"), loss, adamw(model))


@entry
def bloom_accumulated(size: Size, device: torch.device) -> ZooModel:
    """BLOOM with two backwards before the optimizer steps."""
    from transformers import BloomConfig, BloomForCausalLM

    small = {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": 99}
    large = {"hidden_size": 1536, "n_layer": 24, "n_head": 16, "vocab_size": 50_000}
    config = BloomConfig(**(small if size == "tiny" else large), use_cache=False)
    model = built(lambda: BloomForCausalLM(config), device, dtype_of(size))
    data = draw_tokens(device, 90, *((2, 16) if size == "tiny" else (4, 1024)))

    def loss(_: int) -> torch.Tensor:
        model(input_ids=data, labels=data).loss.backward()
        return model(input_ids=data, labels=data).loss

    return ZooModel(model, lists_of(model, "transformer.h"), loss, adamw(model))


class _TwoConvolutions(nn.Sequential):
    def __init__(self, given: int, made: int) -> None:
        layers: list[nn.Module] = []
        for channels in (given, made):
            layers += [nn.Conv2d(channels, made, 3, padding=1, bias=False), nn.BatchNorm2d(made), nn.ReLU(inplace=True)]
        super().__init__(*layers)


class _UNet(nn.Module):
    """The first half halves the image with each stage, and the second half is given what each of these made."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width << number for number in range(5)]
        self.down = nn.ModuleList(map(_TwoConvolutions, [3, *widths[:-1]], widths))
        self.widen = nn.ModuleList(nn.ConvTranspose2d(2 * each, each, 2, 2) for each in widths[-2::-1])
        self.up = nn.ModuleList(_TwoConvolutions(2 * each, each) for each in widths[-2::-1])
        self.out = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = []
        for number, stage in enumerate(self.down):
            x = stage(x if number == 0 else F.max_pool2d(x, 2))
            made.append(x)
        made.pop()
        for widen, stage in zip(self.widen, self.up, strict=True):
            x = stage(torch.cat([made.pop(), widen(x)], 1))
        return self.out(x)


@entry
def unet(size: Size, device: torch.device) -> ZooModel:
    """A U-Net that segments, as in many tutorials, under autocast: half of its outputs wait for long."""
    model = built(lambda: _UNet(4 if size == "tiny" else 64), device)
    images = noise(device, torch.float32, *((2, 3, 32, 32) if size == "tiny" else (12, 3, 512, 512)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)

    def loss(_: int) -> torch.Tensor:
        with autocast(device, wanted=True):
            return model(images).float().square().mean()

    return ZooModel(model, [*model.down, *model.up], loss, optimizer)


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        attended = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class _Gpt(nn.Module):
    def __init__(self, width: int, depth: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(_Layer(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), tokens.flatten())


@entry
def small_gpt(size: Size, device: torch.device) -> ZooModel:
    """A GPT of the user's own code: two backwards before the optimizer steps, of texts of three lengths."""
    shape = (32, 3, 4, 99, 16) if size == "tiny" else (1024, 24, 16, 50_304, 1024)
    model = built(lambda: _Gpt(*shape), device)
    data = draw_tokens(device, shape[3], 2 if size == "tiny" else 8, shape[4])
    part = [0.5, 1.0, 0.75]

    def forward(step: int) -> torch.Tensor:
        with autocast(device, wanted=True):
            return model(data[:, : int(part[step % len(part)] * shape[4])])

    def loss(step: int) -> torch.Tensor:
        forward(step).backward()
        return forward(step + 1)

    return ZooModel(model, list(model.layers), loss, adamw(model))
