"""The same comparison as train_gpt.py with a Hugging Face Llama, made from a configuration: nothing is downloaded.

It asks for offloading the way trainers do: ``get_act_offloading_ctx_manager`` makes one context for the whole run and
leaves the output head's own saved tensors alone, for they are the first that backward wants back.

    python examples/train_llama.py
"""

from __future__ import annotations

import argparse
import functools
import sys

import torch

import _compare
import torchoffload
from _options import device_of, offload_options

BYTE_COUNT = 256


def make_task(arguments: argparse.Namespace) -> _compare.Task:
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise SystemExit("this example needs transformers: pip install transformers") from error

    config = LlamaConfig(
        vocab_size=BYTE_COUNT,
        hidden_size=arguments.width,
        intermediate_size=arguments.intermediate,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        max_position_embeddings=arguments.tokens,
        attn_implementation="sdpa",
        use_cache=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).to(device_of(arguments)).train()

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=inputs).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @functools.cache  # made at the offloaded run's first step, entered at each: it puts hooks on the head
    def context() -> torchoffload.OffloadActivations:
        return torchoffload.get_act_offloading_ctx_manager(model, **offload_options(arguments))

    return _compare.Task(model, loss, offload=context)


def make_parser() -> argparse.ArgumentParser:
    parser = _compare.make_parser("Train a Hugging Face Llama made from a configuration; plain, offloaded, and by fit.")
    shape = parser.add_argument_group("shape", "the defaults save more than 512 MiB for backward, in 32-bit floats")
    shape.add_argument("--width", type=int, default=128, help="features of a token (hidden_size) (%(default)s)")
    shape.add_argument(
        "--intermediate", type=int, default=384, help="features inside a feed-forward network (%(default)s)"
    )
    shape.add_argument("--layers", type=int, default=6, help="decoder layers (%(default)s)")
    shape.add_argument("--heads", type=int, default=4, help="attention heads of a layer (%(default)s)")
    shape.add_argument("--kv-heads", type=int, default=2, help="key and value heads of a layer (%(default)s)")
    shape.add_argument("--batch", type=int, default=32, help="sequences in a batch (%(default)s)")
    shape.add_argument("--tokens", type=int, default=256, help="bytes in a sequence (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(_compare.main(make_parser(), make_task))
