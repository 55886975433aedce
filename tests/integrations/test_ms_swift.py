"""ms-swift: the plugin of docs/from-ms-swift.md in its own sft_main."""

import json
import re
import subprocess
import sys
from pathlib import Path

from places import DOCS, environment_with_support
from trainings import need

need("swift", "modelscope", "transformers", "tokenizers")

# What the page leaves open ("..."), for a model of a few weights in plain files.
PROGRAM = """
import json
import sys

import torch
import torchoffload
from devices import Device
from gradients import Run
from swift import SftArguments, sft_main
from trainings import tiny_llama
from words import tokenizer

tiny_llama(Run(Device("disk", None), stock=True, context=None)).save_pretrained("model")
tokenizer().save_pretrained("model")
rows = [{"messages": [{"role": "user", "content": f"w{n} w{n + 1}"},
                      {"role": "assistant", "content": " ".join(f"w{n + i}" for i in range(3, 9))}]} for n in range(8)]
open("rows.jsonl", "w").write("\\n".join(map(json.dumps, rows)))


def train(callbacks):
    torchoffload.reset_stats()
    trained = sft_main(SftArguments(
        external_plugins=["offloaded.py"], callbacks=callbacks, model="model", model_type="llama", template="dummy",
        dataset=["rows.jsonl"], tuner_type="full", torch_dtype="float32", max_steps=3, per_device_train_batch_size=2,
        logging_steps=1, save_strategy="no", report_to=[], output_dir="out", gradient_checkpointing=False, use_cpu=True,
        max_length=64, split_dataset_ratio=0, dataloader_num_workers=0, dataset_num_proc=1, use_hf=True,
        check_model=False,  # which asks a hub, over the network
    ))
    losses = [entry["loss"] for entry in trained["log_history"] if "loss" in entry]
    return {"losses": losses, "moved": torchoffload.stats().bytes_offloaded}


refused = ""
try:
    train(["unknown"])
except KeyError as error:
    refused = str(error)
print(json.dumps({"stock": train([]), "ours": train(["torchoffload"]), "refused": refused}))
"""


def plugin_of_the_page() -> str:
    """The plugin that the page shows, with the options that a CPU and a tiny model need."""
    text = re.findall(r"```python\n(.*?)```", (DOCS / "from-ms-swift.md").read_text(), re.DOTALL)[0]
    given = 'OffloadActivationsCallback("**.layers.*", keep_last=1'
    assert given in text
    return text.replace(given, f'{given}, tier="disk", min_offload_size=0, learn=False, offload_window_bytes=0')


def test_the_plugin_of_the_page_gives_the_same_training(tmp_path: Path):
    (tmp_path / "offloaded.py").write_text(plugin_of_the_page())
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = environment_with_support(Path(__file__).parent) | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert len(said["stock"]["losses"]) == 3
    assert said["ours"]["losses"] == said["stock"]["losses"]
    assert said["stock"]["moved"] == 0
    assert said["ours"]["moved"] > 0
    assert said["refused"] == "'unknown'"
