"""The lines of text that report() and a Profile have in common: a name, a value, and an explanation."""

from torchoffload._observe.cost import CostOfGib, cost_line
from torchoffload._observe.reasons import REASONS
from torchoffload._observe.stats import OffloadStats, TapeStats
from torchoffload._observe.timing import Timing, Transfers
from torchoffload._observe.units import human_bytes

__all__ = ["disk_lines", "kept_lines", "moved_line", "row", "timing_lines"]


def row(name: str, value: str, rest: str) -> str:
    """Return a line with a name, its value in a column of its own, and the rest."""
    return f"  {name:<22}{value:>12} {rest}"


def moved_line(name: str, nbytes: int, records: int) -> str:
    """Return a line on records that moved or stayed, with their bytes."""
    return row(name, human_bytes(nbytes), f"in {records} records")


def kept_lines(seen: TapeStats | OffloadStats) -> list[str]:
    """Return a line for each reason for which something stayed on the device, with the most bytes first."""
    by_bytes = sorted(seen.records_kept, key=lambda reason: seen.bytes_kept.get(reason, 0), reverse=True)
    lines = []
    for reason in by_bytes:
        records, nbytes = seen.records_kept[reason], seen.bytes_kept.get(reason, 0)
        if records:
            lines.append(f"{moved_line(f'kept: {reason}', nbytes, records)}; {REASONS[reason].meaning}")
    return lines


def disk_lines(bytes_spilled: int, bytes_fetched: int, waits: int, wait_s: float) -> list[str]:
    """Return the line on slots that went on to a disk; none if nothing did, and nobody waited."""
    if not (bytes_spilled or bytes_fetched or waits):
        return []
    rest = f"written, {human_bytes(bytes_fetched)} read back; {waits} waits for it, {wait_s:.3f} s"
    return [row("on to the disk", human_bytes(bytes_spilled), rest)]


def _rate(name: str, way: Transfers) -> str:
    used = f"while copying, for {way.link_use():.0%} of the {way.span_s:.3f} s from first to last copy"
    return row(name, f"{way.bytes_per_s / 1e9:.1f} GB/s", used)


def timing_lines(timing: Timing, *, indent: str = "") -> list[str]:
    """Return lines on how long computing waited for copies, the rates that these reached, and device memory."""
    stalls = f"{timing.window_wait_s:.3f} s for a full window, {timing.reload_wait_s:.3f} s for reloads"
    if timing.drop_wait_s > 0:
        stalls += f", {timing.drop_wait_s:.3f} s for copies that backward overtook"
    lines = [
        row(f"{indent}compute stood still", f"{timing.stall_s:.3f} s", f"in all: {stalls}"),
    ]
    ways = ((f"{indent}rate out", timing.out), (f"{indent}rate back", timing.back))
    lines += [_rate(name, way) for name, way in ways if way.copies]
    loss_bytes = timing.loss_device_bytes
    at_loss = "" if loss_bytes is None else f", {human_bytes(loss_bytes)} at the loss"
    lines.append(row(f"{indent}device memory", human_bytes(timing.peak_device_bytes), f"at most{at_loss}"))
    rates = timing.out.bytes_per_s, timing.back.bytes_per_s
    if (cost := CostOfGib.measured(timing.computing_s, timing.saved_bytes, *rates)) is not None:
        lines.append(f"  {indent}{cost_line(cost)}")
    return lines
