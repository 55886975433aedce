"""Writing a profile as a trace in the Trace Event Format, which Perfetto and chrome://tracing can open.

Source: the document "Trace Event Format" of the Chromium project, and Perfetto's notes on importing that format.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torchoffload._observe.timing import EntryKind, ProfileEntry
from torchoffload._observe.units import human_bytes

__all__ = ["trace_events", "write_trace"]

_COMPUTE, _OFFLOAD, _RELOAD = 1, 2, 3
_TRACKS = {_COMPUTE: "compute_stream: waits", _OFFLOAD: "offload_stream: copies", _RELOAD: "reload_stream: copies"}
_SPANS = {
    EntryKind.COPY_OUT: (_OFFLOAD, "offload"),
    EntryKind.COPY_IN: (_RELOAD, "reload"),
    EntryKind.WINDOW_WAIT: (_COMPUTE, "wait for the offload of"),
    EntryKind.RELOAD_WAIT: (_COMPUTE, "wait for the reload of"),
    EntryKind.DROP_WAIT: (_COMPUTE, "wait for the copy of"),
}
_WHY = {
    EntryKind.COPY_OUT: "saved in forward",
    EntryKind.WINDOW_WAIT: "the offload window was full, and this its oldest record",
    EntryKind.RELOAD_WAIT: "backward asked for the record before it was back",
    EntryKind.DROP_WAIT: "backward was done with the record before its copy had ended",
}
_US = 1e6


def _metadata(process: int, device: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": f"torchoffload {device}"}}
    for track, name in _TRACKS.items():
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": track, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": track, "args": {"sort_index": track}}


def _span(process: int, entry: ProfileEntry, why: str) -> dict[str, Any]:
    track, verb = _SPANS[entry.kind]
    arguments: dict[str, Any] = {"tape": entry.tape, "record": entry.record, "bytes": entry.nbytes, "why": why}
    if track != _COMPUTE and entry.duration_s > 0:
        arguments["GB/s"] = round(entry.nbytes / entry.duration_s / 1e9, 2)
    return {
        "ph": "X",
        "name": f"{verb} record {entry.record} ({human_bytes(entry.nbytes)})",
        "cat": entry.kind.value,
        "pid": process,
        "tid": track,
        "ts": entry.begin_s * _US,
        "dur": entry.duration_s * _US,
        "args": arguments,
    }


def _counters(process: int, entry: ProfileEntry) -> Iterator[dict[str, Any]]:
    counted = {"device memory": entry.device_bytes}
    if entry.kind is not EntryKind.CLOSED:
        counted |= {"offload window": entry.offload_window_bytes, "reload window": entry.reload_window_bytes}
    for name, nbytes in counted.items():
        yield {"ph": "C", "name": name, "pid": process, "ts": entry.end_s * _US, "args": {"bytes": nbytes}}


def _device_events(process: int, entries: Iterable[ProfileEntry]) -> Iterator[dict[str, Any]]:
    needed: set[tuple[int, int]] = set()
    for entry in entries:
        if entry.kind is EntryKind.NEEDED:
            needed.add((entry.tape, entry.record))
        if entry.kind in _SPANS:
            ahead = "asked for" if (entry.tape, entry.record) in needed else "ahead of its use"
            yield _span(process, entry, _WHY.get(entry.kind, ahead))
        if entry.kind is EntryKind.CLOSED:
            name = f"tape {entry.tape} closed"
            yield {"ph": "i", "s": "p", "name": name, "pid": process, "tid": _COMPUTE, "ts": entry.begin_s * _US}
        # The host took these counts while it enqueued the entry. They are shown at the place of the compute stream at
        # that time, so not at copies, which run later.
        if entry.kind not in (EntryKind.COPY_OUT, EntryKind.COPY_IN):
            yield from _counters(process, entry)


def trace_events(entries: Sequence[ProfileEntry]) -> list[dict[str, Any]]:
    """Return the events of a trace, in which each device is a process and each stream a track.

    Parameters
    ----------
    entries : sequence of ProfileEntry
        Entries of any devices, in the order in which the host enqueued them.

    Returns
    -------
    list of dict
        Events as the format has them, with times in microseconds.
    """
    events: list[dict[str, Any]] = []
    for process, device in enumerate(dict.fromkeys(entry.device for entry in entries), start=1):
        events += _metadata(process, device)
        events += _device_events(process, (entry for entry in entries if entry.device == device))
    return events


def write_trace(entries: Sequence[ProfileEntry], path: str | os.PathLike[str]) -> None:
    """Write the trace of ``entries`` to the file ``path`` as JSON."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"displayTimeUnit": "ms", "traceEvents": trace_events(entries)}, file)
