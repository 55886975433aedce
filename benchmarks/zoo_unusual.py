"""Models of the zoo with unusual parts or loops: ``fit`` was not changed for them before their first run.

A language model whose kernels PyTorch's dispatcher does not see, two optimizers and two networks in one step, a frozen
part beside a GradScaler, cells that are called once for each frame, attention with latent vectors beside experts, and
plain lists of layers without any module for what repeats.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from zoo_registry import Size, ZooModel, adamw, autocast, built, draw_tokens, dtype_of, entry, lists_of, noise


# ---- Kernels that the dispatcher does not see
class _SwiGlu(torch.autograd.Function):
    """silu(x) * y by a kernel of Triton, and by PyTorch on a device that has none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        if x.device.type != "cuda":
            return F.silu(x) * y
        from triton_kernels import gated

        return gated(x, y)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = ctx.saved_tensors
        if x.device.type != "cuda":
            gate = torch.sigmoid(x)
            return grads[0] * y * gate * (1 + x * (1 - gate)), grads[0] * x * gate
        from triton_kernels import gated_gradients

        return gated_gradients(x, y, grads[0])


class _TritonLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        attended = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        normed = self.before_mlp(x)
        return x + self.down(_SwiGlu.apply(self.gate(normed), self.up(normed)))


class _LanguageModel(nn.Module):
    def __init__(self, layers: list[nn.Module], width: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.layers = nn.Embedding(vocabulary, width), nn.ModuleList(layers)
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), tokens.flatten())


