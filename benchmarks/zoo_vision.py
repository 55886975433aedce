"""Models of the zoo that see, and others that are neither language nor speech."""

from __future__ import annotations

import math

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
    noise,
    of_class,
)


@entry
def resnet(size: Size, device: torch.device) -> ZooModel:
    """ResNet-50 in channels_last under autocast, with an optimizer: BatchNorm, and activations in place."""
    from transformers import ResNetConfig, ResNetForImageClassification

    small = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "num_labels": 5}
    config = ResNetConfig(**(small if size == "tiny" else {"num_labels": 1000}))
    model = built(lambda: ResNetForImageClassification(config), device).to(memory_format=torch.channels_last)
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = True
    batch, side = (4, 32) if size == "tiny" else (256, 224)
    images = noise(device, torch.float32, batch, 3, side, side).to(memory_format=torch.channels_last)
    labels = draw_tokens(device, config.num_labels, batch)

    def loss(_: int) -> torch.Tensor:
        with autocast(device, wanted=True):
            return model(images, labels=labels).loss

    return ZooModel(model, of_class(model, "ResNetBottleNeckLayer"), loss, torch.optim.SGD(model.parameters(), lr=0.01))


@entry
def convnext(size: Size, device: torch.device) -> ZooModel:
    """ConvNeXt-L: stages of layers, the first of which saves the most."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    small = {"hidden_sizes": [8, 16, 32, 64], "depths": [2, 2, 4, 2], "num_labels": 5}
    large = {"hidden_sizes": [192, 384, 768, 1536], "depths": [3, 3, 27, 3], "num_labels": 1000}
    config = ConvNextConfig(**(small if size == "tiny" else large), drop_path_rate=0.1)
    model = built(lambda: ConvNextForImageClassification(config), device, dtype_of(size))
    batch, side = (2, 64) if size == "tiny" else (96, 224)
    images = noise(device, dtype_of(size), batch, 3, side, side)
    labels = draw_tokens(device, 5, batch)
    return ZooModel(model, of_class(model, "ConvNextLayer"), lambda _: model(images, labels=labels).loss)


@entry
def swin(size: Size, device: torch.device) -> ZooModel:
    """Swin: stages of layers that attend in windows, with an optimizer."""
    from transformers import SwinConfig, SwinForImageClassification

    small = {
        "image_size": 32,
        "patch_size": 4,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    }
    large = {
        "image_size": 224,
        "embed_dim": 128,
        "depths": [2, 2, 18, 2],
        "num_heads": [4, 8, 16, 32],
        "window_size": 7,
    }
    config = SwinConfig(**(small if size == "tiny" else large), num_labels=5)
    model = built(lambda: SwinForImageClassification(config), device, dtype_of(size))
    batch, side = (2, 32) if size == "tiny" else (96, 224)
    images = noise(device, dtype_of(size), batch, 3, side, side)
    labels = draw_tokens(device, 5, batch)
    return ZooModel(model, of_class(model, "SwinLayer"), lambda _: model(images, labels=labels).loss, adamw(model))


@entry
def efficientnet(size: Size, device: torch.device) -> ZooModel:
    """EfficientNet-B4 under autocast: blocks of widely different sizes, BatchNorm, drop path."""
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    small = {
        "image_size": 64, "width_coefficient": 0.25, "depth_coefficient": 0.5, "hidden_dim": 320, "num_labels": 5,
    }  # fmt: skip
    large = {
        "image_size": 380, "width_coefficient": 1.4, "depth_coefficient": 1.8, "hidden_dim": 1792, "num_labels": 1000,
    }  # fmt: skip
    config = EfficientNetConfig(**(small if size == "tiny" else large))
    model = built(lambda: EfficientNetForImageClassification(config), device)
    batch, side = (2, 64) if size == "tiny" else (48, 380)
    images, labels = noise(device, torch.float32, batch, 3, side, side), draw_tokens(device, 5, batch)

    def loss(_: int) -> torch.Tensor:
        with autocast(device, wanted=True):
            return model(images, labels=labels).loss

    return ZooModel(model, of_class(model, "EfficientNetBlock"), loss)


@entry
def clip(size: Size, device: torch.device) -> ZooModel:
    """CLIP: two towers and a loss over both, with an optimizer."""
    from transformers import CLIPConfig, CLIPModel

    if size == "tiny":
        text = {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "vocab_size": 99, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1,
        }  # fmt: skip
        sight = {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": 32, "patch_size": 8,
        }  # fmt: skip
        batch, tokens, side = 4, 12, 32
    else:
        text = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
        sight = {
            "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
            "image_size": 224, "patch_size": 14,
        }  # fmt: skip
        batch, tokens, side = 96, 77, 224
    config = CLIPConfig(text_config=text, vision_config=sight, projection_dim=16 if size == "tiny" else 768)
    model = built(lambda: CLIPModel(config), device, dtype_of(size))
    words, images = draw_tokens(device, 90, batch, tokens), noise(device, dtype_of(size), batch, 3, side, side)

    def loss(_: int) -> torch.Tensor:
        return model(input_ids=words, pixel_values=images, return_loss=True).loss

    return ZooModel(model, of_class(model, "CLIPEncoderLayer"), loss, adamw(model))


@entry
def detr(size: Size, device: torch.device) -> ZooModel:
    """DETR: a convolutional backbone before an encoder and a decoder."""
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    if size == "tiny":
        backbone = ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16, 32, 64], depths=[1, 1, 1, 1], out_features=["stage4"]
        )
        more = {
            "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
            "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 5,
        }  # fmt: skip
        batch, side = 2, 64
    else:
        backbone, more, batch, side = ResNetConfig(out_features=["stage4"]), {}, 16, 800
    config = DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, **more
    )
    model = built(lambda: DetrForObjectDetection(config), device)
    images = noise(device, torch.float32, batch, 3, side, side)

    def loss(_: int) -> torch.Tensor:
        with autocast(device, wanted=True):
            output = model(images)
        return output.logits.float().square().mean() + output.pred_boxes.float().square().mean()

    return ZooModel(model, of_class(model, "ResNetBottleNeckLayer", "DetrEncoderLayer", "DetrDecoderLayer"), loss)


class _Residual(nn.Module):
    """A residual block of a diffusion model, which is told the time."""

    def __init__(self, channels_in: int, channels: int, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.GroupNorm(4, channels_in), nn.GroupNorm(4, channels)
        self.conv_1 = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.conv_2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.time = nn.Linear(width, channels)
        self.skip = nn.Conv2d(channels_in, channels, 1) if channels_in != channels else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden = self.conv_1(F.silu(self.norm_1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv_2(F.silu(self.norm_2(hidden)))


class _Attention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.qkv, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.flatten(2).transpose(1, 2)[:, None] for each in self.qkv(self.norm(x)).chunk(3, 1))
        attended = F.scaled_dot_product_attention(q, k, v)[:, 0].transpose(1, 2).reshape(x.shape)
        return x + self.out(attended)


class _UNet(nn.Module):
    """A UNet: what its first blocks return is used again by the last."""

    def __init__(self, channels: list[int], repeats: int) -> None:
        super().__init__()
        width = 4 * channels[0]
        self.time = nn.Sequential(nn.Linear(channels[0], width), nn.SiLU(), nn.Linear(width, width))
        self.first = nn.Conv2d(4, channels[0], 3, padding=1)
        self.down, self.up, self.shrink, self.grow = (nn.ModuleList() for _ in range(4))
        skips, now = [channels[0]], channels[0]
        for level, count in enumerate(channels):
            for _ in range(repeats):
                self.down.append(_Residual(now, count, width))
                now = count
                skips.append(now)
            if level < len(channels) - 1:
                self.shrink.append(nn.Conv2d(now, now, 3, stride=2, padding=1))
                skips.append(now)
        self.middle = nn.ModuleList([_Residual(now, now, width), _Residual(now, now, width)])
        self.attention = _Attention(now)
        for level, count in reversed(list(enumerate(channels))):
            for _ in range(repeats + 1):
                self.up.append(_Residual(now + skips.pop(), count, width))
                now = count
            if level > 0:
                self.grow.append(nn.Conv2d(now, now, 3, padding=1))
        self.last = nn.Conv2d(now, 4, 3, padding=1)
        self.channels, self.repeats = channels, repeats

    def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        half = self.channels[0] // 2
        rates = torch.exp(-math.log(10_000) * torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angles = times[:, None].float() * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1).to(x.dtype))
        x = self.first(x)
        skips, down, up = [x], iter(self.down), iter(self.up)
        for level in range(len(self.channels)):
            for _ in range(self.repeats):
                x = next(down)(x, time)
                skips.append(x)
            if level < len(self.shrink):
                x = self.shrink[level](x)
                skips.append(x)
        x = self.middle[1](self.attention(self.middle[0](x, time)), time)
        for level in range(len(self.channels)):
            for _ in range(self.repeats + 1):
                x = next(up)(torch.cat([x, skips.pop()], 1), time)
            if level < len(self.grow):
                x = self.grow[level](F.interpolate(x, scale_factor=2.0))
        return self.last(x)


@entry
def diffusion_unet(size: Size, device: torch.device) -> ZooModel:
    """A diffusion model's UNet, with an optimizer."""
    channels, repeats, batch, side = ([8, 16], 1, 2, 16) if size == "tiny" else ([192, 384, 576], 2, 48, 96)
    model = built(lambda: _UNet(channels, repeats), device, dtype_of(size))
    noisy, target = (noise(device, dtype_of(size), batch, 4, side, side) for _ in range(2))
    times = torch.arange(batch, device=device)
    return ZooModel(
        model, of_class(model, "_Residual"), lambda _: F.mse_loss(model(noisy, times), target), adamw(model)
    )


