"""The bytes moved and kept inside each module that offload_modules was given, and the lines about it in report()."""

import re
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torchoffload._observe.stats import at_reset
from torchoffload._observe.units import human_bytes

__all__ = [
    "COMPILE_FIRST",
    "ModuleStats",
    "Source",
    "idle_modules_advice",
    "kind_of_name",
    "module_lines",
    "note_source",
]

COMPILE_FIRST = "Compile first, then choose what torch.compile(module) returned, or compile each module in place."

_ROWS_SHOWN = 8
_REASONS_SHOWN = 2
_NAMES_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class ModuleStats:
    """The counts of saves inside one module since ``reset_stats()``, summed over all its calls.

    A record counts for the module in which it was saved first. If chosen modules lie inside each other, that is the
    innermost one.

    Attributes
    ----------
    name : str
        The name of the module in the model. Wrappers around modules have no part in it.
    records_offloaded, bytes_offloaded : int
        Records that were moved out of the device, and their bytes.
    records_kept, bytes_kept : dict of str to int
        Records that were not moved, and their bytes, by the reasons that ``TapeStats`` has.
    """

    name: str
    records_offloaded: int
    bytes_offloaded: int
    records_kept: dict[str, int]
    bytes_kept: dict[str, int]

    @property
    def bytes_saved(self) -> int:
        """All bytes that were saved, whether they were moved or kept."""
        return self.bytes_offloaded + sum(self.bytes_kept.values())


class Source(Protocol):
    """An object that counts by module: the hooks and contexts of one call of offload_modules."""

    model_name: str
    calls: int
    is_of_fit: bool  # which reports on its blocks by itself

    def call_counts(self) -> dict[str, int]:
        """Return by module how often its hooks saw a call; empty once the hooks were removed."""

    def stats(self) -> tuple[ModuleStats, ...]:
        """Return one row for each module."""

    def forget(self) -> None:
        """Set all counts to zero."""


_sources: "weakref.WeakSet[Source]" = weakref.WeakSet()


def note_source(source: Source) -> None:
    """Let ``report()`` include ``source`` for as long as it is alive."""
    _sources.add(source)


def _forget() -> None:
    for source in list(_sources):
        source.forget()


at_reset(_forget)


def kind_of_name(name: str) -> str:
    """Return the name of a module with * in the place of each level that is a number, such as ``"layers.*.mlp"``."""
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
    """Name the modules that the model did not call, or that ran only inside of a compiled region."""
    unseen = [name for name, count in counts.items() if not count]
    if not unseen or source.is_of_fit:
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
        kinds.setdefault(kind_of_name(row.name), []).append(row)
    largest = sorted(kinds.items(), key=lambda kind: sum(row.bytes_saved for row in kind[1]), reverse=True)
    lines = [f"  by module of {source.model_name}, mean of {source.calls} calls:"]
    lines += [_line(kind, rows, source.calls) for kind, rows in largest[:_ROWS_SHOWN]]
    if len(largest) > _ROWS_SHOWN:
        lines.append(f"    and {len(largest) - _ROWS_SHOWN} more kinds, see stats() of the handle")
    return lines + unseen


def module_lines() -> list[str]:
    """Return the lines of ``report()`` on the bytes that the modules of each ``offload_modules`` moved and kept.

    Modules whose names differ only in numbers, such as the layers of a model, share a line. The largest come first.
    """
    sources = sorted(_sources, key=lambda source: source.model_name)
    return [line for source in sources for line in _source_lines(source)]


def idle_modules_advice() -> str:
    """Return advice if nothing was saved inside the modules that ``offload_modules`` was given.

    Empty if ``offload_modules`` is installed nowhere.
    """
    for source in sorted(_sources, key=lambda source: source.model_name):
        counts = source.call_counts()
        if not counts or source.is_of_fit:
            continue
        where = f"offload_modules is installed on {len(counts)} modules of {source.model_name}"
        if any(counts.values()):
            return (
                f"{where}, which ran, but saved nothing there: call the model with gradients enabled. If "
                "torch.utils.checkpoint calls these modules, add only_inputs=True, which moves the inputs that the "
                "checkpoints save."
            )
        return f"{where}; none of them ran outside of a compiled region. {COMPILE_FIRST}"
    return ""
