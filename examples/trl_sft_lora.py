"""TRL's SFTTrainer with LoRA: ``activation_offloading=True``, carried out by torchoffload.

The base model's frozen weights never move; what moves is what the adapters need in backward.

    python examples/trl_sft_lora.py
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import Any

import _trainers
from _options import offload_options


def train(arguments: argparse.Namespace, offloaded: bool) -> tuple[Any, list[dict[str, Any]]]:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import ByT5Tokenizer
    from trl import SFTConfig, SFTTrainer

    import torchoffload.integrations.trl
    from torchoffload.integrations.transformers import LogOffloadingCallback

    tokenizer = ByT5Tokenizer()  # bytes: it has no files
    texts = [bytes(row.tolist()).decode("utf-8", errors="replace") for row in _trainers.rows_of_text(arguments)]
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as directory:
        options = SFTConfig(
            **_trainers.training_arguments(arguments, directory),
            max_length=arguments.tokens,
            activation_offloading=offloaded,
            gradient_checkpointing=False,
            bf16=False,
        )
        torch.manual_seed(0)
        with torchoffload.integrations.trl.install(**offload_options(arguments)):
            trainer = SFTTrainer(
                model=_trainers.make_model(arguments, vocabulary=len(tokenizer)),
                args=options,
                train_dataset=Dataset.from_list([{"text": text} for text in texts]),
                processing_class=tokenizer,
                peft_config=adapters,
                callbacks=[LogOffloadingCallback()] if offloaded else [],
            )
        trainer.train()
    return trainer.model, [entry for entry in trainer.state.log_history if "loss" in entry]


def main() -> int:
    arguments = _trainers.make_parser("Tune a small Llama with TRL and LoRA, plain and offloaded.").parse_args()
    try:
        import peft  # noqa: F401
        import trl  # noqa: F401
    except ImportError as error:
        raise SystemExit("this example needs trl and peft: pip install trl peft") from error
    return _trainers.compare(lambda offloaded: train(arguments, offloaded))


if __name__ == "__main__":
    sys.exit(main())
