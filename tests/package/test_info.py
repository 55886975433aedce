"""`python -m torchoffload.info`: what a bug report needs, as text and as JSON."""

import json
import subprocess
import sys

import pytest
import torch

import torchoffload
from torchoffload import info

WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")


@pytest.fixture
def printed(capsys):
    def run(*arguments):
        assert info.main(arguments) == 0
        return capsys.readouterr().out

    return run


def test_it_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "torchoffload.info", "--no-link"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert torch.__version__ in done.stdout
    assert done.stderr == ""


def test_the_text_has_every_section(printed):
    text = printed("--no-link")
    for section in ("versions:", "devices:", "link:", "host memory:", "disk tier:", "environment:"):
        assert f"\n{section}" in f"\n{text}"
    assert torchoffload.__version__ in text


def test_json_has_the_same_with_sizes_in_bytes(printed, tmp_path):
    found = json.loads(printed("--json", "--no-link", "--disk-dir", str(tmp_path)))
    assert found["versions"]["torch"] == torch.__version__
    assert found["host_memory"]["total_bytes"] == torchoffload.host_memory().total_bytes
    assert found["disk"]["dir"] == str(tmp_path)
    assert found["disk"]["free_bytes"] > 0
    assert found["link"] == {"not_measured": "not asked for"}


@WITHOUT_CUDA
def test_without_cuda_the_link_is_not_measured(printed):
    text = printed()
    assert "not measured: no accelerator" in text
    assert "\n  no accelerator\n" in text


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_with_cuda_the_link_is_measured(printed):
    found = json.loads(printed("--json"))
    assert found["link"]["out_gb_per_s"] > 0.1
    assert found["link"]["in_gb_per_s"] > 0.1
    assert found["devices"][0]["name"] == torch.cuda.get_device_name(0)
    assert found["versions"]["cuda_driver"]
    assert "GB/s" in printed()


@pytest.mark.devices("privateuseone")
def test_another_accelerator_is_named_and_its_link_measured(device_under_test, printed):
    with device_under_test.scope():
        found = json.loads(printed("--json"))
        text = printed("--no-link")
    assert [device["device"] for device in found["devices"]] == ["privateuseone:0", "privateuseone:1"]
    assert found["host_tier_available"]
    assert found["link"]["out_gb_per_s"] > 0
    assert found["link"]["in_gb_per_s"] > 0
    assert "privateuseone:0" in text
    assert "available, by the generic backend" in text


def test_a_link_that_cannot_be_measured_is_no_end_to_the_report(monkeypatch, printed):
    def out_of_memory(*_, **__):
        raise RuntimeError("CUDA out of memory\nmore lines")

    monkeypatch.setattr(torch, "empty", out_of_memory)
    assert info.link_rate(torch.device("cuda")) == {"not_measured": "CUDA out of memory"}
    monkeypatch.setattr(info, "accelerator", lambda: torch.device("cuda"))
    assert "not measured: CUDA out of memory" in printed()


def test_a_missing_directory_is_told_in_its_place(printed, tmp_path):
    assert "No such file or directory" in printed("--no-link", "--disk-dir", str(tmp_path / "gone"))


def test_our_environment_variables_are_shown(printed, monkeypatch):
    monkeypatch.setenv("TORCHOFFLOAD_DISABLE", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "4(x2)")
    monkeypatch.setenv("A_SECRET", "hidden")
    text = printed("--no-link")
    assert "TORCHOFFLOAD_DISABLE=0" in text
    assert "LOCAL_WORLD_SIZE=2" in text
    assert "SLURM_STEP_TASKS_PER_NODE=4(x2)" in text
    assert "hidden" not in text


def test_help_names_the_options(capsys):
    with pytest.raises(SystemExit) as leaving:
        info.main(["--help"])
    assert leaving.value.code == 0
    text = capsys.readouterr().out
    assert "--json" in text
    assert "--disk-dir" in text
