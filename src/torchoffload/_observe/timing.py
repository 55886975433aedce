"""The entries of a profile, and their sums: seconds that the compute stream waited, rates of copies, device memory."""

import enum
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["EntryKind", "ProfileEntry", "TapeTiming", "Timing", "Transfers", "sum_up", "sum_up_tapes"]


class EntryKind(enum.StrEnum):
    """The activity that a ``ProfileEntry`` describes. Some kinds are moments, whose begin and end are equal."""

    READY = "ready"
    """A moment on the compute stream: the copy of a record could start, or a record that stays was saved."""
    NEEDED = "needed"
    """A moment on the compute stream: backward asked for a record for the first time."""
    COPY_OUT = "copy_out"
    """The copy of a record from the device to its tier."""
    COPY_IN = "copy_in"
    """The copy of a record back to the device."""
    WINDOW_WAIT = "window_wait"
    """The compute stream waited, because the offload window was full, for the copy of its oldest record: this one."""
    RELOAD_WAIT = "reload_wait"
    """The compute stream waited until this record was back."""
    DROP_WAIT = "drop_wait"
    """The compute stream waited for the copy of memory that was dropped: backward was done with this record first."""
    CLOSED = "closed"
    """A moment: a tape closed, because its context was left or its backward began. The entry is of no record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileEntry:
    """One copy, one wait or one moment on a device, timed by the clock of the device.

    Attributes
    ----------
    device : str
        The device, such as ``"cuda:0"``.
    kind : EntryKind
        The activity.
    begin_s, end_s : float
        Seconds since the profile began. They are equal for a moment.
    tape : int
        The number of the tape: tapes are counted from 1 in the order in which they were opened.
    record : int
        The number of the record in its tape, from 0.
    nbytes : int
        The size of the record in bytes.
    is_kept : bool
        Whether the record stays on the device.
    offload_window_bytes, reload_window_bytes : int
        Bytes that were in flight in each direction when the host enqueued this.
    device_bytes : int
        Bytes that were allocated on the device at that time.
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
        """The seconds from begin to end."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """The copies in one direction, added up.

    Attributes
    ----------
    copies : int
        The number of copies.
    nbytes : int
        The bytes that they moved.
    busy_s : float
        The seconds that the copies took, added up.
    span_s : float
        The seconds from the begin of the first copy to the end of the last one. For several tapes on a device these are
        the seconds that lie in the span of any tape; for several devices, the sum over the devices.
    """

    copies: int
    nbytes: int
    busy_s: float
    span_s: float

    @property
    def bytes_per_s(self) -> float:
        """The rate in bytes per second while copies ran; 0 if there were none."""
        return self.nbytes / self.busy_s if self.busy_s > 0 else 0.0

    def link_use(self, link_bytes_per_s: float | None = None) -> float:
        """Return the share of the link's rate that was used from the first copy to the last; 1 is all of it.

        Parameters
        ----------
        link_bytes_per_s : float, optional
            The rate of the link in bytes per second; ``python -m torchoffload.info`` measures it. Default: the rate of
            these copies themselves, so that only the gaps between them count.

        Returns
        -------
        float
            ``nbytes / (link_bytes_per_s * span_s)``; 0 if there were no copies.
        """
        rate = self.bytes_per_s if link_bytes_per_s is None else link_bytes_per_s
        return self.nbytes / (rate * self.span_s) if rate > 0 and self.span_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Times, rates and memory of one tape, or of all tapes together.

    Attributes
    ----------
    window_wait_s, reload_wait_s, drop_wait_s : float
        The seconds that the compute stream waited because the offload window was full, for records on their way back,
        and for copies of records that backward was done with before their copies had ended.
    out, back : Transfers
        The copies to the tier, and those back to the device.
    loss_device_bytes : int or None
        Bytes that were allocated on the device when the tape closed; for all tapes, the largest of these values. None
        if no tape closed inside the profile.
    peak_device_bytes : int
        The most bytes that were allocated on the device at any entry. Memory that an operator allocates and frees
        between two entries is not seen.
    saved_bytes : int
        The bytes of the records that autograd saved, whether they moved or not.
    computing_s : float
        The seconds from the first entry to the last one of each tape without those that the compute stream waited. For
        several tapes on a device these are the seconds that lie in any tape; for several devices, the sum over them.
    """

    window_wait_s: float
    reload_wait_s: float
    drop_wait_s: float
    out: Transfers
    back: Transfers
    loss_device_bytes: int | None
    peak_device_bytes: int
    saved_bytes: int
    computing_s: float

    @property
    def stall_s(self) -> float:
        """The seconds that the compute stream waited for any of these reasons."""
        return self.window_wait_s + self.reload_wait_s + self.drop_wait_s


@dataclass(frozen=True, kw_only=True)
class TapeTiming(Timing):
    """The times, rates and memory of one tape: a forward and its backward, as far as they lie inside the profile.

    It has all attributes of ``Timing``, and those below.

    Attributes
    ----------
    device : str
        The device, such as ``"cuda:0"``.
    tape : int
        The number of the tape, as in ``ProfileEntry``.
    """

    device: str
    tape: int


def _covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """Return the seconds that lie in at least one of ``spans``."""
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


def _span_s(entries: Sequence[ProfileEntry]) -> float:
    """Return the seconds that lie between the first and the last entry of any tape, added up over the devices."""
    spans: dict[tuple[str, int], tuple[float, float]] = {}
    for each in entries:
        begin_s, end_s = spans.get((each.device, each.tape), (each.begin_s, each.end_s))
        spans[each.device, each.tape] = (min(begin_s, each.begin_s), max(end_s, each.end_s))
    devices = {device for device, _ in spans}
    return sum(_covered_s(span for (device, _), span in spans.items() if device == each) for each in devices)


def sum_up(entries: Sequence[ProfileEntry]) -> Timing:
    """Add up entries, of whatever tapes and devices they are."""
    waits = dict.fromkeys((EntryKind.WINDOW_WAIT, EntryKind.RELOAD_WAIT, EntryKind.DROP_WAIT), 0.0)
    for entry in entries:
        if entry.kind in waits:
            waits[entry.kind] += entry.duration_s
    stall_s = sum(waits.values())
    return Timing(
        window_wait_s=waits[EntryKind.WINDOW_WAIT],
        reload_wait_s=waits[EntryKind.RELOAD_WAIT],
        drop_wait_s=waits[EntryKind.DROP_WAIT],
        out=_transfers(entries, EntryKind.COPY_OUT),
        back=_transfers(entries, EntryKind.COPY_IN),
        loss_device_bytes=max((each.device_bytes for each in entries if each.kind is EntryKind.CLOSED), default=None),
        peak_device_bytes=max((entry.device_bytes for entry in entries), default=0),
        saved_bytes=sum(entry.nbytes for entry in entries if entry.kind is EntryKind.READY),
        computing_s=max(0.0, _span_s(entries) - stall_s),
    )


def sum_up_tapes(entries: Sequence[ProfileEntry]) -> tuple[TapeTiming, ...]:
    """Add up the entries of each tape. The tapes are in the order in which they first occur in ``entries``."""
    by_tape: dict[tuple[str, int], list[ProfileEntry]] = defaultdict(list)
    for entry in entries:
        by_tape[entry.device, entry.tape].append(entry)
    return tuple(TapeTiming(device=device, tape=tape, **vars(sum_up(own))) for (device, tape), own in by_tape.items())
