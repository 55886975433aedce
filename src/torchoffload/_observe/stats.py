"""Statistics: what moved, what was kept and why. The core counts; this gives the counts names."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torchoffload._core import core

__all__ = ["OffloadStats", "TapeStats", "at_reset", "reset_stats", "stats"]


@dataclass(frozen=True, kw_only=True)
class _Counts:
    records_offloaded: int
    bytes_offloaded: int
    records_reloaded: int
    bytes_reloaded: int
    records_deduplicated: int
    bytes_deduplicated: int
    records_kept: dict[str, int]
    bytes_kept: dict[str, int]
    bytes_away: int
    bytes_at_once: int
    window_waits: int
    passed_by: int


@dataclass(frozen=True, kw_only=True)
class TapeStats(_Counts):
    """The counts of one tape: the records of one forward.

    Attributes
    ----------
    records_offloaded, bytes_offloaded : int
        Moved out of the device.
    records_reloaded, bytes_reloaded : int
        Moved back. A record that is used twice, long apart, counts twice.
    records_deduplicated, bytes_deduplicated : int
        Saved again, and joined to a record that was there: moved once.
    records_kept, bytes_kept : dict of str to int
        Not moved, by reason; ``docs/api.md`` says what each reason means. Found when the tensor was saved or copied:
        ``parameter``, ``small``, ``device``, ``layout``, ``marked``, ``in_backward``, ``tier_full``, ``resized``,
        ``write_failed``, ``pending``, ``capturing``, ``borrowed``, ``external_stream``. Learned from earlier steps:
        ``lives_on``, ``needed_soon``, ``tape_end``, ``small_copy``. Asked for with the options of offload_modules:
        ``beyond_fraction``, ``not_an_input``.
    bytes_away : int
        Device memory that the tape had given up when it closed (as its context was left, or as its backward began):
        what the memory at the loss is smaller by.
    bytes_at_once : int
        The most that one operator saved in records of its own, whether they moved or not. A compiled region is one.
    window_waits : int
        How often a full offload window made the compute stream wait.
    passed_by : int
        Records reloaded ahead of use that the consumer passed by, and that gave their memory up again.
    """


@dataclass(frozen=True, kw_only=True)
class OffloadStats(_Counts):
    """Totals of the process since ``reset_stats()``; the counts are those of ``TapeStats``.

    Attributes
    ----------
    handles : int
        Saved tensors packed.
    live_handles, live_records, live_slots, live_tapes : int
        Alive now; all 0 when no graph is.
    slot_bytes, peak_slot_bytes : int
        Bytes of slots in use, now and at most.
    pinned_bytes, peak_pinned_bytes : int
        Pinned host memory held, now and at most; ``trim()`` gives idle memory back.
    pinned_bytes_used : int
        Of ``pinned_bytes``, what slots take up now.
    peak_offload_window_bytes, peak_reload_window_bytes : int
        The most bytes in flight each way.
    budget_bytes_used : int
        Bytes that count against ``budget_bytes`` now.
    tapes : tuple of TapeStats
        The latest tapes, oldest first, at most 64.
    """

    handles: int
    live_handles: int
    live_records: int
    live_slots: int
    live_tapes: int
    slot_bytes: int
    peak_slot_bytes: int
    pinned_bytes: int
    peak_pinned_bytes: int
    pinned_bytes_used: int
    peak_offload_window_bytes: int
    peak_reload_window_bytes: int
    budget_bytes_used: int
    tapes: tuple[TapeStats, ...]


def _tape(row: dict[str, Any]) -> TapeStats:
    return TapeStats(**{field.name: row[field.name] for field in fields(TapeStats)})


def stats() -> OffloadStats:
    """Tell what happened in this process since ``reset_stats()``, over all contexts and threads."""
    counted = core.stats()
    counted["tapes"] = tuple(_tape(row) for row in counted["tapes"])
    return OffloadStats(**counted)


_forgetful: list[Callable[[], None]] = []


def at_reset(forget: Callable[[], None]) -> None:
    """Have ``forget`` called by each ``reset_stats()``."""
    _forgetful.append(forget)


def reset_stats() -> None:
    """Set totals to zero, peaks to what is held now, and forget the rows of finished tapes and the latest profile()."""
    core.reset_stats()
    for forget in _forgetful:
        forget()
