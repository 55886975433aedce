"""example_runs.py: runs an example as a user runs it, in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from places import EXAMPLES

TIERS = ["disk", pytest.param("host", marks=pytest.mark.cuda)]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def tier_options(name: str, directory: Path) -> list[str]:
    """The options that choose a tier; skips where its device is missing."""
    if name == "disk":
        return ["--tier", "disk", "--disk-dir", str(directory)]
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return ["--tier", "host"]


# How a process ends now and then after FSDP2 over gloo, without torchoffload too (torch 2.13 on a CPU, Python 3.11: 3
# of 25 runs of a few plain steps). All has been printed by then.
ABORT_AT_EXIT = "terminate called without an active exception"
ABORTS_ALLOWED = 4


def run(script: str, *options: str, processes: int = 0, **environment: str) -> subprocess.CompletedProcess:
    """Run examples/`script`, with torchrun where `processes` says how many; again where that meets ABORT_AT_EXIT."""
    for _ in range(ABORTS_ALLOWED if processes else 0):
        child = run_once(script, *options, processes=processes, **environment)
        if child.returncode == 0 or ABORT_AT_EXIT not in child.stderr or "identical" not in child.stdout:
            return child
    return run_once(script, *options, processes=processes, **environment)


def run_once(script: str, *options: str, processes: int, **environment: str) -> subprocess.CompletedProcess:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes else []
    return subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / script), *options],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=280,
    )


def output_of(child: subprocess.CompletedProcess) -> str:
    """What it printed, of one that came out the same."""
    assert child.returncode == 0, child.stderr + child.stdout
    assert "NOT THE SAME" not in child.stdout
    return child.stdout


def rows(table: str) -> dict[str, dict[str, float]]:
    """Of a table of variants: step, loss, peak and moved by the variant's name; all of them identical."""
    found = re.findall(
        r"^(\S.*?)  +([\d.]+) ms +(-?\d+) MiB +(-?\d+) MiB +(\d+) MiB   identical$", table, flags=re.MULTILINE
    )
    names = ("step", "loss", "peak", "moved")
    return {name: dict(zip(names, map(float, numbers), strict=True)) for name, *numbers in found}
