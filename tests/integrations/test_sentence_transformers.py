"""sentence-transformers: the callback in its own trainer."""

from pathlib import Path
from typing import Any

import pytest

from devices import Device
from gradients import Run, assert_same_gradients
from trainings import hooks_of, need, options, tiny_llama

need("sentence_transformers", "sklearn", "datasets", "accelerate")

from datasets import Dataset  # noqa: E402
from sentence_transformers import (  # noqa: E402
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer import losses, modules  # noqa: E402

from hf_trainings import observe_trainer, on_one_device, quiet  # noqa: E402
from torchoffload.integrations.transformers import OffloadActivationsCallback  # noqa: E402
from words import sentence, tokenizer  # noqa: E402


def encoder(run: Run, directory: Path) -> Any:
    """Mean pooling over a small transformer, read from files, since the library makes it so."""
    tiny_llama(run).model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    transformer = modules.Transformer(str(directory), max_seq_length=32)
    pooling = modules.Pooling(transformer.get_embedding_dimension(), pooling_mode="mean")
    return SentenceTransformer(modules=[transformer, pooling], device=run.device.type)


@pytest.mark.devices("disk", "cuda")
def test_the_same_training(tmp_path: Path, device_under_test: Device):
    rows = [{"anchor": sentence(n, 6), "positive": sentence(n + 1, 7)} for n in range(8)]

    def program(run: Run) -> None:
        given = quiet(tmp_path / "out", use_cpu=run.device.type != "cuda", per_device_train_batch_size=4)
        model = encoder(run, tmp_path / "model")
        trainer = SentenceTransformerTrainer(
            model,
            on_one_device(SentenceTransformerTrainingArguments(**given)),
            train_dataset=Dataset.from_list(rows),
            loss=losses.MultipleNegativesRankingLoss(model),
            callbacks=[] if run.stock else [OffloadActivationsCallback(**options(device_under_test))],
        )
        trainer.train()
        observe_trainer(run, trainer)
        assert hooks_of(model) == 0

    assert_same_gradients(program, device=device_under_test)
