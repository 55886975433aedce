"""The charts: time and memory at the loss by offloader (train_step.py), and time against memory (fit.py)."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import figures
from figures import Runs
from offloaders import OURS, STOCK

GIB = 1 << 30
COLOURS = {STOCK: "#8c8c8c", OURS: "#2166ac"}
COLOUR_AT_MEMORY = "#67a9cf"
COLOUR_OF_PEERS = "#d8b365"

# A way of fit.py, and its name in the picture. Ways that are not here are left out.
NAMES_BY_HAND = {
    "ac": "each layer checkpointed",
    "ac, moved": "checkpointed, inputs moved",
    "half ac": "every second layer checkpointed",
    "sac sdpa": "checkpointed but for attention",
    "sac mm+sdpa": "checkpointed but for products and attention",
    "stock, moved": "everything moved",
}
MARKERS = dict(zip(NAMES_BY_HAND, "o^sDvX", strict=True))
# A time above this ratio to stock's is beyond the picture: an arrow at its upper edge has the number.
HIGHEST_RATIO = 1.65


def draw(contents: list[dict[str, Any]], path: Path) -> None:
    """Draw every workload that was measured: a column each, time above, memory below."""
    results = [
        (text, result["offloaders"]) for content in contents for text, result in content.get("results", {}).items()
    ]
    results = [(text, runs) for text, runs in results if figures.is_measured(runs.get(STOCK, {}))]
    if not results:
        raise SystemExit("the chart needs a result of train_step.py")
    with _style():
        figure = _figure(0.6 + 3.2 * len(results), 4.8)
        axes = figure.subplots(2, len(results), squeeze=False)
        for column, (text, runs) in enumerate(results):
            _draw_times(axes[0][column], text, runs)
            _draw_memory(axes[1][column], runs)
        _save(figure, path)


def draw_fits(contents: list[dict[str, Any]], path: Path) -> None:
    """Draw time against peak memory: `fit` in each amount that it was given, beside the ways by hand and stock."""
    by_workload = [(text, list(group)) for text, group in groupby(contents, key=lambda content: content["workload"])]
    with _style():
        figure = _figure(0.4 + 3.2 * len(by_workload), 3.7)
        axes = figure.subplots(1, len(by_workload), squeeze=False)[0]
        for place, (text, group) in zip(axes, by_workload, strict=True):
            _draw_fit(place, text, [row for content in group for row in content["rows"]])
        axes[0].set_ylabel("forward and backward [ms]")
        drawn = {label: line for place in axes for line, label in zip(*place.get_legend_handles_labels(), strict=True)}
        figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=4, frameon=False)
        _save(figure, path)


def _draw_fit(axes: Any, workload: str, rows: list[dict[str, Any]]) -> None:
    """One panel. Of the ways by hand the runs without a limit of memory count; their first rows have no budget."""
    alone = {row["way"]: row for row in reversed(rows) if row["budget_gib"] is None}
    fitted = sorted((row["peak_gib"], row["step_ms"]) for row in rows if row["way"] == "fit")
    stock = alone["stock"]
    highest_ms = HIGHEST_RATIO * stock["step_ms"]
    axes.plot(*zip(*fitted, strict=True), "-*", color=COLOURS[OURS], markersize=9, linewidth=1.2, label="fit", zorder=3)
    axes.plot(stock["peak_gib"], stock["step_ms"], "s", color=COLOURS[STOCK], markersize=7, label="stock PyTorch")
    for way, name in NAMES_BY_HAND.items():
        if way not in alone:
            continue
        peak_gib, step_ms = alone[way]["peak_gib"], alone[way]["step_ms"]
        look = {"color": COLOUR_OF_PEERS, "markeredgecolor": "#8c6d1f", "markersize": 5, "linestyle": "none"}
        axes.plot(peak_gib, min(step_ms, 0.985 * highest_ms), MARKERS[way], label=name, **look)
        if step_ms > highest_ms:
            axes.annotate(
                f"{step_ms:.0f} ms", (peak_gib, 0.985 * highest_ms), (6, -3), textcoords="offset points", fontsize=7
            )
    axes.set_title(f"workload {workload}")
    axes.set_xlabel("device memory at the peak [GiB]")
    axes.set_xlim(left=0)
    axes.set_ylim(0.9 * stock["step_ms"], highest_ms)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e5e5e5", linewidth=0.6)


def _style() -> Any:
    """Settings under which the same results give the same file."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise SystemExit("the chart needs matplotlib: pip install matplotlib") from error
    return mpl.rc_context({"svg.hashsalt": "torchoffload", "svg.fonttype": "none", "font.size": 8})


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None}, dpi=150)


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
