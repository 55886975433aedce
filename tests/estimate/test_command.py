"""python -m torchoffload.estimate: from a config or a function to a table or JSON, and messages for what is wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from torchoffload._estimate.command import main

MODELS = """
import torch
from torch import nn

def build(batch, sequence):
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)), torch.zeros(batch, sequence, 16)

def by_name():
    class Net(nn.Linear):
        def forward(self, x, scale):
            return super().forward(x) * scale
    return Net(16, 4), {"x": torch.zeros(2, 16), "scale": torch.ones(())}

def wrong():
    return 3
"""


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "models_to_estimate.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("models_to_estimate", None)


def config(path: Path, **more: object) -> str:
    values = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, **more,
    }  # fmt: skip
    path.write_text(json.dumps(values))
    return str(path)


def test_a_function_that_builds_on_the_meta_device(capsys: pytest.CaptureFixture[str]):
    assert main(["models_to_estimate:build", "--gpu", "a100", "--batch", "3", "--sequence", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["card"]["name"] == "A100 80GB"
    assert found["saved_bytes"] == 3 * 5 * 4 * (16 + 32 + 32)  # the inputs of both layers and of the activation
    assert found["way"] == "plain"


def test_inputs_by_name(capsys: pytest.CaptureFixture[str]):
    assert main(["models_to_estimate:by_name"]) == 0
    assert "use: the step as it is" in capsys.readouterr().out


def test_a_config_as_a_file_and_as_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("transformers")
    file = config(tmp_path / "config.json")
    told = []
    for model in (file, str(tmp_path)):
        assert main([model, "--sequence", "32", "--batch", "2", "--json", "--optimizer", "12"]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert told[0]["saved_bytes"] == told[1]["saved_bytes"] > 0
    # weights in bfloat16 unless autocast says otherwise, and 12 bytes for each parameter
    assert told[0]["optimizer_bytes"] == 6 * told[0]["gradients_bytes"]
    assert main([file, "--sequence", "32", "--batch", "2", "--json", "--autocast", "bf16"]) == 0
    assert json.loads(capsys.readouterr().out)["gradients_bytes"] == 2 * told[0]["gradients_bytes"]


def test_figures_in_place_of_those_of_the_card(capsys: pytest.CaptureFixture[str]):
    assert main(["models_to_estimate:build", "--gpu", "H200", "--link", "10", "--tflops", "400", "--json"]) == 0
    card = json.loads(capsys.readouterr().out)["card"]
    assert (card["link_gb_per_s"], card["half_tflops"]) == (10, 400)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["models_to_estimate:build", "--gpu", "RTX 4091"], "did you mean 'RTX 4090'"),
        (["models_to_estimate:build", "--optimizer", "admw"], "Did you mean 'adamw'"),
        (["models_to_estimate:build", "--memory", "much"], "memory must be"),
        (["models_to_estimate:nothing"], "no function 'nothing'"),
        (["models_to_estimate:wrong"], "must return a torch.nn.Module"),
        (["no_such_module:build"], "no module 'no_such_module'"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert text in told
    assert "Traceback" not in told


def test_a_config_of_no_language_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    assert main([str(tmp_path)]) == 2
    assert "module:function" in capsys.readouterr().err


def test_the_list_of_cards(capsys: pytest.CaptureFixture[str]):
    assert main(["--list"]) == 0
    told = capsys.readouterr().out
    assert "NVIDIA L40S data sheet" in told
    assert "adamw-8bit" in told


def test_it_runs_as_a_module():
    program = [sys.executable, "-W", "error::RuntimeWarning", "-m", "torchoffload.estimate"]
    done = subprocess.run([*program, "models_to_estimate:build"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "saved by autograd" in done.stdout
    missing = subprocess.run(program, capture_output=True, text=True)
    assert missing.returncode == 2
    assert "MODEL is missing" in missing.stderr


def test_the_meta_device_is_left_behind():
    main(["models_to_estimate:build"])
    assert nn.Linear(1, 1).weight.device == torch.device("cpu")
