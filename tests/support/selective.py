"""selective.py: what the tests of selective checkpoints share: policies, and blocks under one.

The stock runs use create_selective_checkpoint_contexts with the same policy, where CPU_OFFLOAD is told as SAVE.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import torchoffload
from gradients import Run

aten = torch.ops.aten
NBYTES = 32 * 32 * 4
HAS_CPU_OFFLOAD = "MUST_CPU_OFFLOAD" in CheckpointPolicy.__members__
needs_cpu_offload = pytest.mark.skipif(not HAS_CPU_OFFLOAD, reason="CheckpointPolicy.MUST_CPU_OFFLOAD is newer")


def selective(run: Run, policy: Any, allow_cache_entry_mutation: bool = False, **options: Any) -> Callable[[], Any]:
    """The context_fn: torch's own, or ours."""
    if not run.stock:
        return functools.partial(
            torchoffload.selective_checkpoint_context_fn, policy, allow_cache_entry_mutation, **options
        )

    def as_saved(*arguments: Any, **keywords: Any) -> Any:
        answer = policy(*arguments, **keywords)
        is_offload = getattr(answer, "name", "").endswith("CPU_OFFLOAD")
        return CheckpointPolicy.MUST_SAVE if is_offload else answer

    chosen = policy if isinstance(policy, list) else as_saved
    return functools.partial(create_selective_checkpoint_contexts, chosen, allow_cache_entry_mutation)


def policy_of(chosen: dict[Any, Any], otherwise: Any = False) -> Callable[..., Any]:
    """A policy from what it answers for each operator; names are those of CheckpointPolicy."""

    def policy(_context: Any, operator: Any, *_arguments: Any, **_keywords: Any) -> Any:
        answer = chosen.get(operator, otherwise)
        return CheckpointPolicy[answer] if isinstance(answer, str) else answer

    return policy


PRODUCTS = [aten.mm.default]


def two_layers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    hidden = (x @ weight).sin()
    return (hidden @ weight).tanh().exp() * hidden


def blocks(run: Run, policy: Any, count: int = 3, function: Callable[..., Any] = two_layers, **options: Any) -> Any:
    """Checkpointed blocks one after the other, the way they stand in a model."""
    x, weight = run.leaf(32, 32), run.parameter(32, 32)
    context_fn = selective(run, policy, **options)
    with run.offload():
        y = x.exp()
        for _ in range(count):
            y = checkpoint(function, y, weight, use_reentrant=False, context_fn=context_fn)
        loss = y.sum()
    run.check(loss=loss)
    loss.backward()
    return x.grad, weight.grad
