"""torchtune: the file of docs/from-torchtune.md under `tune run`, with one of torchtune's recipes as it is."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from places import DOCS, ROOT
from trainings import need, skip_for

need("torchdata", "omegaconf", "sentencepiece", "tiktoken", "kagglehub")

PACKAGES = Path(sys.prefix) / "torchtune"  # not where other packages are, since torchtune wants an older torchao
skip_for([] if PACKAGES.is_dir() else ["torchtune"])

PARTS = """
import torch
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.models.llama3 import llama3


def tiny():
    sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32, "intermediate_dim": 64}
    return llama3(vocab_size=64, max_seq_len=32, **sizes)


class Tokenizer:
    pad_id, max_seq_len = 0, 32


class Rows(torch.utils.data.Dataset):
    def __init__(self, tokenizer):
        generator = torch.Generator().manual_seed(5)
        self.rows = torch.randint(3, 64, (8, 16), generator=generator).tolist()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return {"tokens": self.rows[number], "labels": [CROSS_ENTROPY_IGNORE_IDX, *self.rows[number][1:]]}


class Checkpointer:
    def __init__(self, **options):
        pass

    def load_checkpoint(self):
        torch.manual_seed(0)
        return {"model": tiny().state_dict()}

    def save_checkpoint(self, state_dict, **options):
        pass
"""

CONFIG = """
output_dir: out
tokenizer: {_component_: parts.Tokenizer}
dataset: {_component_: parts.Rows}
model: {_component_: parts.tiny}
checkpointer: {_component_: parts.Checkpointer, model_type: LLAMA3}
optimizer: {_component_: torch.optim.SGD, lr: 0.1}
loss: {_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}
metric_logger: {_component_: torchtune.training.metric_logging.StdoutLogger}
seed: 1
shuffle: False
batch_size: 2
epochs: 1
max_steps_per_epoch: 3
gradient_accumulation_steps: 1
resume_from_checkpoint: False
optimizer_in_bwd: False
compile: False
device: cpu
dtype: fp32
enable_activation_checkpointing: True
enable_activation_offloading: False  # True is a RuntimeError without CUDA, so the test's function ignores it
"""

REPORTS = """
import atexit
import torchoffload
atexit.register(lambda: print("moved", torchoffload.stats().bytes_offloaded))
"""


def file_of_the_page() -> str:
    """The file that the page shows, with a function that offloads on a CPU, whatever the recipe asks for."""
    text = next(
        block for block in re.findall(r"```python\n(.*?)```", (DOCS / "from-torchtune.md").read_text(), re.DOTALL)
    )
    on_a_cpu = (
        "lambda model, enable: torchoffload.get_act_offloading_ctx_manager(\n"
        '    model, True, tier="disk", min_offload_size=0, learn=False, offload_window_bytes=0\n)'
    )
    ours = "= torchoffload.get_act_offloading_ctx_manager"
    assert ours in text
    return REPORTS + text.replace(ours, f"= {on_a_cpu}")


def tune_run(directory: Path, recipe: str) -> str:
    command = [sys.executable, "-m", "torchtune._cli.tune", "run", recipe, "--config", "tiny.yaml"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", directory, PACKAGES)))}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(printed: str) -> list[Any]:
    return re.findall(r"Step (\d+) \| loss:([\d.]+)", printed)


def test_a_recipe_that_tune_run_starts_offloads_with_ours(tmp_path: Path):
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    (tmp_path / "offloaded.py").write_text(file_of_the_page())
    stock = tune_run(tmp_path, "full_finetune_single_device")
    ours = tune_run(tmp_path, "offloaded")
    assert len(losses(stock)) == 3
    assert losses(ours) == losses(stock)
    moved = re.search(r"^moved (\d+)$", ours, flags=re.MULTILINE)
    assert moved is not None
    assert int(moved[1]) > 0
