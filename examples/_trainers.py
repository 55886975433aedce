"""What the examples with a trainer share: a small Llama over bytes, made from a configuration, and the comparison."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

# Before torch looks: a Trainer would spread each batch over all GPUs that it sees.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to be deterministic

import torch

import torchoffload
from _compare import different_parameters
from _options import MIB, add_offload_options, device_of, positive
from _text import standard_library_text

BYTE_COUNT = 256


def make_parser(description: str) -> argparse.ArgumentParser:
    """Make the options: the tier, and the shape."""
    parser = argparse.ArgumentParser(description=description)
    add_offload_options(parser)
    parser.add_argument("--steps", type=positive, default=4, help="optimizer steps of each run (%(default)s)")
    parser.add_argument("--width", type=positive, default=128, help="features of a token (%(default)s)")
    parser.add_argument("--layers", type=positive, default=4, help="decoder layers (%(default)s)")
    parser.add_argument("--batch", type=positive, default=8, help="sequences in a batch (%(default)s)")
    parser.add_argument("--tokens", type=positive, default=512, help="bytes in a sequence (%(default)s)")
    return parser


def make_model(arguments: argparse.Namespace, vocabulary: int = BYTE_COUNT) -> Any:
    """Make a Llama with the same weights each time; nothing is downloaded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=arguments.width,
        intermediate_size=3 * arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=arguments.tokens,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def training_arguments(arguments: argparse.Namespace, directory: str) -> dict[str, Any]:
    """What each trainer is told: no files, no reports, a fixed number of steps."""
    return {
        "output_dir": directory,
        "use_cpu": device_of(arguments).type != "cuda",
        "max_steps": arguments.steps,
        "per_device_train_batch_size": arguments.batch,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
    }


def rows_of_text(arguments: argparse.Namespace) -> torch.Tensor:
    """Return text as (rows, tokens), as many rows as the steps take."""
    count = arguments.steps * arguments.batch
    return standard_library_text(count * arguments.tokens).view(count, arguments.tokens)


def compare(train: Callable[[bool], tuple[Any, list[dict[str, Any]]]]) -> int:
    """Train plain and offloaded, compare losses and weights bit for bit; the exit status.

    ``train(offloaded)`` returns the trained model and the trainer's log.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    plain, plain_log = train(False)
    torchoffload.reset_stats()
    offloaded, offloaded_log = train(True)

    print(f"{'step':>4}{'plain loss':>14}{'offloaded loss':>16}{'moved':>12}")
    for before, after in zip(plain_log, offloaded_log, strict=True):
        moved = 1024 * after.get("offload/gib_offloaded", 0.0)
        print(f"{before['step']:>4}{before['loss']:>14.6f}{after['loss']:>16.6f}{moved:>8.0f} MiB")
    left, right = (
        {name: parameter.detach().cpu() for name, parameter in model.named_parameters()} for model in (plain, offloaded)
    )
    different = different_parameters(left, right)
    same_losses = [each["loss"] for each in plain_log] == [each["loss"] for each in offloaded_log]
    verdict = f"NOT THE SAME: {', '.join(different[:3])}" if different or not same_losses else "identical"
    print(f"losses and {len(left)} parameters: {verdict}")
    stats = torchoffload.stats()
    print(f"moved {stats.bytes_offloaded / MIB:.0f} MiB, kept {dict(stats.records_kept)} records")
    return int(verdict != "identical" or stats.bytes_offloaded == 0)
