"""The examples that need a trainer's package, run as a user runs them, only smaller."""

import sys
from pathlib import Path

import pytest

from example_runs import TIERS, output_of, run, tier_options
from trainings import need

need("transformers", "accelerate")

from training_examples import SMALL, assert_same_and_moved  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("checkpointing", [[], ["--checkpointing"]], ids=["plain", "checkpointed"])
def test_the_trainer_of_hugging_face(tier: str, checkpointing: list[str], tmp_path: Path):
    windows = ["--offload-window-mib", "0", "--reload-window-mib", "0"]
    options = [*SMALL, *checkpointing, *windows, *tier_options(tier, tmp_path)]
    assert_same_and_moved(output_of(run("hf_trainer.py", *options)), steps=3)


@pytest.mark.parametrize(("script", "package"), [("hf_trainer.py", "transformers"), ("trl_sft_lora.py", "trl")])
def test_without_the_package_it_says_what_to_install(script: str, package: str, tmp_path: Path):
    (tmp_path / f"{package}.py").write_text("raise ImportError('planted')\n")
    path = ":".join([str(tmp_path), *filter(None, sys.path)])
    child = run(script, *SMALL, "--tier", "disk", PYTHONPATH=path)
    assert child.returncode == 1
    assert f"pip install {package} " in child.stderr
