"""DeepSpeed's ZeRO on a CPU: the same losses with a context, with chosen modules and under a plan, and bytes moved."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from places import DOCS, environment_with_support
from test_transformers_ranks import free_port
from trainings import need

need("deepspeed")


# The program of the page twice in one process, first switched off, and then the bytes that moved.
TWICE = """
import os, sys
import deepspeed, torchoffload
deepspeed.init_distributed("gloo")  # by itself it would compile a backend for CPUs
for os.environ["TORCHOFFLOAD_DISABLE"] in ("1", "0"):
    exec(compile(sys.argv[1], "the program of the page", "exec"), {"__name__": "__main__"})
print(torchoffload.stats().bytes_offloaded)
"""


def run_on_one_rank(*command: str) -> list[str]:
    """The lines that a program prints under DeepSpeed on a CPU."""
    here = Path(__file__).parent
    job = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
    job |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    environment = environment_with_support(here) | job
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.timeout(900)  # the first of a machine compiles an operator
def test_the_program_of_the_page_prints_the_same_losses():
    (program,) = re.findall(r"```python\n(.*?)```", (DOCS / "with-deepspeed.md").read_text(), re.DOTALL)
    tiny = {
        "512": "32",
        "256": "16",
        'memory="40GiB"': 'memory="70KiB", recompute=False, tier="disk", min_offload_size=0, on_unfit="warn"',
        "print(fitted.report())": "fitted.remove()",
    }
    for shown, ours in tiny.items():
        assert shown in program, shown
        program = program.replace(shown, ours)
    *lines, moved = run_on_one_rank("-c", TWICE, program)
    stock, ours = (line for line in lines if line.startswith("["))
    assert ours == stock
    assert int(moved) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_losses_are_the_same_at_each_stage_of_zero(tmp_path: Path):
    said = json.loads(run_on_one_rank(str(Path(__file__).parent / "deepspeed_program.py"), str(tmp_path))[-1])
    assert said.keys() == {"0", "2", "3"}
    for stage, ways in said.items():
        plain = ways.pop("plain")
        assert plain["moved"] == 0
        for way, seen in ways.items():
            assert seen["losses"] == plain["losses"][: len(seen["losses"])], (stage, way)
            assert seen["moved"] > 0, (stage, way)