class _DiTBlock(nn.Module):
    """A block of a diffusion transformer: attention and a perceptron, scaled and shifted by the condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.condition = nn.Linear(width, 6 * width)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.condition(F.silu(condition))[:, None].chunk(6, -1)
        normed = self.norm_1(x) * (1 + scale_1) + shift_1
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(normed).chunk(3, -1))
        x = x + gate_1 * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        normed = self.norm_2(x) * (1 + scale_2) + shift_2
        return x + gate_2 * self.down(F.gelu(self.up(normed), approximate="tanh"))


class _DiT(nn.Module):
    def __init__(self, width: int, heads: int, layers: int, channels: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(channels, width), nn.Linear(width, channels)
        self.blocks = nn.ModuleList(_DiTBlock(width, heads) for _ in range(layers))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, condition)
        return self.head(x)


@entry
def video_dit(size: Size, device: torch.device) -> ZooModel:
    """A diffusion transformer over the tokens of a video."""
    width, heads, layers, channels, tokens = (32, 4, 3, 8, 24) if size == "tiny" else (1536, 12, 12, 64, 16_384)
    model = built(lambda: _DiT(width, heads, layers, channels), device, dtype_of(size))
    noisy, target = (noise(device, dtype_of(size), 1, tokens, channels) for _ in range(2))
    condition = noise(device, dtype_of(size), 1, width)
    return ZooModel(model, list(model.blocks), lambda _: F.mse_loss(model(noisy, condition), target))


# ---- Others


class _Recurrent(nn.Module):
    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x)


@entry
def lstm(size: Size, device: torch.device) -> ZooModel:
    """Layers of an LSTM, with an optimizer."""
    width, layers, vocabulary, batch, tokens = (16, 3, 99, 2, 12) if size == "tiny" else (2048, 6, 10_000, 64, 512)
    model = built(lambda: _Recurrent(width, layers, vocabulary), device, dtype_of(size))
    data = draw_tokens(device, vocabulary, batch, tokens)

    def loss(_: int) -> torch.Tensor:
        return F.cross_entropy(model(data)[:, :-1].flatten(0, 1), data[:, 1:].flatten())

    return ZooModel(model, list(model.layers), loss, adamw(model))


class _MessagePassing(nn.Module):
    """A layer of a graph network: each node gets the mean of what its neighbours send along the edges."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(inplace=True), nn.Linear(width, width))
        self.update = nn.Sequential(nn.Linear(2 * width, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True))

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        sent = self.message(torch.cat([x[source], x[target]], -1))
        received = torch.zeros_like(x).index_add_(0, target, sent)
        count = torch.zeros(len(x), 1, dtype=x.dtype, device=x.device)
        count.index_add_(0, target, torch.ones(len(target), 1, dtype=x.dtype, device=x.device))
        return x + self.update(torch.cat([x, received / count.clamp_(min=1)], -1))


class _GraphNetwork(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_MessagePassing(width) for _ in range(layers))

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, source, target)
        return x


@entry
def graph_network(size: Size, device: torch.device) -> ZooModel:
    """A graph network with another number of edges in each step, BatchNorm and activations in place."""
    width, layers, nodes, edges = (16, 3, 30, 90) if size == "tiny" else (256, 10, 100_000, 600_000)
    model = built(lambda: _GraphNetwork(width, layers), device)
    x = noise(device, torch.float32, nodes, width)
    ends = draw_tokens(device, nodes, 2, edges)
    part = [1.0, 0.9, 0.95, 0.8]

    def loss(step: int) -> torch.Tensor:
        source, target = ends[:, : int(edges * part[step % len(part)])]
        return model(x, source, target).square().mean()

    return ZooModel(model, list(model.layers), loss, adamw(model))
