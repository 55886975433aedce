"""The table that train_step.py prints for one workload."""

from __future__ import annotations

from typing import Any

import figures
from figures import Runs
from offloaders import STOCK

GIB = 1 << 30


def text_table(text: str, result: dict[str, Any]) -> str:
    """Format one workload's rows, stock's facts above them and the ratios beside the peers below."""
    runs: Runs = result["offloaders"]
    stock = runs.get(STOCK, {})
    shape = ", ".join(f"{name} {value}" for name, value in result["workload"].items())
    lines = [f"\n{text}: {shape}", *result["notes"], *_facts(stock)]
    width = max([14, *(len(name) + 1 for name in runs)])
    titles = f"{'ms/step':>9}{'of stock':>9}{'bound':>9}{'first':>9}{'at loss':>11}{'peak':>11}{'moved':>7}"
    lines.append(f"{'':{width}}{titles}  gradients")
    for name, run in runs.items():
        is_measured = figures.is_measured(run) and figures.is_measured(stock)
        lines.append(f"{name:{width}}" + (_row(name, runs) if is_measured else run.get("error", "not measured")))
    if figures.is_measured(stock):
        lines += [f"{ours} / {peer}: {ratio:.3f} of its time" for ours, peer, ratio in figures.beside(runs)]
    return "\n".join(lines)


def _facts(stock: dict[str, Any]) -> list[str]:
    lines = []
    if "saved" in stock:
        unique, summed = (stock["saved"][key] / GIB for key in ("unique_bytes", "summed_bytes"))
        lines.append(f"saved for backward: {unique:.1f} GiB unique, {summed:.1f} GiB summed")
    if "link_bytes_per_s" in stock:
        out, back = (stock["link_bytes_per_s"][way] / 1e9 for way in ("out", "in"))
        lines.append(f"link: {out:.1f} GB/s out, {back:.1f} GB/s in")
    return lines


def _row(name: str, runs: Runs) -> str:
    run, stock = runs[name], runs[STOCK]
    held = figures.memory(run)
    moved = figures.moved_bytes(run)
    share = f"{moved / stock['saved']['unique_bytes']:.0%}" if moved is not None else ""
    return (
        f"{figures.median_ms(run):9.0f}{figures.ratio(run, stock):9.2f}"
        f"{_rounded(figures.bound_ms(stock, held['at_loss_bytes'])):>9}{_rounded(figures.first_ms(run)):>9}"
        f"{held['at_loss_bytes'] / GIB:7.2f} GiB{held['peak_bytes'] / GIB:7.2f} GiB{share:>7}"
        f"  {figures.verdict(run, runs)}"
    )


def _rounded(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"
