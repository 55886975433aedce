"""Draw the small pictures of docs/gallery.md from the output that the page shows: ``python tools/gallery_pictures.py``.

A picture for each example that draws none itself, into docs/pictures. The same page gives the same files.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

import try_docs

PICTURES = try_docs.ROOT / "docs" / "pictures"
PLAIN, OURS = "#8c8c8c", "#2166ac"
# Labels and lengths of the bars, and what they measure.
Bars = tuple[list[tuple[str, float]], str]


def report_rows(shown: str) -> Bars:
    """What a report says of bytes: moved, and kept by reason."""
    rows = re.findall(r"^  (offloaded|kept: \w+) +([\d.]+) MiB", shown, flags=re.MULTILINE)
    return [(name, float(mib)) for name, mib in rows], "MiB in all steps"


def at_the_loss(shown: str) -> Bars:
    """The column "at the loss" of a table of ways."""
    rows = re.findall(r"^(.+?) +\d+ ms +(\d+) MiB", shown, flags=re.MULTILINE)
    return [(name, float(mib)) for name, mib in rows], "MiB at the loss"


def moved(shown: str) -> Bars:
    """The column "moved" of a trainer's steps."""
    rows = re.findall(r"^ +(\d+) +[\d.]+ +[\d.]+ +(\d+) MiB$", shown, flags=re.MULTILINE)
    return [(f"step {number}", float(mib)) for number, mib in rows], "MiB moved; losses are identical"


def away(shown: str) -> Bars:
    """What each process has away at most."""
    rows = re.findall(r"^(\w+ \d \w+) .* (\d+) MiB away at most$", shown, flags=re.MULTILINE)
    return [(name, float(mib)) for name, mib in rows], "MiB away at most"


READ: dict[str, Callable[[str], Bars]] = {
    "minimal.py": report_rows,
    "with_checkpointing.py": at_the_loss,
    "choose_modules.py": at_the_loss,
    "hf_trainer.py": moved,
    "trl_sft_lora.py": moved,
    "fsdp2.py": away,
    "pipeline.py": away,
}


def draw(bars: Bars, path: Path) -> None:
    """Draw horizontal bars; those of runs without torchoffload are grey."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    rows, label = bars
    with mpl.rc_context({"svg.hashsalt": "torchoffload", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(4.2, 2.4), layout="constrained")
        axes = figure.add_subplot()
        colours = [PLAIN if "plain" in name or name.startswith("kept") else OURS for name, _ in rows]
        drawn = axes.barh(range(len(rows)), [length for _, length in rows], color=colours)
        axes.bar_label(drawn, fmt="{:.0f}", padding=2)
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.invert_yaxis()
        axes.set_xlim(right=1.15 * max(length for _, length in rows))
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})


def pictures() -> dict[str, Bars]:
    """The bars of each picture, by the name of its file."""
    found: dict[str, Bars] = {}
    for command, shown in try_docs.examples():
        script = try_docs.script_of(command)
        if script in READ:
            found.setdefault(f"{Path(script).stem}.svg", READ[script](shown))
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=PICTURES, help="(%(default)s)")
    arguments = parser.parse_args()
    arguments.into.mkdir(parents=True, exist_ok=True)
    for name, bars in pictures().items():
        draw(bars, arguments.into / name)
        print(arguments.into / name)


if __name__ == "__main__":
    main()