@entry
def llama_with_triton(size: Size, device: torch.device) -> ZooModel:
    """A Llama whose gates are kernels of Triton, which PyTorch's dispatcher does not see."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise RuntimeError("llama_with_triton needs Triton: pip install triton")
    width, depth, heads, vocabulary = (32, 3, 4, 99) if size == "tiny" else (2048, 16, 16, 32_000)
    model = built(
        lambda: _LanguageModel([_TritonLayer(width, heads) for _ in range(depth)], width, vocabulary),
        device,
        dtype_of(size),
    )
    data = draw_tokens(device, vocabulary, *((2, 16) if size == "tiny" else (4, 2048)))
    return ZooModel(model, list(model.layers), lambda _: model(data), adamw(model))


# ---- Two networks, each with an optimizer of its own
class _Residual(nn.Module):
    def __init__(self, width: int, *, is_normed: bool) -> None:
        super().__init__()
        spectral = nn.utils.parametrizations.spectral_norm
        convolutions = [nn.Conv2d(width, width, 3, padding=1) for _ in range(2)]
        self.first, self.second = convolutions if is_normed else map(spectral, convolutions)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width) if is_normed else nn.Identity() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(F.relu(self.norms[0](x)))
        return x + self.second(F.leaky_relu(self.norms[1](y), 0.2))


class _Adversaries(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        makes: list[nn.Module] = [nn.Conv2d(8, width, 3, padding=1)]
        judges: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
        makes += [_Residual(width, is_normed=True) for _ in range(depth)]
        judges += [_Residual(width, is_normed=False) for _ in range(depth)]
        self.maker = nn.Sequential(*makes, nn.Conv2d(width, 3, 3, padding=1), nn.Tanh())
        self.judge = nn.Sequential(*judges, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1))


@entry
def adversaries(size: Size, device: torch.device) -> ZooModel:
    """Two networks that train against each other, by two backwards and an optimizer for each."""
    width, depth, batch, pixels = (4, 2, 2, 16) if size == "tiny" else (96, 12, 32, 128)
    model = built(lambda: _Adversaries(width, depth), device)
    noises, images = (noise(device, torch.float32, batch, channels, pixels, pixels) for channels in (8, 3))
    of_the_judge = torch.optim.Adam(model.judge.parameters(), 1e-4, betas=(0.5, 0.999))

    def loss(_: int) -> torch.Tensor:
        with autocast(device, wanted=True):
            made = model.maker(noises)
            judged = F.softplus(-model.judge(images)).mean() + F.softplus(model.judge(made.detach())).mean()
        judged.backward()
        of_the_judge.step()
        of_the_judge.zero_grad()
        with autocast(device, wanted=True):
            return F.softplus(-model.judge(made)).mean()

    layers = [each for each in model.modules() if isinstance(each, _Residual)]
    return ZooModel(model, layers, loss, torch.optim.Adam(model.maker.parameters(), 1e-4, betas=(0.5, 0.999)))


@entry
def critic_in_turns(size: Size, device: torch.device) -> ZooModel:
    """Three steps of a critic, and one of its generator, whose noise is far smaller than what the critic is given."""
    width, depth, batch, pixels = (4, 2, 2, 16) if size == "tiny" else (96, 12, 32, 128)
    model = built(lambda: _Adversaries(width, depth), device)
    noises, images = noise(device, torch.float32, batch, 8), noise(device, torch.float32, batch, 3, pixels, pixels)
    of_the_judge = torch.optim.RMSprop(model.judge.parameters(), 1e-4)
    model.maker.insert(0, nn.Unflatten(1, (8, 1, 1))).insert(1, nn.Upsample(scale_factor=pixels))

    def loss(_: int) -> torch.Tensor:
        for _ in range(3):
            with autocast(device, wanted=True):
                with torch.no_grad():
                    made = model.maker(noises)
                judged = model.judge(made).mean() - model.judge(images).mean()
            judged.backward()
            of_the_judge.step()
            of_the_judge.zero_grad()
        with autocast(device, wanted=True):
            return -model.judge(model.maker(noises)).mean()

    layers = [each for each in model.modules() if isinstance(each, _Residual)]
    return ZooModel(model, layers, loss, torch.optim.RMSprop(model.maker.parameters(), 1e-4))


# ---- A frozen part
class _Captions(nn.Module):
    def __init__(self, sees: nn.Module, width: int, speaks: Any) -> None:
        super().__init__()
        self.sees, self.speaks = sees.requires_grad_(False), speaks
        self.bridge = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, speaks.config.hidden_size)
        )

    def forward(self, images: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            seen = self.sees(pixel_values=images).last_hidden_state
        embedded = torch.cat([self.bridge(seen), self.speaks.get_input_embeddings()(tokens)], 1)
        labels = torch.cat([tokens.new_full(seen.shape[:2], -100), tokens], 1)
        return self.speaks(inputs_embeds=embedded, labels=labels).loss


@entry
def captions(size: Size, device: torch.device) -> ZooModel:
    """A frozen ViT before a Llama that trains, with clipped gradients, which a GradScaler has scaled."""
    from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel

    eyes = {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "intermediate_size": 4096}
    words = {"hidden_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 16, "intermediate_size": 5632}
    if size == "tiny":
        eyes = dict.fromkeys(eyes, 2) | {"hidden_size": 32, "intermediate_size": 64, "image_size": 32, "patch_size": 8}
        words = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    config = LlamaConfig(**words, vocab_size=99 if size == "tiny" else 32_000, use_cache=False)
    model = built(
        lambda: _Captions(
            ViTModel(ViTConfig(**eyes), add_pooling_layer=False), eyes["hidden_size"], LlamaForCausalLM(config)
        ),
        device,
    )
    batch, length, pixels = (2, 8, 32) if size == "tiny" else (8, 512, 224)
    images, tokens = noise(device, torch.float32, batch, 3, pixels, pixels), draw_tokens(device, 90, batch, length)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    optimizer = adamw(model)

    def loss(_: int) -> torch.Tensor:
        with torch.autocast(device.type, torch.float16 if device.type == "cuda" else torch.bfloat16):
            return scaler.scale(model(images, tokens))

    class Scaled(torch.optim.Optimizer):
        """Steps as a loop with a GradScaler does."""

        def __init__(self) -> None:
            super().__init__(model.parameters(), {})

        def step(self, _closure: Any = None) -> None:  # type: ignore[override]
            try:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
            finally:  # the benchmark goes on after a step that ran out of memory
                scaler.update()

    return ZooModel(model, lists_of(model.speaks, "model.layers"), loss, Scaled())


# ---- A block for each frame
class _Cell(nn.Module):
    """A convolutional LSTM cell (Shi and others, 2015)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates, self.norm = nn.Conv2d(2 * width, 4 * width, 3, padding=1), nn.GroupNorm(4, 4 * width)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given, forgets, made, shown = self.norm(self.gates(torch.cat([x, hidden], 1))).chunk(4, 1)
        kept = torch.sigmoid(forgets) * kept + torch.sigmoid(given) * torch.tanh(made)
        return torch.sigmoid(shown) * torch.tanh(kept), kept


