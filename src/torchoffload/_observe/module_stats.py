"""What each module of offload_modules moved and kept: the memory profile of a model, by module."""

import re
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torchoffload._observe.stats import at_reset
from torchoffload._observe.units import human_bytes

__all__ = ["COMPILE_FIRST", "ModuleStats", "Source", "idle_advice", "module_lines", "note_source"]

COMPILE_FIRST = (
    "Compile first, then choose what torch.compile(module) returned; of a module that module.compile() compiled in "
    "place, choose what contains it."
)

_ROWS_SHOWN = 8
_REASONS_SHOWN = 2
_NAMES_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class ModuleStats:
    """What was saved inside one module since ``reset_stats()``, over all its calls.

    A record counts where it was saved first, in the innermost of the chosen modules.

    Attributes
    ----------
    name : str
        The module's name in the model, without wrappers.
    records_offloaded, bytes_offloaded : int
        Moved out of the device.
    records_kept, bytes_kept : dict of str to int
        Not moved, by the reasons of ``TapeStats``.
    """

    name: str
    records_offloaded: int
    bytes_offloaded: int
    records_kept: dict[str, int]
    bytes_kept: dict[str, int]

    @property
    def bytes_saved(self) -> int:
        """All bytes saved, moved or kept."""
        return self.bytes_offloaded + sum(self.bytes_kept.values())


class Source(Protocol):
    """Whatever counts by module: what one call of offload_modules stands for."""

    model_name: str
    calls: int

    def call_counts(self) -> dict[str, int]:
        """By module, how often its hooks saw a call; empty where there are no hooks any more."""

    def stats(self) -> tuple[ModuleStats, ...]:
        """One row for each module."""

    def forget(self) -> None:
        """Begin anew."""


_sources: "weakref.WeakSet[Source]" = weakref.WeakSet()


def note_source(source: Source) -> None:
    """Have ``report()`` tell of ``source`` for as long as it lives."""
    _sources.add(source)


def _forget() -> None:
    for source in list(_sources):
        source.forget()


at_reset(_forget)


def _kind(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _kept(rows: Iterable[ModuleStats]) -> Counter[str]:
    kept: Counter[str] = Counter()
    for row in rows:
        kept.update(row.bytes_kept)
    return kept


def _line(kind: str, rows: list[ModuleStats], calls: int) -> str:
    offloaded = human_bytes(sum(row.bytes_offloaded for row in rows) // calls)
    kept = _kept(rows)
    reasons = [f"{reason} {human_bytes(nbytes // calls)}" for reason, nbytes in kept.most_common(_REASONS_SHOWN)]
    more = ", ..." if len(kept) > _REASONS_SHOWN else ""
    rest = f"kept {human_bytes(kept.total() // calls)}" + (f": {', '.join(reasons)}{more}" if reasons else "")
    count = f" x {len(rows)}" if len(rows) > 1 else ""
    return f"    {kind + count:<30} {offloaded:>10} moved, {rest}"


def _unseen_line(source: Source, counts: dict[str, int]) -> list[str]:
    """Tell the modules that the model did not call, or that run inside of a compiled region."""
    unseen = [name for name, count in counts.items() if not count]
    if not unseen:
        return []
    names = ", ".join(unseen[:_NAMES_SHOWN]) + (", ..." if len(unseen) > _NAMES_SHOWN else "")
    what = f"{len(unseen)} of {len(counts)} chosen modules of {source.model_name}"
    return [f"  {what} did not run outside of a compiled region: {names}"]


def _source_lines(source: Source) -> list[str]:
    unseen = _unseen_line(source, source.call_counts())
    if not source.calls:
        return unseen
    kinds: dict[str, list[ModuleStats]] = {}
    for row in source.stats():
        kinds.setdefault(_kind(row.name), []).append(row)
    largest = sorted(kinds.items(), key=lambda kind: sum(row.bytes_saved for row in kind[1]), reverse=True)
    lines = [f"  by module of {source.model_name}, mean of {source.calls} calls:"]
    lines += [_line(kind, rows, source.calls) for kind, rows in largest[:_ROWS_SHOWN]]
    if len(largest) > _ROWS_SHOWN:
        lines.append(f"    and {len(largest) - _ROWS_SHOWN} more kinds, see stats() of the handle")
    return lines + unseen


def module_lines() -> list[str]:
    """Tell what the modules of each ``offload_modules`` moved and kept, like ones together, the largest first."""
    sources = sorted(_sources, key=lambda source: source.model_name)
    return [line for source in sources for line in _source_lines(source)]


def idle_advice() -> str:
    """Say what to do where nothing was saved inside of what ``offload_modules`` is installed on; empty without any."""
    for source in sorted(_sources, key=lambda source: source.model_name):
        counts = source.call_counts()
        if not counts:
            continue
        where = f"offload_modules is installed on {len(counts)} modules of {source.model_name}"
        if any(counts.values()):
            return f"{where}, which ran, but saved nothing there: call the model with gradients enabled."
        return f"{where}; none of them ran outside of a compiled region. {COMPILE_FIRST}"
    return ""
