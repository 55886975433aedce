"""profile(): when the copies ran, and how long the compute stream waited for them."""

import enum
import os
import threading
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Self

from torchoffload._core import core
from torchoffload._observe.rows import disk_lines, kept_lines, moved_line, timing_lines
from torchoffload._observe.stats import OffloadStats, TapeStats, at_reset, stats
from torchoffload._observe.timing import EntryKind, ProfileEntry, TapeTiming, Timing, sum_up, sum_up_tapes
from torchoffload._observe.trace import write_trace
from torchoffload._observe.units import human_bytes

__all__ = ["Profile", "latest_timing", "profile"]

_NO_TIMES = (
    "torchoffload: this profile has no times: nothing was saved inside it on a device that tells time. CUDA does, the "
    'disk tier of a CPU (tier="disk") does not. What moved is in Profile.counts.'
)
_NO_TIMES_LINE = "  no times: nothing was saved on a device that tells time; CUDA does, the disk tier of a CPU does not"


class _State(enum.Enum):
    NEW = "it was not entered yet"
    OPEN = "it is still open: leave its `with` block first"
    OVER = "it is over: each `with` takes a new profile()"


_lock = threading.Lock()
_open_profile: "Profile | None" = None  # guarded by _lock
_latest_timing: tuple[int, Timing] | None = None


def latest_timing() -> tuple[int, Timing] | None:
    """Return the number of tapes of the latest profile that has times, and its total.

    None if there was no such profile since ``reset_stats()``.
    """
    return _latest_timing


def _forget_latest() -> None:
    global _latest_timing
    _latest_timing = None


at_reset(_forget_latest)


def _difference(before: OffloadStats, after: OffloadStats) -> TapeStats:
    """Return the counts of ``after`` less those of ``before``, or the counts since a ``reset_stats()`` in between."""
    if after.handles < before.handles:
        return TapeStats(**{field.name: getattr(after, field.name) for field in fields(TapeStats)})

    def less(now: Any, then: Any) -> Any:
        if not isinstance(now, Mapping):
            return now - then
        return {key: value - then.get(key, 0) for key, value in now.items() if value != then.get(key, 0)}

    return TapeStats(
        **{field.name: less(getattr(after, field.name), getattr(before, field.name)) for field in fields(TapeStats)}
    )


