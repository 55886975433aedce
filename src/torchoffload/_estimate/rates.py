"""How long an operator takes on a card: the longest of computing, of memory, and of a launch.

The efficiencies below say which part of the figures of a data sheet kernels reach. They are the only fitted numbers of
an estimate; memory has none. Tuned on an H200, torch 2.11, forward and backward: the Llamas A and C of
``docs/performance.md``, ConvNeXt-L, ResNet-50, ViT-L, a DiT and a T5. ``tests/estimate/measured.py`` says which steps
these are, and ``test_measured.py`` compares estimates with them and with steps that were not used for tuning.
"""

import torch

from torchoffload._estimate.cards import Card
from torchoffload._estimate.operators import Cost

__all__ = ["HOST_S", "seconds_of"]

HOST_S = 2.5e-5
"""The host's time for an operator of an eager step: a step cannot take less than this for all of them.

61 ms for 2,093 operators of A with one sequence of 1024 tokens, a step whose device waits for the host
(benchmarks/results/2026-11-21-h200-hooks-in-step-short.json).
"""

_LAUNCH_S = 3e-6
_BANDWIDTH = 0.75
_EFFICIENCY = {"product": 0.85, "convolution": 0.50, "attention": 0.95, "attention backward": 0.80, "other": 0.5}
_HALF_AT = {"product": 512, "convolution": 64, "attention": 64, "attention backward": 64}
"""Half of the efficiency is reached if the smallest size of a product, the channels, or a head's size are as many."""
_SINGLE_HALF_AT = 64
"""The same for products in float32 without TF32, which do not run on tensor cores."""
_MOST_KEYS, _BY_KEYS = 65_536, 0.1
"""Attention to fewer keys than the first reaches a part of its efficiency: (keys / first) ** second."""
_FEWEST_CHANNELS = 16
_GROUPED = 0.15
"""Convolutions of fewer channels, as depthwise ones, run outside of tensor cores, at this part of float32's rate."""


def seconds_of(cost: Cost, card: Card) -> float:
    """Return how long a call of an operator takes, in seconds."""
    rate, efficiency = _rate(cost, card), _EFFICIENCY[cost.kind]
    if cost.kind == "convolution" and cost.smallest < _FEWEST_CHANNELS:
        rate, efficiency = card.single_tflops, _GROUPED
    elif cost.kind in _HALF_AT:
        is_single = cost.kind == "product" and not (_is_half(cost, card) or _uses_tf32())
        efficiency *= cost.smallest / (cost.smallest + (_SINGLE_HALF_AT if is_single else _HALF_AT[cost.kind]))
        if cost.length:
            efficiency *= min(1.0, cost.length / _MOST_KEYS) ** _BY_KEYS
    computing = cost.flops / (rate * 1e12 * efficiency) if cost.flops else 0.0
    return max(computing, cost.nbytes / (card.bandwidth_gb_per_s * 1e9 * _BANDWIDTH), _LAUNCH_S if cost.nbytes else 0.0)


def _rate(cost: Cost, card: Card) -> float:
    """Return the rate of a data sheet, in 1e12 operations a second."""
    if _is_half(cost, card):
        return card.half_tflops
    if cost.kind == "convolution":  # torch.backends.cudnn.allow_tf32 is on by default
        return card.tf32_tflops
    return card.tf32_tflops if cost.kind == "product" and _uses_tf32() else card.single_tflops


def _is_half(cost: Cost, card: Card) -> bool:
    return cost.dtype is torch.float16 or (cost.dtype is torch.bfloat16 and card.has_bfloat16)


def _uses_tf32() -> bool:
    """Return whether products in float32 are computed in TF32, which is off by default."""
    return torch.get_float32_matmul_precision() != "highest"
