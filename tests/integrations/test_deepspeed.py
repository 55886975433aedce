"""DeepSpeed's ZeRO on a CPU: the same losses with a context, with chosen modules and under a plan, and bytes moved."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from places import environment_with_support
from test_transformers_ranks import free_port
from trainings import need

need("deepspeed")


@pytest.mark.slow
def test_losses_are_the_same_at_each_stage_of_zero(tmp_path: Path):
    here = Path(__file__).parent
    job = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
    job |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, str(here / "deepspeed_program.py"), str(tmp_path)],
        env=environment_with_support(here) | job,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said.keys() == {"0", "2", "3"}
    for stage, ways in said.items():
        plain = ways.pop("plain")
        assert plain["moved"] == 0
        for way, seen in ways.items():
            assert seen["losses"] == plain["losses"][: len(seen["losses"])], (stage, way)
            assert seen["moved"] > 0, (stage, way)