class Profile:
    """The context that ``profile()`` returns; after its ``with`` block it has the measurements.

    ``print(profile)`` shows a summary then: the records moved, the records kept, how long computing waited for copies,
    and how fast the copies were.

    It measures the whole process: all contexts, devices and threads. On CUDA the times are taken by events on the
    streams, with the clock of the device. Leaving the context waits until the device has come to the last of these
    events.

    Raises
    ------
    RuntimeError
        On entering, if another profile is open in this process, if this one was entered before, or while a CUDA graph
        is being captured. On reading any attribute before the ``with`` block was left. On reading times if there are
        none, because a CPU tells no times or nothing was saved; ``has_times`` tells.
    """

    def __init__(self) -> None:
        self._state = _State.NEW
        self._has_times = False

    def __enter__(self) -> Self:
        global _open_profile
        with _lock:
            if self._state is not _State.NEW:
                raise RuntimeError(f"torchoffload: this profile cannot be entered, {self._state.value}")
            if _open_profile is not None:
                raise RuntimeError(
                    "torchoffload: a profile() is open already in this process. It sees all contexts and threads: "
                    "leave it before another is entered."
                )
            core.start_profile()
            self._before = stats()
            self._state, _open_profile = _State.OPEN, self
        return self

    def __exit__(self, *exception: object) -> None:
        global _open_profile, _latest_timing
        with _lock:
            self._state, _open_profile = _State.OVER, None
            devices: list[Any] = []
            try:
                devices = core.stop_profile()
            finally:
                self._stats = stats()
                self._counts = _difference(self._before, self._stats)
                self._has_times = bool(devices)
                self._entries = tuple(_entry(device, row) for device, rows in devices for row in rows)
                self._tapes, self._total = sum_up_tapes(self._entries), sum_up(self._entries)
            if self._has_times:
                _latest_timing = (len(self._tapes), self._total)

    def __repr__(self) -> str:
        if self._state is not _State.OVER:
            return f"<torchoffload profile: {self._state.value}>"
        stalled = f", computing waited {self._total.stall_s:.3f} s" if self._has_times else ", no times"
        moved = f"{human_bytes(self._counts.bytes_offloaded)} out, {human_bytes(self._counts.bytes_reloaded)} back"
        return f"<torchoffload profile: {moved}{stalled}>"

    def __str__(self) -> str:
        if self._state is not _State.OVER:
            return repr(self)
        counts = self._counts
        lines = [
            f"torchoffload, inside of this profile(){f', {len(self._tapes)} tapes' if self._has_times else ''}:",
            moved_line("offloaded", counts.bytes_offloaded, counts.records_offloaded),
            moved_line("reloaded", counts.bytes_reloaded, counts.records_reloaded),
            *self._disk_lines(),
            *kept_lines(counts),
            *(timing_lines(self._total) if self._has_times else [_NO_TIMES_LINE]),
        ]
        return "\n".join(lines)

    def _disk_lines(self) -> list[str]:
        names = ("bytes_spilled", "bytes_fetched", "disk_waits", "disk_wait_s")
        now, then = self._stats, self._before
        was_reset = now.handles < then.handles
        return disk_lines(*(getattr(now, name) - (0 if was_reset else getattr(then, name)) for name in names))

    def _check(self, *, times: bool) -> None:
        if self._state is not _State.OVER:
            raise RuntimeError(f"torchoffload: this profile has nothing to tell, {self._state.value}")
        if times and not self._has_times:
            raise RuntimeError(_NO_TIMES)

    @property
    def counts(self) -> TapeStats:
        """The records moved and kept inside the profile, summed over all tapes. Available on every tier."""
        self._check(times=False)
        return self._counts

    @property
    def stats(self) -> OffloadStats:
        """The result of ``stats()`` at the moment when the profile was left. Available on every tier."""
        self._check(times=False)
        return self._stats

    @property
    def has_times(self) -> bool:
        """Whether something was saved inside the profile on a device that takes times."""
        self._check(times=False)
        return self._has_times

    @property
    def entries(self) -> tuple[ProfileEntry, ...]:
        """All copies, waits and moments, device by device, in the order in which the host enqueued them."""
        self._check(times=True)
        return self._entries

    @property
    def total(self) -> Timing:
        """The waits, rates and memory of all tapes together."""
        self._check(times=True)
        return self._total

    @property
    def tapes(self) -> tuple[TapeTiming, ...]:
        """The waits, rates and memory of each tape, in the order in which the tapes were opened."""
        self._check(times=True)
        return self._tapes

    def export_timeline(self, path: str | os.PathLike[str]) -> None:
        """Write a trace that https://ui.perfetto.dev and ``chrome://tracing`` can open.

        Each device has a track for the waits of its compute stream, one for copies to the tier and one for copies back.
        Every entry shows its tape, record and bytes. A mark shows the moment at which each tape closed, and counters
        show the bytes in both windows and the device memory.

        Parameters
        ----------
        path : str or os.PathLike
            The JSON file to write. An existing file is replaced.

        Raises
        ------
        RuntimeError
            The profile has no times, or its ``with`` block was not left yet.
        OSError
            The file cannot be written.
        """
        self._check(times=True)
        write_trace(self._entries, path)


def _entry(device: str, row: tuple[Any, ...]) -> ProfileEntry:
    kind, begin_s, end_s, tape, record, nbytes, is_kept, out_bytes, in_bytes, device_bytes = row
    return ProfileEntry(
        device=device,
        kind=EntryKind(kind),
        begin_s=begin_s,
        end_s=end_s,
        tape=tape,
        record=record,
        nbytes=nbytes,
        is_kept=is_kept,
        offload_window_bytes=out_bytes,
        reload_window_bytes=in_bytes,
        device_bytes=device_bytes,
    )


def profile() -> Profile:
    """Measure when copies run, and how long the compute stream waits for them, while a ``with`` block runs.

    Only one profile may be open in a process. Inside it, each record that moves takes up to ten timing events; outside
    of a profile there is no cost. A CPU, with ``tier="disk"``, tells no times, so there only the counts are available.

    Returns
    -------
    Profile
        A context manager, which has the results once its ``with`` block was left.

    Examples
    --------
    >>> with torchoffload.profile() as profile:
    ...     with torchoffload.OffloadActivations():
    ...         loss = model(batch).loss
    ...     loss.backward()
    >>> profile.total.stall_s
    >>> profile.export_timeline("step.json")
    """
    return Profile()
