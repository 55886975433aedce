"""What the runs of an example took: as a file between two processes, as a table, and as a picture."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from _options import MIB

WARM_UP_STEP_COUNT = 2
PLAIN, OFFLOADED, FIT = "plain", "offloaded", "fit"
COLORS = {PLAIN: "tab:gray", OFFLOADED: "tab:blue", FIT: "tab:orange"}


@dataclass(frozen=True)
class Fit:
    """What ``torchoffload.fit`` had chosen at the end of its run."""

    memory_bytes: int  # what it was given
    phase: str
    frontier: list[tuple[int, float]]  # (bytes, seconds of forward and backward), as predicted
    plan: dict[str, Any] | None  # the fields of the FitPlan that is followed; None where none has been chosen


@dataclass(frozen=True)
class Run:
    """One run's outcome, as it crosses from the child's process to the parent's."""

    device: str
    step_s: list[float]
    steady_from: int  # the first step of those that do what all later ones do; past the end if there is none
    peak_bytes: int
    needed_bytes: int  # of the plain run: the memory that ``fit`` would have to be given to change nothing
    weight_bytes: int
    losses: list[float]
    parameters: dict[str, torch.Tensor]
    course: list[tuple[float, int]]  # (seconds since the step began, bytes over the state before the first step)
    report: str
    fit: Fit | None

    @property
    def step_ms(self) -> float | None:
        """Median, without the warm-up and without the last step, which was sampled and so slowed down.

        None where no step was steady.
        """
        steady = self.step_s[self.steady_from :]
        timed = steady[WARM_UP_STEP_COUNT:-1] or steady
        return 1000 * statistics.median(timed) if timed else None

    def save(self, path: Path) -> None:
        """Write it to a file."""
        torch.save(vars(self) | {"fit": None if self.fit is None else vars(self.fit)}, path)

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read what ``save`` wrote."""
        run = cls(**torch.load(path, weights_only=True))
        return run if run.fit is None else dataclasses.replace(run, fit=Fit(**vars(run)["fit"]))


def table(runs: dict[str, Run], different: dict[str, list[str]]) -> str:
    """Put the runs side by side; ``different`` names, for each run, the parameters that differ from the first's."""
    first = next(iter(runs.values()))
    rows: dict[str, list[str]] = {
        "": list(runs),
        "step time": _beside_first([run.step_ms for run in runs.values()], "ms"),
        "peak memory": _beside_first([run.peak_bytes / MIB for run in runs.values()], "MiB"),
        "last loss": [f"{run.losses[-1]:.6f}" for run in runs.values()],
    }
    lines = ["", f"{len(first.losses)} steps on {first.device}; memory over the state before the first step"]
    for name, (left, *others) in rows.items():
        lines.append(f"{name:<12}{left:>14}{''.join(f'{cell:>26}' for cell in others)}")
    lines += [f"{'parameters':<12}  {verdict}" for verdict in _verdicts(first, different)]
    for run in runs.values():
        lines += [f"{name:<12}  {text}" for name, text in zip((FIT, ""), _choices(run), strict=False)]
    return "\n".join(lines)


def _verdicts(first: Run, different: dict[str, list[str]]) -> Iterator[str]:
    count = len(first.parameters)
    for label, names in different.items():
        if names:
            yield f"NOT THE SAME: {len(names)} of {count} differ in the {label} run, the first is {names[0]}"
    if not any(different.values()):
        value_count = sum(parameter.numel() for parameter in first.parameters.values())
        yield f"identical: {count} parameters, {value_count:,} values, compared bit for bit"


