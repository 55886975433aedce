"""trainings.py: what these tests share: needed packages, a small model and its data, a device's options."""

import importlib.util
import os
from typing import Any

import pytest
import torch

from devices import WINDOWS, Device
from gradients import Run

REQUIRED = os.environ.get("TORCHOFFLOAD_REQUIRE_INTEGRATIONS") == "1"
VOCABULARY = 64


def need(*packages: str) -> None:
    """Skips the module, or with TORCHOFFLOAD_REQUIRE_INTEGRATIONS=1 fails, where a package is not installed."""
    skip_for([package for package in packages if importlib.util.find_spec(package) is None])


def skip_for(missing: list[str]) -> None:
    """Skips the module for these packages, or fails; does nothing if the list is empty."""
    if missing and REQUIRED:
        raise ModuleNotFoundError(f"TORCHOFFLOAD_REQUIRE_INTEGRATIONS=1, and there is no {', '.join(missing)}")
    if missing:
        reason = f"{', '.join(missing)} not installed: `make test-integrations` has an environment of its own"
        pytest.skip(reason, allow_module_level=True)


def options(device: Device, **more: Any) -> dict[str, Any]:
    """The options with which a tiny model's tensors move on `device`, and are read back from where they were moved."""
    chosen: dict[str, Any] = {"tier": device.tier, "min_offload_size": 0, "learn": False}
    chosen["offload_window_bytes"], chosen["reload_window_bytes"] = WINDOWS[device.name]
    if device.tier == "disk":
        chosen["disk_dir"] = str(device.directory)
    return chosen | more


ROOM_FOR_ALL = 1 << 50
STEPS_TO_SETTLE = 28  # a survey takes three steps at most, and each plan that is tried another three


def memory_of(fitted: Any, part: float) -> int:
    """What `memory` is between the least that will do, at 0, and what the plain step takes, at 1."""
    points = fitted.frontier()
    low, high = points[0].memory_bytes, points[-1].memory_bytes
    return int((low + (high - low) * part) / (1 - 0.04)) + 1


def assert_was_fitted(fitted: Any, *, moves: bool = True, recomputes: bool = True) -> None:
    """Fails unless a plan was tried and followed that moves or computes again something, and all is over now."""
    assert fitted.phase == "removed"
    assert fitted.plan.measured_s is not None, fitted.report()
    assert (fitted.plan.moved_bytes > 0 and moves) or (fitted.plan.recompute_s > 0 and recomputes), fitted.report()
    assert fitted.plan.moved_bytes == 0 or moves
    assert fitted.plan.recompute_s == 0 or recomputes
    assert "What the blocks do:" in fitted.report()


def tiny_llama(run: Run, **config: Any) -> Any:
    """A Llama of two layers, the same weights in each run, on the run's device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    chosen = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return run.module(lambda: LlamaForCausalLM(LlamaConfig(**(chosen | config))))


def token_rows(rows: int = 8, tokens: int = 16) -> list[dict[str, torch.Tensor]]:
    """Random sequences with themselves as labels, the same in each run."""
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randint(3, VOCABULARY, (rows, tokens), generator=generator)
    return [{"input_ids": row, "labels": row} for row in drawn]


def hooks_of(model: torch.nn.Module) -> int:
    """The forward hooks of torchoffload on all modules of `model`."""
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    return sum(hook.__module__.startswith("torchoffload") for hook in hooks)
