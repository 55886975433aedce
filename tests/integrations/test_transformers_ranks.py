"""Two ranks under DDP: one alone offloads, or each follows a plan of its own: the same bits, and warnings on rank 0."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from places import environment_with_support
from trainings import need

need("transformers", "accelerate")


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("localhost", 0))
        return held.getsockname()[1]


@pytest.mark.slow
def test_ranks_may_differ(tmp_path: Path):
    here = Path(__file__).parent
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "ACCELERATE_USE_CPU": "true"}
    environment = environment_with_support(here) | job
    ranks = [
        subprocess.Popen(
            [sys.executable, str(here / "ranks_program.py"), str(tmp_path)],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    first, second = (json.loads(text.splitlines()[-1]) for text in printed)
    for said in (first, second):
        assert said["wrapped"]
        assert said["losses"]
        assert said["weights"]
        assert said["fitted"] == {"losses": True, "weights": True}
    assert first["bytes_offloaded"] > 0
    assert second["bytes_offloaded"] == 0
    assert len(first["warnings"]) == 1
    assert "saved nothing inside" in first["warnings"][0]
    assert second["warnings"] == []