def _choices(run: Run) -> Iterator[str]:
    """Yield what fit was given and what it chose, in words."""
    if run.fit is None:
        return
    plan, given = run.fit.plan, f"given {_mib(run.fit.memory_bytes)}"
    if plan is None or run.step_ms is None:
        more = ": give more --steps" if run.fit.phase in {"survey", "trials"} else ""
        yield f"{given}; no plan was settled on in {len(run.step_s)} steps, the phase is {run.fit.phase!r}{more}"
        return
    if run.fit.phase == "settled":
        reserved = plan["reserved_bytes"]
        took = f"reserved {_mib(reserved)}" if reserved else f"reckons with {_mib(plan['predicted_peak_bytes'])}"
        yield f"{given}, {took}; it settled after {run.steady_from} steps, and the later ones are timed"
    else:
        yield f"{given}, which is too little for this step; it ran in the {run.fit.phase}"
    yield (
        f"of what blocks save {_mib(plan['moved_bytes'])} move and {_mib(plan['kept_bytes'])} stay; "
        f"the rest is computed again, in {1000 * plan['recompute_s']:.0f} ms as predicted"
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.0f} MiB"


def _beside_first(values: list[float | None], unit: str) -> list[str]:
    """Return cells of a row: the value of each run, and of the later ones what part of the first one's that is."""
    cells = ["not settled" if value is None else f"{value:.0f} {unit}" for value in values]
    first = values[0]
    for number, value in enumerate(values[1:], start=1):
        if first and value is not None:
            cells[number] += f", {value / first:.0%} of plain"
    return cells


def draw(runs: dict[str, Run], path: Path) -> None:
    """Draw memory over one step of each run and, if there is one, the frontier that ``fit`` predicts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first = next(iter(runs.values()))
    fits = [run.fit for run in runs.values() if run.fit is not None and run.fit.frontier]
    figure, panels = pyplot.subplots(
        1, 1 + len(fits), figsize=(6.5 * (1 + len(fits)), 4.5), layout="constrained", squeeze=False
    )
    figure.suptitle(first.device)
    _draw_courses(panels[0, 0], runs)
    for axes, fit in zip(panels[0, 1:], fits, strict=True):
        _draw_frontier(axes, fit, first.needed_bytes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_courses(axes: Any, runs: dict[str, Run]) -> None:
    for label, run in runs.items():
        given = "" if run.fit is None else f", given {_mib(run.fit.memory_bytes)}"
        milliseconds = [1000 * second for second, _ in run.course]
        mebibytes = [in_use / MIB for _, in_use in run.course]
        axes.plot(milliseconds, mebibytes, label=label + given, color=COLORS[label])
        axes.fill_between(milliseconds, mebibytes, color=COLORS[label], alpha=0.15)
    _label(
        axes,
        "Memory over the last training step",
        "ms since the step began",
        "MiB over the state before the first step",
    )


def _draw_frontier(axes: Any, fit: Fit, plain_bytes: int) -> None:
    # The frontier ends where more memory makes no step faster: from there on the line is level.
    points = [*fit.frontier, (max(plain_bytes, fit.frontier[-1][0]), fit.frontier[-1][1])]
    axes.plot(
        [nbytes / MIB for nbytes, _ in points], [1000 * second for _, second in points],
        color="tab:gray", marker=".", markevery=list(range(len(fit.frontier))), label="least time, predicted",
    )  # fmt: skip
    plan = fit.plan
    if plan is not None:
        peak_mib, predicted_s, measured_s = plan["predicted_peak_bytes"] / MIB, plan["predicted_s"], plan["measured_s"]
        axes.plot(peak_mib, 1000 * predicted_s, "o", color=COLORS[FIT], fillstyle="none", label="chosen, predicted")
        if measured_s is not None:
            axes.plot(peak_mib, 1000 * measured_s, "*", color=COLORS[FIT], markersize=12, label="chosen, measured")
    axes.axvline(fit.memory_bytes / MIB, color="tab:gray", linestyle="--", linewidth=1, label="memory that was given")
    axes.axvline(plain_bytes / MIB, color="tab:gray", linestyle=":", linewidth=1, label="memory of the plain run")
    _label(
        axes,
        "Time against memory, as fit predicts it",
        "MiB of memory at the peak, with weights and gradients",
        "ms of forward and backward",
    )


def _label(axes: Any, title: str, xlabel: str, ylabel: str) -> None:
    """Give a panel its texts, and have both of its axes begin at 0."""
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend()
