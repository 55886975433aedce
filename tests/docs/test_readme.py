"""README.md: its program prints what the page shows, and its table of costs is what was measured."""

import json
import os
import re
import statistics
import subprocess
import sys
from typing import Any

import pytest

from places import BENCHMARKS, DOCS, ROOT

README = (ROOT / "README.md").read_text()
PROGRAM = re.compile(r"^```python\n(import torch\n.*?)^```", flags=re.MULTILINE | re.DOTALL)
REPORT = re.compile(r"^ {4}(torchoffload, since .*\n(?: {4}.*\n)+)", flags=re.MULTILINE)
# Where the copies of one step overlap those of the next, how often computing waits differs from run to run.
DIFFERS = ("  reloaded", "  waits", "  windows", "  pinned", "  last", "      ")

# The results that a row is made of, by workload. A row of train_step.py has its offloader there, one of fit.py its way.
STEPS = {
    "A": "2026-11-21-h200-train-step-A-with-trl",
    "B": "2026-11-21-h200-train-step-B-with-trl",
    "C": "2026-11-21-h200-train-step-C",
    "D": "2026-11-21-h200-train-step-D",
}
SINCE = {name: f"2026-11-22-h200-bound-{name}" for name in STEPS}
FIT = {name: f"2026-11-23-h200-fit-{name}" for name in "ABC"}
IN_LITTLE_MEMORY = {
    "A": "2026-11-24-h200-fit-A-torchtunes-memory",
    "B": "2026-11-24-h200-fit-B-torchtunes-memory",
    "C": "2026-11-24-h200-fit-C",
    "D": "2026-11-23-h200-fit-D",
}
ROWS = {
    "stock PyTorch": (STEPS, "none"),
    "torchoffload": (SINCE, "torchoffload"),
    "torchtune 0.6.1": (STEPS, "torchtune"),
    "TRL 1.16.0": (STEPS | {"C": "2026-11-21-h200-train-step-C-with-trl"}, "trl"),
    "each layer checkpointed": (FIT, "ac"),
    "checkpointed, inputs offloaded": (FIT, "ac, moved"),
    "`fit`": (IN_LITTLE_MEMORY, "fit"),
}


def result(name: str) -> dict[str, Any]:
    return json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())


def measured(file: str, workload: str, name: str) -> str:
    """Milliseconds of a step and GiB at the loss, as the table has them."""
    content = result(file)
    if "rows" in content:
        row = next(row for row in content["rows"] if row["way"] == name)
        return f"{row['step_ms']:.0f} ms, {row['loss_gib']:.1f} GiB"
    run = content["results"][workload]["offloaders"][name]
    steps = [step for step in run["steps"] if step["phase"] == "timed"]
    at_loss_gib = max(step["at_loss_bytes"] for step in steps) / 2**30
    return f"{statistics.median(step['ms'] for step in steps):.0f} ms, {at_loss_gib:.1f} GiB"


def costs() -> dict[str, list[str]]:
    """The cells of the table of costs, by the first one of each row."""
    table = README.split("<!-- costs -->")[1].split("<!-- costs end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.strip().splitlines()[2:]]
    return {row[0].strip("| "): row[1:] for row in rows}


def test_the_table_of_costs_has_these_rows():
    assert list(costs()) == list(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_a_row_of_costs_is_what_was_measured(row: str):
    files, name = ROWS[row]
    cells = dict(zip("ABCD", costs()[row], strict=True))
    assert {workload: cells[workload] for workload in files} == {
        workload: measured(file, workload, name) for workload, file in files.items()
    }


def test_the_program_prints_what_the_pages_show():
    (program,) = PROGRAM.findall(README)
    quick_start = (DOCS / "quick-start.md").read_text()
    assert PROGRAM.findall(quick_start) == [program]
    on_a_cpu = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", program], env=on_a_cpu, capture_output=True, text=True, check=True)
    printed = done.stdout.splitlines()
    for page in (README, quick_start, (DOCS / "profiling.md").read_text()):
        shown = [line.removeprefix("    ") for line in REPORT.search(page)[1].splitlines()]
        assert len(shown) >= 6
        assert [line for line in shown if line not in printed and not line.startswith(DIFFERS)] == []
