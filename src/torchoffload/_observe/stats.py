"""Statistics: the records that moved or stayed on the device, and why. The compiled core counts; here are the names."""

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
    """The counts of one tape, which holds the records that one forward saved on one thread.

    A record is the storage of one or several saved tensors, or a part of it, and moves as a whole.

    Attributes
    ----------
    records_offloaded, bytes_offloaded : int
        Records that were moved out of the device, and their bytes.
    records_reloaded, bytes_reloaded : int
        Records that were moved back, and their bytes. A record that backward uses twice, long apart, counts twice.
    records_deduplicated, bytes_deduplicated : int
        Tensors that were saved again after a record of the same memory was made, and their bytes. The record moves
        once.
    records_kept, bytes_kept : dict of str to int
        The records that were not moved, by reason; ``docs/reasons.md`` explains each reason. Found when a tensor was
        saved or copied: ``parameter``, ``small``, ``device``, ``layout``, ``marked``, ``in_backward``, ``planned``,
        ``tier_full``, ``resized``, ``write_failed``, ``pending``, ``capturing``, ``borrowed``, ``external_stream``.
        Learned from earlier steps: ``lives_on``, ``needed_soon``, ``tape_end``, ``small_copy``. Asked for with the
        options of offload_modules: ``beyond_fraction``, ``not_an_input``.
    bytes_away : int
        Device memory that the tape had given up when it closed, in bytes: as its context was left, or as its backward
        began. The memory in use at the loss is smaller by this much.
    bytes_at_once : int
        The most bytes that one operator saved in new records, whether they moved or not. A compiled region is one
        operator.
    window_waits : int
        How often the compute stream had to wait because the offload window was full.
    passed_by : int
        Records that were reloaded ahead of use, were not used in their turn, and gave their memory up again.
    """


@dataclass(frozen=True, kw_only=True)
class OffloadStats(_Counts):
    """The totals of this process since ``reset_stats()``, over all contexts, devices and threads.

    It has all attributes of ``TapeStats``, summed over the tapes, and those below.

    Attributes
    ----------
    handles : int
        How many saved tensors were packed.
    live_handles, live_records, live_slots, live_tapes : int
        How many saved tensors, records, slots and tapes are alive now. All are 0 when no autograd graph is alive.
    slot_bytes, peak_slot_bytes : int
        Bytes of the slots in use, now and at most. A slot is the place on the tier in which one record is stored.
    pinned_bytes, peak_pinned_bytes : int
        Bytes of pinned host memory that torchoffload holds, now and at most. ``trim()`` gives back the unused ones.
    pinned_bytes_used : int
        The part of ``pinned_bytes`` that slots occupy now.
    peak_offload_window_bytes, peak_reload_window_bytes : int
        The most bytes that were in flight in each direction.
    bytes_spilled, bytes_fetched : int
        The bytes written from host memory to a disk, and read back: for CUDA tensors with ``on_full="disk"`` or
        ``tier="disk"``. Counted in blocks of 4096 bytes.
    disk_waits : int
        How often the program waited for that disk: for bytes that backward asked for, or for room in host memory.
    disk_wait_s : float
        How long it did, in seconds.
    budget_bytes_used : int
        Bytes that count against the budget now.
    tapes : tuple of TapeStats
        The latest tapes, at most 64, the oldest first.
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
    bytes_spilled: int
    bytes_fetched: int
    disk_waits: int
    disk_wait_s: float
    budget_bytes_used: int
    tapes: tuple[TapeStats, ...]


def _tape(row: dict[str, Any]) -> TapeStats:
    return TapeStats(**{field.name: row[field.name] for field in fields(TapeStats)})


def stats() -> OffloadStats:
    """Return the statistics of this process since ``reset_stats()``, over all contexts, devices and threads.

    Returns
    -------
    OffloadStats
        A snapshot: later steps do not change it.
    """
    counted = core.stats()
    counted["tapes"] = tuple(_tape(row) for row in counted["tapes"])
    return OffloadStats(**counted)


_forgetful: list[Callable[[], None]] = []


def at_reset(forget: Callable[[], None]) -> None:
    """Register ``forget`` to be called, with no arguments, by each ``reset_stats()``."""
    _forgetful.append(forget)


def reset_stats() -> None:
    """Start counting anew.

    Totals become zero, and peaks become the present values. The rows of finished tapes, the counts by module and the
    times of the latest ``profile()`` are forgotten.
    """
    core.reset_stats()
    for forget in _forgetful:
        forget()
