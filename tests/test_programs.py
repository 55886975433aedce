"""Random autograd programs: stock twice and offloaded once, every bit and every error compared. See docs/testing.md.

The 500 programs of each device run in processes of their own, by the command that runs as many as one likes.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from devices import Device
from programs.generator import OPERATOR_NAMES, generate
from programs.program import Program, all_steps
from programs.script import as_script
from programs.shrink import shrink

COMMAND = Path(__file__).parent / "fuzz_programs.py"
PROGRAM_COUNT = 500
MIN_MOVED_FRACTION = 0.7
MIN_FINISHED_FRACTION = 0.8
MIN_OPERATORS_FRACTION = 0.97
MAX_UNSTABLE_FRACTION = 0.02
JOBS = 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_programs_come_out_as_stock(device_under_test: Device, tmp_path: Path, capsys):
    out = tmp_path / "summary.json"
    done = subprocess.run(
        [sys.executable, str(COMMAND), "--device", device_under_test.name, "--programs", str(PROGRAM_COUNT),
         "--jobs", str(JOBS), "--out", str(out)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-20000:]}\n{done.stderr[-2000:]}"
    with capsys.disabled():
        print(f"\n{done.stdout}")
    (summary,) = (json.loads(out.read_text())["devices"][name] for name in [device_under_test.name])
    unstable = summary["kinds"].pop("unstable", 0)  # without us: some kernels of a GPU add in no fixed order
    assert unstable <= (MAX_UNSTABLE_FRACTION * PROGRAM_COUNT if device_under_test.name == "cuda" else 0)
    assert summary["kinds"] == {"same": PROGRAM_COUNT - unstable}
    assert summary["moved_fraction"] >= MIN_MOVED_FRACTION
    assert summary["finished_fraction"] >= MIN_FINISHED_FRACTION
    ran = OPERATOR_NAMES & summary["done"].keys()
    assert len(ran) >= MIN_OPERATORS_FRACTION * len(OPERATOR_NAMES), sorted(OPERATOR_NAMES - ran)


def test_a_program_is_drawn_from_its_seed_alone():
    assert generate(7) == generate(7)
    assert generate(7) != generate(8)


def test_the_script_of_a_program_holds_the_program():
    for seed in range(30):
        program, seen = generate(seed), []
        script = as_script(program, "disk", 'a text with \\ and """ in it')
        names = {"run_again": lambda program, device: seen.append((program, device)), "Program": Program}
        lines = [line for line in script.splitlines() if not line.startswith(("from ", "import ", "sys.path"))]
        exec("\n".join(lines).replace("sys.exit", ""), names)
        assert seen == [(program, "disk")]


def test_a_failing_program_is_cut_down():
    """Here any program fails that has both of two steps, one of them inside a context."""

    def fails(program: Program) -> bool:
        inside = [step for body in program.steps if body["do"] == "with" for step in all_steps(body["body"])]
        return any(step["do"] == "backward" for step in inside) and any(
            step["do"] == "leaf" and step["kind"] == "parameter" for step in program.steps
        )

    program = next(generate(seed) for seed in range(100) if fails(generate(seed)))
    smaller = shrink(program, fails)
    assert fails(smaller)
    assert program.step_count() > 20
    assert smaller.step_count() == 3
