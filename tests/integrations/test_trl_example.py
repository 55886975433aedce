"""The example with TRL and PEFT, run as a user runs it, only smaller."""

from pathlib import Path

import pytest

from example_runs import TIERS, output_of, run, tier_options
from trainings import need

need("transformers", "accelerate", "trl", "peft", "datasets")

from training_examples import SMALL, assert_same_and_moved  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("tier", TIERS)
def test_trl_with_lora(tier: str, tmp_path: Path):
    assert_same_and_moved(output_of(run("trl_sft_lora.py", *SMALL, *tier_options(tier, tmp_path))), steps=3)
