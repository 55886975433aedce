"""models_video.py: a small diffusion transformer over video latents, as the training pipelines of video models have it.

Latents have five dimensions (batch, channels, frames, height, width). A time step becomes six modulations of each block
(adaLN), text states come in by cross attention, and the blocks are in an nn.ModuleList.
"""

import dataclasses
import math

import torch
from torch import nn
from torch.nn import functional

from gradients import Run


@dataclasses.dataclass(frozen=True)
class VideoConfig:
    """The shape of a `VideoTransformer`."""

    channels: int = 4
    width: int = 32
    heads: int = 4
    depth: int = 2
    patch: tuple[int, int, int] = (1, 2, 2)
    text_width: int = 16


def timestep_embedding(timesteps: torch.Tensor, width: int) -> torch.Tensor:
    """Sines and cosines of (batch,) time steps: (batch, width)."""
    half = width // 2
    frequencies = torch.exp(-math.log(10000.0) * torch.arange(half, device=timesteps.device) / half)
    angles = timesteps[:, None].float() * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class Attention(nn.Module):
    """Attention with norms on queries and keys; over the tokens themselves, or over a context."""

    def __init__(self, width: int, context_width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width)
        self.to_kv = nn.Linear(context_width, 2 * width)
        self.norm_q = nn.RMSNorm(width // heads)
        self.norm_k = nn.RMSNorm(width // heads)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        q = self.to_q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.to_kv(context).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(self.norm_q(q), self.norm_k(k), v)
        return self.out(attended.transpose(1, 2).flatten(2))


class VideoBlock(nn.Module):
    """Self attention, cross attention and an MLP, modulated by the time step."""

    def __init__(self, config: VideoConfig) -> None:
        super().__init__()
        width = config.width
        self.norm_self = nn.LayerNorm(width, elementwise_affine=False)
        self.self_attention = Attention(width, width, config.heads)
        self.norm_cross = nn.LayerNorm(width)
        self.cross_attention = Attention(width, config.text_width, config.heads)
        self.norm_mlp = nn.LayerNorm(width, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Parameter(torch.randn(1, 6, width) / width**0.5)

    def forward(self, x: torch.Tensor, time: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        shift_self, scale_self, gate_self, shift_mlp, scale_mlp, gate_mlp = (self.modulation + time).chunk(6, dim=1)
        modulated = self.norm_self(x) * (1 + scale_self) + shift_self
        x = x + gate_self * self.self_attention(modulated, modulated)
        x = x + self.cross_attention(self.norm_cross(x), text)
        return x + gate_mlp * self.mlp(self.norm_mlp(x) * (1 + scale_mlp) + shift_mlp)


class VideoTransformer(nn.Module):
    """Predicts the velocity of noised latents: (batch, channels, frames, height, width) in and out."""

    def __init__(self, config: VideoConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or VideoConfig()
        self.patch_embedding = nn.Conv3d(config.channels, config.width, config.patch, stride=config.patch)
        self.time_embedding = nn.Sequential(
            nn.Linear(config.width, config.width), nn.SiLU(), nn.Linear(config.width, 6 * config.width)
        )
        self.blocks = nn.ModuleList(VideoBlock(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width, elementwise_affine=False)
        self.head = nn.Linear(config.width, config.channels * math.prod(config.patch))

    def forward(self, latents: torch.Tensor, timesteps: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        patches = self.patch_embedding(latents)
        grid = patches.shape[2:]
        x = patches.flatten(2).transpose(1, 2)
        time = self.time_embedding(timestep_embedding(timesteps, self.config.width)).unflatten(-1, (6, -1))
        for block in self.blocks:
            x = block(x, time, text)
        x = self.head(self.norm(x)).unflatten(-1, (*self.config.patch, -1)).unflatten(1, grid)
        # (batch, frames, height, width, 3 of a patch, channels): each of the patch's beside its own
        return x.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(latents.shape)


def flow_matching_loss(run: Run, model: nn.Module, frames: int = 3, size: int = 8) -> torch.Tensor:
    """One draw of latents, noise, text and time steps; the squared distance of the velocity that is predicted."""
    batch, channels = 2, model.config.channels
    latents = run.tensor(batch, channels, frames, size, size)
    noise = run.tensor(batch, channels, frames, size, size)
    text = run.tensor(batch, 5, model.config.text_width)
    sigma = (run.tensor(batch) + 1) / 2
    mix = sigma.view(-1, 1, 1, 1, 1)
    predicted = model((1 - mix) * latents + mix * noise, sigma * 1000, text)
    return functional.mse_loss(predicted, noise - latents)
