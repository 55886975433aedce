"""The examples of docs/gallery.md, run as a user runs them, only smaller; those with trainers are in integrations/."""

import json
import re
from importlib.util import find_spec

import pytest
import torch

from example_runs import PNG_SIGNATURE, TIERS, output_of, rows, run, tier_options

SMALL = ["--steps", "2", "--layers", "4", "--batch", "8", "--tokens", "256", "--threads", "1"]
RANKS = ["--steps", "2", "--layers", "2", "--tokens", "256"]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("tier", TIERS)
def test_the_least_that_it_takes(tier, tmp_path):
    text = output_of(run("minimal.py", "--steps", "3", "--layers", "3", *tier_options(tier, tmp_path)))
    losses = [float(loss) for loss in re.findall(r"^step \d: loss ([\d.]+)$", text, flags=re.MULTILINE)]
    assert losses == sorted(losses, reverse=True)
    assert re.search(r"offloaded +[\d.]+ [MG]iB in [1-9]", text), text


@pytest.mark.parametrize("tier", TIERS)
def test_memory_over_a_step_is_drawn(tier, tmp_path):
    picture = tmp_path / "memory.png"
    small = ["--layers", "2", "--tokens", "64", "--batch", "2", "--out", str(picture)]
    output_of(run("memory_over_a_step.py", *small, *tier_options(tier, tmp_path)))
    assert picture.read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.parametrize("tier", TIERS)
def test_checkpointing_and_offloading_alone_and_together(tier, tmp_path):
    windows = ["--offload-window-mib", "0", "--reload-window-mib", "0"]
    table = rows(output_of(run("with_checkpointing.py", *SMALL, *windows, *tier_options(tier, tmp_path))))
    assert list(table) == ["plain", "checkpointed", "offloaded", "both"]
    assert table["plain"]["moved"] == table["checkpointed"]["moved"] == 0
    assert 0 < table["both"]["moved"] < table["offloaded"]["moved"]
    assert table["offloaded"]["loss"] < table["plain"]["loss"]
    assert table["both"]["loss"] < table["plain"]["loss"]


@pytest.mark.parametrize("tier", TIERS)
def test_chosen_modules_alone_move(tier, tmp_path):
    windows = ["--offload-window-mib", "0", "--reload-window-mib", "0"]
    ways = ["--variants", "plain", "feed_forward", "all blocks", "half the bytes", "but the last 2"]
    text = output_of(run("choose_modules.py", *SMALL, *ways, "--report", *windows, *tier_options(tier, tmp_path)))
    moved = {name: row["moved"] for name, row in rows(text).items()}
    assert moved["plain"] == 0
    assert 0 < moved["feed_forward"] < moved["all blocks"]
    assert 0 < moved["but the last 2"] < moved["all blocks"]
    assert 0 < moved["half the bytes"] <= moved["all blocks"] / 2  # in the second step: the first tells how many


def test_a_variant_that_is_not_there_is_told():
    child = run("choose_modules.py", "--variants", "plain", "everything")
    assert child.returncode == 2
    assert "no everything; there are plain, feed_forward, all blocks" in child.stderr


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("tier", TIERS)
def test_offloaded_sequences_that_train_are_longer(tier, tmp_path):
    files = {"--json": tmp_path / "tries.json", "--out": tmp_path / "pictures" / "longest.png"}
    options = [text for name, path in files.items() for text in (name, str(path))]
    memory = ["--memory-gib", "0.03125" if tier == "disk" else "0.5", "--shape", "tiny", "--threads", "1"]
    lengths = ["--tokens", "256" if tier == "disk" else "8192", "--variants", "plain", "offloaded", "--seconds", "20"]
    text = output_of(run("long_context.py", *options, *memory, *lengths, *tier_options(tier, tmp_path)))
    tries = json.loads(files["--json"].read_text())["tries"]
    longest = {name: max(each["tokens"] for each in found if each["went"]) for name, found in tries.items()}
    assert longest["offloaded"] > longest["plain"], text
    assert any(not each["went"] for each in tries["plain"]), "memory was never used up"
    assert f"{longest['offloaded']:,}" in text
    assert files["--out"].read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.parametrize("script", ["fsdp2.py", "pipeline.py"])
def test_two_processes_on_cpus(script, tmp_path):
    text = output_of(run(script, *RANKS, *tier_options("disk", tmp_path), processes=2))
    assert text.count("losses and weights: identical") == 2
    moved = [int(count) for count in re.findall(r"(\d+) MiB moved a step", text)]
    assert [count > 0 for count in moved] == [False, True, False, True]


@pytest.mark.cuda
@pytest.mark.two_gpus
@pytest.mark.parametrize("script", ["fsdp2.py", "pipeline.py"])
def test_two_processes_on_two_gpus(script, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("no two CUDA devices")
    text = output_of(run(script, *RANKS, "--tier", "host", processes=2, CUBLAS_WORKSPACE_CONFIG=":4096:8"))
    assert text.count("losses and weights: identical") == 2


def test_the_last_stage_may_stay_as_it_is(tmp_path):
    text = output_of(run("pipeline.py", *RANKS, "--last-stage-plain", *tier_options("disk", tmp_path), processes=2))
    moved = [int(count) for count in re.findall(r"(\d+) MiB moved a step", text)]
    assert [count > 0 for count in moved] == [False, True, False, False]


@pytest.mark.parametrize("script", ["fsdp2.py", "pipeline.py"])
def test_without_torchrun_it_says_how_to_start(script):
    child = run(script, "--tier", "disk")
    assert child.returncode == 1
    assert "torchrun --standalone --nproc-per-node 2" in child.stderr
