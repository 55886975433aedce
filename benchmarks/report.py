"""From raw results to what documents carry: Markdown tables, rewritten in place, and a chart.

    python benchmarks/report.py results/a.json results/b.json                       # prints the tables
    python benchmarks/report.py results/a.json --into docs/performance.md
    python benchmarks/report.py results/a.json --chart docs/train_step.svg
    python benchmarks/report.py results/fit-a.json results/fit-c.json --chart docs/fit.svg    # of fit.py's results

A document has a table wherever it has its two marks, each alone on a line, and what is between them is replaced:

    <!-- table:train_step -->
    <!-- table:end -->

Tables are ``train_step`` (each offloader on each workload), ``peers`` (torchoffload beside each), ``torchoffload``
(what it says of itself, against what was measured), ``link`` (link.py's rates) and ``pinning``.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import figures
from link import GIB, WAYS, size_text
from offloaders import OURS, STOCK

END = "<!-- table:end -->"

Row = list[str]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Markdown tables and a chart from the benchmarks' raw results.")
    parser.add_argument("results", nargs="+", type=Path, help="JSON of train_step.py and link.py, in the rows' order")
    parser.add_argument(
        "--into", nargs="+", type=Path, default=[], help="documents whose tables are rewritten in place"
    )
    parser.add_argument(
        "--chart", type=Path, default=None, help="where the chart goes: .svg or .png (needs matplotlib)"
    )
    return parser


def main() -> int:
    arguments = make_parser().parse_args()
    try:
        contents = [figures.load(path) for path in arguments.results]
    except (OSError, ValueError) as error:
        raise SystemExit(f"report.py: {error}") from error
    fits = [content for content in contents if "way" in next(iter(content.get("rows", [])), {})]
    if arguments.chart is not None and fits:
        from chart import draw_fits

        draw_fits(fits, arguments.chart)
        return 0
    tables = make_tables(contents)
    if not tables:
        raise SystemExit("report.py: nothing in there is a result of train_step.py or link.py")
    for path in arguments.into:
        try:
            path.write_text(replaced(path.read_text(), tables))
        except (OSError, ValueError) as error:
            raise SystemExit(f"report.py: {path}: {error}") from error
    if arguments.chart is not None:
        from chart import draw

        draw(contents, arguments.chart)
    if not arguments.into and arguments.chart is None:
        print("\n\n".join(tables.values()))
    return 0


def make_tables(contents: list[dict[str, Any]]) -> dict[str, str]:
    """Make each table that the results have something for, by name."""
    results = [(text, result) for content in contents for text, result in content.get("results", {}).items()]
    results = [(text, result) for text, result in results if figures.is_measured(result["offloaders"].get(STOCK, {}))]
    links = [content for content in contents if "rates" in content]
    tables = {
        "train_step": _train_step(results),
        "peers": _peers(results),
        "torchoffload": _torchoffload(results),
        "link": [row for content in links for row in _link(content)],
        "pinning": [row for content in links for row in _pinning(content)],
    }
    return {name: markdown(_TITLES[name].split(", "), rows) for name, rows in tables.items() if rows}


_TITLES = {
    "train_step": "workload, offloader, ms a step, of stock, bound (ms), of the bound, first step (ms), GiB at loss, "
    "GiB peak, unique bytes moved, loss and gradients",
    "peers": "workload, torchoffload's windows, peer, its ms, torchoffload's ms, of its time, the bound of its time, "
    "first step of its first",
    "torchoffload": "workload, torchoffload's windows, out (GiB a step), in (GiB a step), "
    "saved at the loss of what is told, pinned of the most slots, first step of later ones",
    "link": "copies of, memory, out (GB/s), in (GB/s), both at once (GB/s)",
    "pinning": "memory, ms for a GiB, of which",
}


def markdown(titles: Row, rows: list[Row]) -> str:
    """Format a table."""
    lines = ["|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|" for cells in [titles, *rows]]
    return "\n".join([lines[0], "|" + "---|" * len(titles), *lines[1:]])


def replaced(text: str, tables: dict[str, str]) -> str:
    """Put the tables between their marks; a mark without a table or without its end is a ValueError."""
    names = re.findall(r"^<!-- table:(?!end)(\w+) -->$", text, flags=re.MULTILINE)
    if not names:
        raise ValueError("no line <!-- table:NAME -->")
    for name in names:
        if name not in tables:
            raise ValueError(f"these results have nothing for the table {name!r}")
        begin = f"<!-- table:{name} -->"
        pattern = re.compile(rf"^{begin}\n(?:(?!<!-- table:).*\n)*?{END}$", flags=re.MULTILINE)
        if not pattern.search(text):
            raise ValueError(f"no {END} after {begin}")
        text = pattern.sub(lambda _, table=f"{begin}\n{tables[name]}\n{END}": table, text)
    return text


def _name(name: str) -> str:
    if name == STOCK:
        return "stock"
    ours, _, peer = name.partition("@")
    return f"{ours}, at {peer}'s memory" if peer else name


def _train_step(results: list[tuple[str, dict[str, Any]]]) -> list[Row]:
    rows = []
    for text, result in results:
        runs = result["offloaders"]
        stock = runs[STOCK]
        for name, run in runs.items():
            if not figures.is_measured(run):
                rows.append([text, _name(name), run.get("error", "not measured"), *[""] * 8])
                continue
            held = figures.memory(run)
            bound = None if name == STOCK else figures.bound_ms(stock, held["at_loss_bytes"])
            median = figures.median_ms(run)
            rows.append(
                [
                    text,
                    _name(run.get("package") or name) if "@" not in name and name != STOCK else _name(name),
                    f"{median:.0f}",
                    f"{figures.ratio(run, stock):.2f}",
                    _rounded(bound),
                    f"{median / bound:.3f}" if bound else "",
                    _rounded(figures.first_ms(run)),
                    f"{held['at_loss_bytes'] / GIB:.2f}",
                    f"{held['peak_bytes'] / GIB:.2f}",
                    _moved(run, stock),
                    figures.verdict(run, runs),
                ]
            )
    return rows


def _moved(run: figures.Run, stock: figures.Run) -> str:
    moved, unique = figures.moved_bytes(run), stock["saved"]["unique_bytes"]
    return "" if moved is None else f"{moved / unique:.1%} of {unique / GIB:.1f} GiB"


def _peers(results: list[tuple[str, dict[str, Any]]]) -> list[Row]:
    rows = []
    for text, result in results:
        runs = result["offloaders"]
        for name, peer, ratio in figures.beside(runs):
            theirs = runs[peer]
            bound = figures.bound_ms(runs[STOCK], figures.memory(theirs)["at_loss_bytes"])
            our_first, their_first = figures.first_ms(runs[OURS]), figures.first_ms(theirs)
            their_ms = figures.median_ms(theirs)
            rows.append(
                [
                    text,
                    _windows(name),
                    theirs.get("package") or peer,
                    f"{their_ms:.0f}",
                    f"{ratio * their_ms:.0f}",
                    f"{ratio:.3f}",
                    f"{bound / their_ms:.2f}" if bound else "",
                    f"{our_first / their_first:.2f}" if our_first and their_first and "@" not in name else "",
                ]
            )
    return rows


def _torchoffload(results: list[tuple[str, dict[str, Any]]]) -> list[Row]:
    rows = []
    for text, result in results:
        runs = result["offloaders"]
        for name, run in runs.items():
            if name.partition("@")[0] != OURS or not figures.is_measured(run) or "stats" not in run:
                continue
            first = figures.first_ms(run)
            moved = [[step[key] for step in figures.steps_of(run) if key in step] for key in ("bytes_out", "bytes_in")]
            rows.append(
                [
                    text,
                    _windows(name),
                    *(f"{statistics.fmean(each) / GIB:.2f}" if each else "" for each in moved),
                    _share(figures.told_share(run, runs[STOCK])),
                    _share(figures.pinned_share(run)),
                    _share(first / figures.median_ms(run) if first else None),
                ]
            )
    return rows


def _windows(name: str) -> str:
    peer = name.partition("@")[2]
    return f"at {peer}'s memory" if peer else "default"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _link(content: dict[str, Any]) -> list[Row]:
    by_copy: dict[tuple[int, str], dict[str, float]] = {}
    for row in content["rates"]:
        by_copy.setdefault((row["size_bytes"], row["memory"]), {})[row["way"]] = row["bytes_per_s"] / 1e9
    rows = [
        [size_text(size), memory, *(f"{rates[way]:.1f}" for way in WAYS)] for (size, memory), rates in by_copy.items()
    ]
    if content["together"]:
        totals = {row["way"]: sum(row["bytes_per_s"]) / 1e9 for row in content["together"]}
        first = content["together"][0]
        name = f"registered, {len(first['bytes_per_s'])} GPUs at once"
        rows.append([size_text(first["size_bytes"]), name, *(f"{totals[way]:.0f}" for way in WAYS)])
    return rows


def _pinning(content: dict[str, Any]) -> list[Row]:
    rows = []
    for memory in dict.fromkeys(row["memory"] for row in content["pinning"]):
        taken = [row for row in content["pinning"] if row["memory"] == memory]
        parts = {
            part: 1000 * statistics.fmean(row["seconds"][part] / (row["bytes"] / GIB) for row in taken)
            for part in taken[0]["seconds"]
        }
        details = ", ".join(f"{part} {ms:.0f}" for part, ms in parts.items())
        rows.append([memory, f"{sum(parts.values()):.0f}", details])
    return rows


def _rounded(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


if __name__ == "__main__":
    sys.exit(main())
