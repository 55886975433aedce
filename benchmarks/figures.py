"""What the raw numbers say: the figures of a row, from the JSON that train_step.py writes.

``runs`` is one workload's rows by name, and a ``run`` one of them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from offloaders import OURS, STOCK

LEAST_DEVIATION = 1e-3  # of loss and gradient norm, relative; what bf16's sums in another order stay far below

Run = dict[str, Any]
Runs = dict[str, Run]


def load(path: Path) -> dict[str, Any]:
    """Read a result; the rows of results from before offloaders took turns get the fields they lack."""
    content: dict[str, Any] = json.loads(path.read_text())
    for result in content.get("results", {}).values():
        for run in result["offloaders"].values():
            steps = run.get("steps", [])
            for number, step in enumerate(steps):
                is_timed = number >= len(steps) - run.get("timed_step_count", len(steps))
                step.setdefault("phase", "timed" if is_timed else "warm-up")
                if "stats" in run and "timed_step_count" in run:
                    step.setdefault("bytes_out", run["stats"]["bytes_offloaded"] / run["timed_step_count"])
    return content


def steps_of(run: Run, phase: str = "timed") -> list[dict[str, Any]]:
    """The steps of one phase, in the order they ran."""
    return [step for step in run.get("steps", []) if step["phase"] == phase]


def median_ms(run: Run, lineups: Iterable[int] | None = None) -> float:
    """Median of the timed steps, of all or of those in some lineups."""
    chosen = [step for step in steps_of(run) if lineups is None or step.get("lineup") in lineups]
    return statistics.median(step["ms"] for step in chosen)


def ratio(run: Run, other: Run) -> float:
    """Median over median, of the lineups that both were in; of all steps where they shared none."""
    shared = {step.get("lineup") for step in steps_of(run)} & {step.get("lineup") for step in steps_of(other)}
    lineups = shared or None
    return median_ms(run, lineups) / median_ms(other, lineups)


def memory(run: Run, phase: str = "timed") -> dict[str, int]:
    """The most that was held at the loss and at the peak."""
    steps = steps_of(run, phase)
    return {key: max(step[key] for step in steps) for key in ("at_loss_bytes", "peak_bytes")}


def first_ms(run: Run) -> float | None:
    """Time of the first step with the offloader, after plain ones."""
    first = steps_of(run, "first")
    return float(first[0]["ms"]) if first else None


def moved_bytes(run: Run) -> float | None:
    """Bytes that a timed step moved out, by torchoffload's own count; None for the others, who keep none."""
    counted = [step["bytes_out"] for step in steps_of(run) if "bytes_out" in step]
    return statistics.fmean(counted) if counted else None


def told_share(run: Run, stock: Run) -> float | None:
    """Memory at the loss that the row really saved, over what torchoffload's own statistics tell of it."""
    tapes = run.get("stats", {}).get("tapes", [])
    told = tapes[-1].get("bytes_away") if tapes else None
    return (memory(stock)["at_loss_bytes"] - memory(run)["at_loss_bytes"]) / told if told else None


def pinned_share(run: Run) -> float | None:
    """Pinned bytes held, over the most that slots took of them."""
    stats = run.get("stats", {})
    return stats["pinned_bytes"] / stats["peak_slot_bytes"] if stats.get("peak_slot_bytes") else None


def bound_ms(stock: Run, at_loss_bytes: int) -> float | None:
    """Tell the least time of a step that holds this much at the loss: the link's, both ways, or stock's if longer."""
    if "link_bytes_per_s" not in stock:
        return None
    moved = max(0, stock["saved"]["unique_bytes"] - at_loss_bytes)
    link_s = sum(moved / rate for rate in stock["link_bytes_per_s"].values())
    return max(1000 * link_s, median_ms(stock))


def wrong_steps(run: Run, reference: Run) -> tuple[int, int]:
    """How many timed steps had another loss or gradient norm than the reference's, and of how many.

    Timed steps run outside the deterministic mode, so they are compared within a tolerance: it finds a tensor that came
    back as another, not a bit.
    """
    steps = steps_of(run)
    wrong = set()
    for key in ("loss", "grad_norm"):
        seen = [step[key] for step in steps_of(reference) if key in step]
        if not seen:
            continue
        middle = statistics.median(seen)
        tolerance = max(LEAST_DEVIATION * abs(middle), 4 * (max(seen) - min(seen)))
        wrong |= {n for n, step in enumerate(steps) if key in step and not abs(step[key] - middle) <= tolerance}
    return len(wrong), len(steps)


def verdict(run: Run, runs: Runs) -> str:
    """Whether loss and gradients are the reference's: bit for bit in the proof, and about in the timed steps."""
    different = run["different"]
    text = f"DIFFERENT: {', '.join(different[:3])}" if different else "identical"
    wrong, count = wrong_steps(run, runs[run.get("compared_with", STOCK)])
    return f"{text}; WRONG in {wrong} of {count} steps" if wrong else text


def is_right(run: Run, runs: Runs) -> bool:
    """Whether the row was measured and is what stock gives."""
    return "error" not in run and bool(steps_of(run)) and verdict(run, runs) == "identical"


def is_measured(run: Run) -> bool:
    """Whether the row has figures; ``error`` says why not."""
    return "error" not in run and bool(steps_of(run))


def beside(runs: Runs) -> list[tuple[str, str, float]]:
    """Each of torchoffload's rows with each peer that it may be set against: (ours, the peer, time over time).

    A row at a peer's memory is set against that peer alone.
    """
    pairs = []
    measured = {name: run for name, run in runs.items() if is_measured(run)}
    for ours in [name for name in measured if name.partition("@")[0] == OURS]:
        at_memory_of = ours.partition("@")[2]
        for name in measured:
            is_peer = name.partition("@")[0] not in (STOCK, OURS) and runs[name].get("compared_with", STOCK) == STOCK
            if is_peer and at_memory_of in ("", name):
                pairs.append((ours, name, ratio(measured[ours], measured[name])))
    return pairs
