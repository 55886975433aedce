"""benchmarks/parallel_step.py as a user runs it, only smaller: two processes on the disk tier."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from places import BENCHMARKS

SCRIPT = BENCHMARKS / "parallel_step.py"
# Many short sequences of a narrow model: tensors of a mebibyte, which move, with little to calculate.
TINY = {
    "hidden": 32, "intermediate": 64, "layers": 2, "heads": 2, "kv-heads": 2, "vocabulary": 32,
    "batch": 128, "tokens": 128, "micro-batches": 2, "warm-up": 1, "steps": 1,
}  # fmt: skip

pytestmark = pytest.mark.slow


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        options, capture_output=True, text=True, timeout=540, env=dict(os.environ, OMP_NUM_THREADS="1", **environment)
    )


@pytest.mark.timeout(600)
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this torch has no gloo")
def test_steps_of_each_kind_are_bit_equal(tmp_path: Path):
    result = tmp_path / "result.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    shape = [f"--{name}={value}" for name, value in TINY.items()]
    done = run(*launch, *shape, "--tier", "disk", "--json", str(result))
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads(result.read_text())
    assert measured["processes"] == 2
    assert list(measured["kinds"]) == ["fsdp2", "tensor", "pipeline", "replicas"]
    for kind in measured["kinds"].values():
        assert {rank["compared"] for rank in kind["ranks"]} == {"bit-equal"}
        for rank in kind["ranks"]:
            assert rank["moved_bytes"][0] > 0
            assert rank["steps"]["plain"][0]["seconds"] > 0
    assert done.stdout.count("2 processes, bit-equal") == 4


def test_without_torchrun_it_says_how_to_start_it():
    done = run(sys.executable, str(SCRIPT), "--tier", "disk")
    assert done.returncode != 0
    assert "torchrun --standalone --nproc-per-node 2" in done.stderr
