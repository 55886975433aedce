"""Hugging Face's Trainer with one callback more: the same training, with its activations offloaded.

Losses and weights of both runs are compared bit for bit; the trainer's log says what each step moved.

    python examples/hf_trainer.py
    python examples/hf_trainer.py --checkpointing
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import Any

import _trainers
from _options import offload_options


def train(arguments: argparse.Namespace, offloaded: bool) -> tuple[Any, list[dict[str, Any]]]:
    from transformers import Trainer, TrainingArguments

    from torchoffload.integrations.transformers import OffloadActivationsCallback

    callbacks = [OffloadActivationsCallback(**offload_options(arguments))] if offloaded else []
    rows = [{"input_ids": row.long(), "labels": row.long()} for row in _trainers.rows_of_text(arguments)]
    model = _trainers.make_model(arguments)
    if arguments.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with tempfile.TemporaryDirectory() as directory:
        options = TrainingArguments(**_trainers.training_arguments(arguments, directory))
        trainer = Trainer(model, options, train_dataset=rows, callbacks=callbacks)
        trainer.train()
    return model, [entry for entry in trainer.state.log_history if "loss" in entry]


def main() -> int:
    parser = _trainers.make_parser("Train a small Llama with Hugging Face's Trainer, plain and offloaded.")
    parser.add_argument("--checkpointing", action="store_true", help="checkpoint each layer, in both runs")
    arguments = parser.parse_args()
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise SystemExit(
            "this example needs transformers and accelerate: pip install transformers accelerate"
        ) from error
    return _trainers.compare(lambda offloaded: train(arguments, offloaded))


if __name__ == "__main__":
    sys.exit(main())
