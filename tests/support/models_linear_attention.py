"""models_linear_attention.py: gated linear attention by chunks, in custom Functions that save as published kernels do.

One saves its inputs and computes the states of the chunks anew in backward, or saves the states too; one saves its own
output and a statistic; one saves nothing but views on one buffer. None keeps a tensor but through save_for_backward.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional


def _decays(gates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e^(b_i - b_j) for j <= i, b): b sums the log gates (batch, heads, chunk) within the chunk."""
    b = gates.cumsum(-1)
    below = torch.ones(b.shape[-1], b.shape[-1], dtype=torch.bool, device=b.device).tril()
    difference = (b[..., :, None] - b[..., None, :]).masked_fill(~below, float("-inf"))
    return difference.exp(), b


def _states(k: torch.Tensor, v: torch.Tensor, gates: torch.Tensor, first: torch.Tensor, chunk: int) -> torch.Tensor:
    """The state before each chunk, and the one after the last: (chunks + 1, batch, heads, key, value)."""
    states = [first]
    for k_c, v_c, g_c in zip(k.split(chunk, 2), v.split(chunk, 2), gates.split(chunk, 2), strict=True):
        b = g_c.cumsum(-1)
        weighted = k_c * (b[..., -1:] - b).exp()[..., None]
        states.append(b[..., -1].exp()[..., None, None] * states[-1] + weighted.transpose(-1, -2) @ v_c)
    return torch.stack(states)


def _at_least_float32(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]


class ChunkedAttention(torch.autograd.Function):
    """o_t = q_t S_t with S_t = e^(g_t) S_(t-1) + k_t v_t^T; gives (o, the last S).

    q and k are (batch, heads, tokens, key), v (batch, heads, tokens, value), gates (batch, heads, tokens) and first the
    state to begin with. With `saves_states` the states of the chunks are saved, else backward computes them again.
    Computes in 32 bits at least, whatever comes in, and saves what came in.
    """

    @staticmethod
    def forward(ctx: Any, q, k, v, gates, first, chunk: int, saves_states: bool):
        with torch.autocast(q.device.type, enabled=False):
            return ChunkedAttention._forward(ctx, (q, k, v, gates, first), chunk, saves_states)

    @staticmethod
    def _forward(ctx: Any, given: tuple[torch.Tensor, ...], chunk: int, saves_states: bool):
        q, k, v, gates, first = _at_least_float32(*given)
        states = _states(k, v, gates, first, chunk)
        outputs = []
        parts = zip(*(t.split(chunk, 2) for t in (q, k, v, gates)), states[:-1], strict=True)
        for q_c, k_c, v_c, g_c, state in parts:
            decays, b = _decays(g_c)
            outputs.append((q_c @ k_c.transpose(-1, -2) * decays) @ v_c + (q_c * b.exp()[..., None]) @ state)
        ctx.chunk = chunk
        ctx.save_for_backward(*given, states[:-1] if saves_states else None)
        return torch.cat(outputs, 2), states[-1].clone()

    @staticmethod
    def backward(ctx: Any, d_output, d_last):
        *given, states = ctx.saved_tensors
        q, k, v, gates, first = _at_least_float32(*given)
        if states is None:
            states = _states(k, v, gates, first, ctx.chunk)[:-1]
        d_state, parts = d_last, []
        split = [t.split(ctx.chunk, 2) for t in (q, k, v, gates, d_output)]
        for q_c, k_c, v_c, g_c, d_c, state in reversed(list(zip(*split, states, strict=True))):
            decays, b = _decays(g_c)
            into, through = b.exp()[..., None], (b[..., -1:] - b).exp()[..., None]
            scores = q_c @ k_c.transpose(-1, -2)
            d_scores = d_c @ v_c.transpose(-1, -2) * decays
            from_state = into * (d_c @ state.transpose(-1, -2))
            to_state = through * (v_c @ d_state.transpose(-1, -2))
            d_v = (scores * decays).transpose(-1, -2) @ d_c + (k_c * through) @ d_state
            d_b = (d_scores * scores).sum(-1) - (d_scores * scores).sum(-2)
            reached = (k_c * to_state).sum(-1)
            d_b = d_b + (q_c * from_state).sum(-1) - reached
            kept = b[..., -1].exp()[..., None, None] * d_state
            d_b[..., -1] += reached.sum(-1) + (kept * state).sum((-1, -2))
            d_gates = d_b.flip(-1).cumsum(-1).flip(-1)
            parts.append((d_scores @ k_c + from_state, d_scores.transpose(-1, -2) @ q_c + to_state, d_v, d_gates))
            d_state = kept + (q_c * into).transpose(-1, -2) @ d_c
        d_q, d_k, d_v, d_gates = (torch.cat(each[::-1], 2) for each in zip(*parts, strict=True))
        gradients = zip((d_q, d_k, d_v, d_gates, d_state), given, strict=True)
        return *(gradient.to(tensor.dtype) for gradient, tensor in gradients), None, None


class UnitLength(torch.autograd.Function):
    """x / |x| over the last dimension; saves its own output, and one number a row."""

    @staticmethod
    def forward(ctx: Any, x):
        (x,) = _at_least_float32(x)
        rstd = (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        y = x * rstd
        ctx.save_for_backward(y, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, gradient):
        y, rstd = ctx.saved_tensors
        return (gradient - y * (gradient * y).sum(-1, keepdim=True)) * rstd


class GatedProduct(torch.autograd.Function):
    """silu(a) * b of the two halves of one projection; saves the halves, which are views on one buffer."""

    @staticmethod
    def forward(ctx: Any, both):
        a, b = both.chunk(2, -1)
        ctx.save_for_backward(a, b)
        return functional.silu(a) * b

    @staticmethod
    def backward(ctx: Any, gradient):
        a, b = ctx.saved_tensors
        gate = torch.sigmoid(a)
        d_a = gradient * b * (gate + a * gate * (1 - gate))
        return torch.cat([d_a, gradient * a * gate], -1)


class LinearAttentionBlock(nn.Module):
    """A short convolution, chunked attention with gates, and a gated MLP. Takes a state, and gives the next."""

    def __init__(self, width: int = 32, heads: int = 2, chunk: int = 8, saves_states: bool = False) -> None:
        super().__init__()
        self.heads, self.chunk, self.saves_states = heads, chunk, saves_states
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.convolution = nn.Conv1d(3 * width, 3 * width, 4, groups=3 * width, padding=3)
        self.gates = nn.Linear(width, heads)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def first_state(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1] // self.heads
        return x.new_zeros(x.shape[0], self.heads, size, size)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.norm(x)
        mixed = self.convolution(self.qkv(normed).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        q, k, v = functional.silu(mixed).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        gates = functional.logsigmoid(self.gates(normed)).transpose(1, 2)
        attended, state = ChunkedAttention.apply(
            UnitLength.apply(q), UnitLength.apply(k), v, gates, state, self.chunk, self.saves_states
        )
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(GatedProduct.apply(self.up(self.norm_mlp(x)))), state


class LinearAttentionModel(nn.Module):
    """Embedding, `depth` blocks with a state each, and the loss."""

    def __init__(self, depth: int = 2, width: int = 32, vocabulary: int = 64, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LinearAttentionBlock(width, **options) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(
        self, tokens: torch.Tensor, labels: torch.Tensor, states: list[torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x = self.embedding(tokens)
        states = states or [block.first_state(x) for block in self.blocks]
        after = []
        for block, state in zip(self.blocks, states, strict=True):
            x, state = block(x, state)
            after.append(state)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()), after
