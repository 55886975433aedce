"""What long_context.py found, as a table and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Results = dict[str, list[dict[str, Any]]]


def longest(tries: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Of the tries that went, the one with the most tokens."""
    went = [each for each in tries if each["went"]]
    return max(went, key=lambda each: each["tokens"], default=None)


def is_end(tries: list[dict[str, Any]]) -> bool:
    """Whether a longer one was tried and did not go; else time was up."""
    return any(not each["went"] for each in tries)


def heading(about: dict[str, Any]) -> str:
    shape = about["shape"]
    gib = about["memory_gib"]
    memory = "all of its memory" if not gib else f"{gib:g} GiB" if gib >= 1 else f"{1024 * gib:g} MiB"
    layers, hidden = shape["num_hidden_layers"], shape["hidden_size"]
    return f"{about['device']}, {memory}: a Llama of {layers} layers, {hidden} wide"


def table(about: dict[str, Any], results: Results) -> str:
    first = longest(next(iter(results.values())))
    lines = [heading(about), f"{'':14}{'longest':>12}{'':>8}{'one step':>12}{'peak':>12}{'moved':>12}"]
    for name, tries in results.items():
        best = longest(tries)
        if best is None:
            lines.append(f"{name:14}{'none went':>12}")
            continue
        mark = "" if is_end(tries) else ">= "
        ratio = f"{best['tokens'] / first['tokens']:.1f}x" if first else ""
        peak = f"{best['peak_gib']:.1f} GiB" if best["peak_gib"] else ""
        moved = f"{best['moved_gib']:.2f} GiB"
        tokens = mark + format(best["tokens"], ",")
        lines.append(f"{name:14}{tokens:>12}{ratio:>8}{best['seconds']:>10.1f} s{peak:>12}{moved:>12}")
    if not all(is_end(tries) for tries in results.values()):
        lines.append(">=: time was up before a length did not go; give more --seconds")
    return "\n".join(lines)


def try_draw(about: dict[str, Any], results: Results, path: Path) -> bool:
    """Draw a bar for each way; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed")
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    best = {name: longest(tries) for name, tries in results.items()}
    names = [name for name, each in best.items() if each is not None]
    tokens = [best[name]["tokens"] for name in names]
    figure, axes = pyplot.subplots(figsize=(7, 3), layout="constrained")
    bars = axes.barh(names, tokens, color=["tab:gray", "tab:olive", "tab:blue", "tab:cyan"][: len(names)])
    texts = [
        f"{count:,}" if is_end(results[name]) else f"{count:,} or more"
        for name, count in zip(names, tokens, strict=True)
    ]
    axes.bar_label(bars, texts, padding=4)
    axes.invert_yaxis()
    axes.set_xlim(right=1.35 * max(tokens, default=1))
    axes.set_xlabel("tokens of the longest sequence that trains")
    axes.set_title(heading(about), fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
