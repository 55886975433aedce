"""models_experts.py: a small mixture of experts; how many tokens an expert gets changes with each batch.

Two ways to send tokens: a loop over experts that gathers and adds back (`index_add_`), and one permutation that lays
each expert's tokens side by side, as systems with grouped products do.
"""

import dataclasses

import torch
from torch import nn
from torch.nn import functional

from models import Block


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """The shape of an `ExpertsModel`."""

    vocabulary: int = 64
    width: int = 32
    inner: int = 48
    experts: int = 4
    chosen: int = 2
    depth: int = 2
    dispatch: str = "index_add"


class Expert(nn.Module):
    """A gated MLP."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, 2 * inner, bias=False)
        self.second = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.first(x).chunk(2, -1)
        return self.second(functional.silu(gate) * up)


class Experts(nn.Module):
    """A router, its experts, and the loss that keeps their loads near each other. Experts without tokens do not run."""

    def __init__(self, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.experts = nn.ModuleList(Expert(config.width, config.inner) for _ in range(config.experts))
        self.counts: list[int] = []

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = x.flatten(0, 1)
        probabilities = self.router(tokens).softmax(-1)
        weights, chosen = probabilities.topk(self.config.chosen, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        self.counts = torch.bincount(chosen.flatten().cpu(), minlength=self.config.experts).tolist()
        load = torch.tensor(self.counts, device=x.device, dtype=x.dtype) / chosen.numel()
        balance = self.config.experts * (load * probabilities.mean(0)).sum()
        mix = self._by_index_add if self.config.dispatch == "index_add" else self._by_permutation
        return mix(tokens, weights, chosen).view_as(x), balance

    def _by_index_add(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            if row.numel():
                mixed.index_add_(0, row, expert(tokens[row]) * weights[row, place, None])
        return mixed

    def _by_permutation(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        order = chosen.flatten().argsort(stable=True)
        rows = (order // self.config.chosen)[:, None].expand(-1, tokens.shape[-1])
        parts = tokens.gather(0, rows).split(self.counts)
        results = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True) if len(part)])
        weighted = results * weights.flatten()[order, None]
        return torch.zeros_like(tokens).scatter_add(0, rows, weighted)


class ExpertsModel(nn.Module):
    """Attention blocks, each followed by experts, and the loss with the balance of each."""

    def __init__(self, config: ExpertsConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or ExpertsConfig()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.attention = nn.ModuleList(Block(config.width) for _ in range(config.depth))
        self.norms = nn.ModuleList(nn.RMSNorm(config.width) for _ in range(config.depth))
        self.mixtures = nn.ModuleList(Experts(config) for _ in range(config.depth))
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, balance = self.embedding(tokens), 0.0
        for attention, norm, experts in zip(self.attention, self.norms, self.mixtures, strict=True):
            x = attention(x)
            mixed, load = experts(norm(x))
            x, balance = x + mixed, balance + load
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + 0.01 * balance

    @property
    def counts(self) -> list[list[int]]:
        """The tokens that each expert of each layer got last."""
        return [experts.counts for experts in self.mixtures]