class _Frames(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.cells = nn.ModuleList(_Cell(width) for _ in range(depth))

    def forward(self, video: torch.Tensor) -> torch.Tensor:
        states: list[tuple[torch.Tensor, torch.Tensor]] = []
        losses = []
        for before, after in zip(video.unbind(1)[:-1], video.unbind(1)[1:], strict=True):
            x = self.first(before)
            if not states:
                states = [(torch.zeros_like(x), torch.zeros_like(x)) for _ in self.cells]
            for number, cell in enumerate(self.cells):
                states[number] = cell(x, *states[number])
                x = states[number][0]
            losses.append(F.mse_loss(self.last(x).float(), after))
        return torch.stack(losses).mean()


@entry
def video_frames(size: Size, device: torch.device) -> ZooModel:
    """Cells that a loop over frames calls, so that each block is called many times in a step."""
    width, depth, batch, frames, pixels = (4, 2, 2, 4, 8) if size == "tiny" else (64, 4, 8, 16, 96)
    model = built(lambda: _Frames(width, depth), device)
    video = noise(device, torch.float32, batch, frames, 3, pixels, pixels)

    def loss(_: int) -> torch.Tensor:
        with autocast(device, wanted=True):
            return model(video)

    return ZooModel(model, list(model.cells), loss, adamw(model))


# ---- Latent attention and experts
@entry
def deepseek(size: Size, device: torch.device) -> ZooModel:
    """DeepSeek-V3 of a small size: attention with latent vectors, and experts of which each token takes some."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    small = {
        "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
        "num_experts_per_tok": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8, "first_k_dense_replace": 1, "vocab_size": 99,
    }  # fmt: skip
    large = {
        "hidden_size": 1536, "intermediate_size": 4096, "moe_intermediate_size": 768, "num_hidden_layers": 12,
        "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 16, "n_group": 4, "topk_group": 2,
        "num_experts_per_tok": 4, "q_lora_rank": 768, "kv_lora_rank": 256, "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64, "v_head_dim": 64, "first_k_dense_replace": 2, "vocab_size": 32_000,
    }  # fmt: skip
    config = DeepseekV3Config(**(small if size == "tiny" else large), use_cache=False)
    model = built(lambda: DeepseekV3ForCausalLM(config), device, dtype_of(size))
    data = draw_tokens(device, 90, *((2, 16) if size == "tiny" else (4, 2048)))
    return ZooModel(
        model, lists_of(model, "model.layers"), lambda _: model(input_ids=data, labels=data).loss, adamw(model)
    )


# ---- Layers in one list, without a module for what repeats
@entry
def vgg(size: Size, device: torch.device) -> ZooModel:
    """VGG-16 with batch norms: one list of convolutions, norms, activations in place and pools."""
    widths = [8, 8, 0, 16, 16, 0, 32, 32] if size == "tiny" else [
        64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0
    ]  # fmt: skip
    batch, pixels, hidden = (2, 32, 32) if size == "tiny" else (96, 224, 4096)

    def make() -> nn.Module:
        layers: list[nn.Module] = []
        given = 3
        for width in widths:
            if not width:
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [nn.Conv2d(given, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            given = width
        classify = [
            nn.Flatten(),
            nn.Linear(given * 49, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(hidden, 10),
        ]
        return nn.Sequential(nn.Sequential(*layers), nn.AdaptiveAvgPool2d(7), nn.Sequential(*classify))

    model = built(make, device)
    images = noise(device, torch.float32, batch, 3, pixels, pixels)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)

    def loss(_: int) -> torch.Tensor:
        with autocast(device, wanted=True):
            return model(images).float().logsumexp(-1).mean()

    convolutions = [each for each in model[0] if isinstance(each, nn.Conv2d | nn.BatchNorm2d)]
    return ZooModel(model, convolutions, loss, optimizer)
