"""README.md and docs/quick-start.md: their programs print what the pages show, and the costs are what was measured."""

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
REPORT = re.compile(r"^ {4}(torchoffload(?:, since|\.fit:) .*\n(?: {4}.*\n)+)", flags=re.MULTILINE)
# Where the copies of one step overlap those of the next, how often computing waits differs from run to run.
DIFFERS = ("  reloaded", "  waits", "  windows", "  pinned", "  last", "      ")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
AMOUNT = re.compile(rf"{NUMBER.pattern} (?:ms|B|KiB|MiB|GiB)\b")

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
    "`fit` in little memory": (IN_LITTLE_MEMORY, "fit"),
    "each layer checkpointed": (FIT, "ac"),
    "checkpointed, inputs offloaded": (FIT, "ac, moved"),
    "`OffloadActivations`": (SINCE, "torchoffload"),
    "torchtune 0.6.1": (STEPS, "torchtune"),
    "TRL 1.16.0": (STEPS | {"C": "2026-11-21-h200-train-step-C-with-trl"}, "trl"),
}


def result(name: str) -> dict[str, Any]:
    return json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())


def parameter_count(workload: str) -> int:
    """Of the Llama that benchmarks/workloads.py makes; the output head is a matrix of its own."""
    shape = {"A": (2048, 8192, 16), "B": (4096, 14336, 6), "C": (2048, 8192, 4), "D": (2048, 8192, 8)}[workload]
    hidden, intermediate, layers = shape
    attention = 2 * hidden * hidden + 2 * hidden * (hidden * 8 // 32)
    layer = attention + 3 * hidden * intermediate + 2 * hidden
    return layers * layer + 2 * 32_000 * hidden + hidden


def measured(file: str, workload: str, name: str) -> str:
    """Milliseconds of a step and GiB at its peak, as the table has them.

    train_step.py leaves weights and gradients out of the peak, so they are added.
    """
    content = result(file)
    if "rows" in content:
        row = next(row for row in content["rows"] if row["way"] == name)
        return f"{row['step_ms']:.0f} ms, {row['peak_gib']:.1f} GiB"
    run = content["results"][workload]["offloaders"][name]
    steps = [step for step in run["steps"] if step["phase"] == "timed"]
    weights_and_gradients_bytes = 2 * 2 * parameter_count(workload)
    peak_gib = (max(step["peak_bytes"] for step in steps) + weights_and_gradients_bytes) / 2**30
    return f"{statistics.median(step['ms'] for step in steps):.0f} ms, {peak_gib:.1f} GiB"


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


def test_the_table_of_costs_tells_how_large_each_model_is():
    heading = README.split("<!-- costs -->")[1].split("\n|---")[0]
    told = [float(billions) for billions in re.findall(r"([\d.]+) billion parameters", heading)]
    assert told == [round(parameter_count(workload) / 1e9, 2) for workload in "ABCD"]


ESTIMATES = DOCS / "estimate.md"


def test_the_table_of_estimates_is_that_of_its_page():
    def cells(text: str) -> list[list[str]]:
        rows = re.findall(r"^\| *(?:1B|7B|13B)\b.*$", text, flags=re.MULTILINE)
        return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]

    table = README.split("<!-- estimate -->")[1].split("<!-- estimate end -->")[0]
    assert len(cells(table)) == 18
    assert cells(table) == cells(ESTIMATES.read_text())


def printed_on_a_cpu(program: str) -> list[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def shown_by(page: str, begins: str) -> list[str]:
    """The lines of the report that a page shows, of the one that begins so."""
    report = next(report for report in REPORT.findall(page) if report.startswith(begins))
    return [line.removeprefix("    ") for line in report.splitlines()]


def test_the_program_with_fit_prints_what_the_page_shows():
    """The times and amounts depend on how long the blocks take."""
    (program,) = PROGRAM.findall(README)
    printed = printed_on_a_cpu(program)
    shown = shown_by(README, "torchoffload.fit:")
    assert len(shown) >= 4
    assert shown[0] in printed
    without_amounts = [AMOUNT.sub("#", line) for line in printed]
    assert [line for line in shown if AMOUNT.sub("#", line) not in without_amounts] == []


def test_the_program_of_the_quick_start_prints_what_the_pages_show():
    quick_start = (DOCS / "quick-start.md").read_text()
    (program,) = PROGRAM.findall(quick_start)
    printed = printed_on_a_cpu(program)
    for page in (quick_start, (DOCS / "profiling.md").read_text()):
        shown = shown_by(page, "torchoffload, since")
        assert len(shown) >= 6
        assert [line for line in shown if line not in printed and not line.startswith(DIFFERS)] == []
