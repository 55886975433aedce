"""The chart: time of a step and memory at the loss, by workload and offloader, with the bound drawn on each bar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import figures
from figures import Runs
from offloaders import OURS, STOCK

GIB = 1 << 30
COLOURS = {STOCK: "#8c8c8c", OURS: "#2166ac"}
COLOUR_AT_MEMORY = "#67a9cf"
COLOUR_OF_PEERS = "#d8b365"


def draw(contents: list[dict[str, Any]], path: Path) -> None:
    """Draw every workload that was measured: a column each, time above, memory below."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise SystemExit("the chart needs matplotlib: pip install matplotlib") from error
    from matplotlib.figure import Figure

    results = [
        (text, result["offloaders"]) for content in contents for text, result in content.get("results", {}).items()
    ]
    results = [(text, runs) for text, runs in results if figures.is_measured(runs.get(STOCK, {}))]
    if not results:
        raise SystemExit("the chart needs a result of train_step.py")
    # The same results give the same file.
    with mpl.rc_context({"svg.hashsalt": "torchoffload", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(0.6 + 3.2 * len(results), 4.8), layout="constrained")
        axes = figure.subplots(2, len(results), squeeze=False)
        for column, (text, runs) in enumerate(results):
            _draw_times(axes[0][column], text, runs)
            _draw_memory(axes[1][column], runs)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _measured(runs: Runs) -> Runs:
    return {name: run for name, run in runs.items() if figures.is_measured(run)}


def _draw_times(axes: Any, text: str, runs: Runs) -> None:
    measured = _measured(runs)
    times = [figures.median_ms(run) for run in measured.values()]
    _draw_bars(axes, measured, times, "{:.0f}")
    for place, (name, run) in enumerate(measured.items()):
        bound = figures.bound_ms(runs[STOCK], figures.memory(run)["at_loss_bytes"])
        if bound is not None and name != STOCK:
            axes.plot([bound, bound], [place - 0.42, place + 0.42], color="black", linewidth=1.2)
    axes.set_title(text)
    axes.set_xlabel("ms a step; the line: least time at this memory")


def _draw_memory(axes: Any, runs: Runs) -> None:
    measured = _measured(runs)
    _draw_bars(axes, measured, [figures.memory(run)["at_loss_bytes"] / GIB for run in measured.values()], "{:.1f}")
    axes.set_xlabel("GiB held for backward at the loss")


def _draw_bars(axes: Any, runs: Runs, lengths: list[float], label: str) -> None:
    names = ["stock" if name == STOCK else name.replace("@", "\nat memory of ") for name in runs]
    bars = axes.barh(range(len(runs)), lengths, color=[_colour(name) for name in runs])
    axes.bar_label(bars, labels=[label.format(length) for length in lengths], padding=2)
    axes.set_yticks(range(len(runs)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * max(*lengths, 1e-9))
    axes.spines[["top", "right"]].set_visible(False)


def _colour(name: str) -> str:
    return COLOUR_AT_MEMORY if name.startswith(f"{OURS}@") else COLOURS.get(name, COLOUR_OF_PEERS)
