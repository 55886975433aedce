"""What a profile's entries add up to: seconds that computing stood still, rates of the copies, device memory."""

import enum
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["EntryKind", "ProfileEntry", "TapeTiming", "Timing", "Transfers", "sum_up", "sum_up_tapes"]


class EntryKind(enum.StrEnum):
    """What a ``ProfileEntry`` tells of; a moment has no duration."""

    READY = "ready"
    """A moment on the compute stream: the copy of a record may start, or a record that is kept was packed."""
    NEEDED = "needed"
    """A moment on the compute stream: backward asked for a record for the first time."""
    COPY_OUT = "copy_out"
    """A record's copy to its tier."""
    COPY_IN = "copy_in"
    """A record's copy back."""
    WINDOW_WAIT = "window_wait"
    """The compute stream stood still for a full offload window: until the copy of this record, its oldest, was out."""
    RELOAD_WAIT = "reload_wait"
    """The compute stream stood still until this record was back."""
    CLOSED = "closed"
    """A moment: a tape closed, as its context was left or as its backward began. No record is meant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileEntry:
    """What happened once on a device, by the device's own clock.

    Attributes
    ----------
    device : str
        Such as ``"cuda:0"``.
    kind : EntryKind
        What happened.
    begin_s, end_s : float
        Seconds since the profile began; equal for a moment.
    tape, record : int
        Numbers of the tape, in the order of opening, from 1, and of the record in its tape, from 0.
    nbytes : int
        Of the record.
    is_kept : bool
        The record is not moved.
    offload_window_bytes, reload_window_bytes : int
        Bytes in flight each way when the host enqueued this.
    device_bytes : int
        Bytes allocated on the device then.
    """

    device: str
    kind: EntryKind
    begin_s: float
    end_s: float
    tape: int
    record: int
    nbytes: int
    is_kept: bool
    offload_window_bytes: int
    reload_window_bytes: int
    device_bytes: int

    @property
    def duration_s(self) -> float:
        """Seconds from begin to end."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """The copies of one direction.

    Attributes
    ----------
    copies : int
        How many.
    nbytes : int
        What they moved.
    busy_s : float
        Seconds in which they ran.
    span_s : float
        Seconds from the first one's begin to the last one's end. Of several tapes, the seconds that lie in the span of
        any; of several devices, the sum.
    """

    copies: int
    nbytes: int
    busy_s: float
    span_s: float

    @property
    def bytes_per_s(self) -> float:
        """The rate while copies ran; 0 where none did."""
        return self.nbytes / self.busy_s if self.busy_s > 0 else 0.0

    def link_use(self, link_bytes_per_s: float | None = None) -> float:
        """Tell how much of the link was used from the first copy's begin to the last one's end: 1 is all of it.

        Parameters
        ----------
        link_bytes_per_s : float, optional
            What the link can do, as ``python -m torchoffload.info`` measures it. Default: the rate of these copies, so
            that only the gaps between them count.
        """
        rate = self.bytes_per_s if link_bytes_per_s is None else link_bytes_per_s
        return self.nbytes / (rate * self.span_s) if rate > 0 and self.span_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Times, rates and memory, of one tape or of all.

    Attributes
    ----------
    window_wait_s, reload_wait_s : float
        Seconds that the compute stream stood still for a full offload window, and for records on their way back.
    out, back : Transfers
        Copies to the tier, and back.
    loss_device_bytes : int or None
        Device memory allocated when the tape closed; of all tapes, the most. None where none closed inside the profile.
    peak_device_bytes : int
        The most device memory at any entry. What an operator takes and gives back between two entries is not seen.
    """

    window_wait_s: float
    reload_wait_s: float
    out: Transfers
    back: Transfers
    loss_device_bytes: int | None
    peak_device_bytes: int

    @property
    def stall_s(self) -> float:
        """Seconds that the compute stream stood still for either."""
        return self.window_wait_s + self.reload_wait_s


@dataclass(frozen=True, kw_only=True)
class TapeTiming(Timing):
    """The times, rates and memory of one tape: one forward and its backward, as far as they lie inside the profile.

    Attributes
    ----------
    device : str
        Where it ran.
    tape : int
        Its number, as in ``ProfileEntry``.
    """

    device: str
    tape: int


def _covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds that lie in any of ``spans``."""
    covered_s, reached_s = 0.0, float("-inf")
    for begin_s, end_s in sorted(spans):
        covered_s += max(0.0, end_s - max(begin_s, reached_s))
        reached_s = max(reached_s, end_s)
    return covered_s


def _transfers(entries: Sequence[ProfileEntry], kind: EntryKind) -> Transfers:
    copies = [entry for entry in entries if entry.kind is kind]
    spans: dict[tuple[str, int], tuple[float, float]] = {}  # by device and tape
    for copy in copies:
        begin_s, end_s = spans.get((copy.device, copy.tape), (copy.begin_s, copy.end_s))
        spans[copy.device, copy.tape] = (min(begin_s, copy.begin_s), max(end_s, copy.end_s))
    by_device = defaultdict(list)
    for (device, _), span in spans.items():
        by_device[device].append(span)
    return Transfers(
        copies=len(copies),
        nbytes=sum(copy.nbytes for copy in copies),
        busy_s=sum(copy.duration_s for copy in copies),
        span_s=sum(_covered_s(each) for each in by_device.values()),
    )


def sum_up(entries: Sequence[ProfileEntry]) -> Timing:
    """Add up entries of any tapes and devices."""
    waits = dict.fromkeys((EntryKind.WINDOW_WAIT, EntryKind.RELOAD_WAIT), 0.0)
    for entry in entries:
        if entry.kind in waits:
            waits[entry.kind] += entry.duration_s
    return Timing(
        window_wait_s=waits[EntryKind.WINDOW_WAIT],
        reload_wait_s=waits[EntryKind.RELOAD_WAIT],
        out=_transfers(entries, EntryKind.COPY_OUT),
        back=_transfers(entries, EntryKind.COPY_IN),
        loss_device_bytes=max((each.device_bytes for each in entries if each.kind is EntryKind.CLOSED), default=None),
        peak_device_bytes=max((entry.device_bytes for entry in entries), default=0),
    )


def sum_up_tapes(entries: Sequence[ProfileEntry]) -> tuple[TapeTiming, ...]:
    """Add up the entries of each tape, in the order in which the tapes first came up."""
    by_tape: dict[tuple[str, int], list[ProfileEntry]] = defaultdict(list)
    for entry in entries:
        by_tape[entry.device, entry.tape].append(entry)
    return tuple(TapeTiming(device=device, tape=tape, **vars(sum_up(own))) for (device, tape), own in by_tape.items())
