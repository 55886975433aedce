"""report(): the statistics on one screen, what to change when nothing moved, and on demand what is still alive."""

import gc
from collections import Counter

import torch

from torchoffload._stats import OffloadStats, stats

__all__ = ["human_bytes", "report"]

_TAPES_SHOWN = 6
_HOLDERS_SHOWN = 5

_REASONS = {
    "parameter": "parameters, views on them, and buffers of the context's model",
    "small": "smaller than min_offload_size",
    "device": "on a device that this tier does not serve",
    "layout": "without plain storage (sparse and other layouts)",
    "marked": "marked by never_offload()",
    "in_backward": "saved while backward ran",
    "host_full": "host_budget_bytes or the disk was used up",
    "resized": "storage resized before or under its copy (FSDP2, compiled graphs)",
    "write_failed": "the write to disk_dir failed",
    "capturing": "a CUDA graph was being captured",
    "borrowed": "in memory that the tensor does not own (CUDA graphs of torch.compile)",
    "pending": "asked for before the copy was enqueued: backward began right after",
}

# What to change when a reason kept everything.
_ADVICE = {
    "parameter": "Only parameters and buffers were saved. Enter the context around forward, with gradients enabled.",
    "small": "Set min_offload_size lower, or use larger batches.",
    "device": 'The host tier serves CUDA tensors, tier="disk" CPU tensors: move the model, or change tier.',
    "layout": "Tensors of these layouts have no plain storage to move; there is nothing to change.",
    "marked": "Take the never_offload() calls on these tensors out.",
    "in_backward": "Forward ran outside the context: enter it around forward as well.",
    "host_full": 'Raise host_budget_bytes, see host_memory(); or under tier="disk" free space in disk_dir.',
    "resized": "Something resizes these storages before they can be copied: enter the context inside it.",
    "write_failed": "See the warning for the reason, and set disk_dir to a directory with free space.",
    "capturing": "Work that is captured into a CUDA graph is not offloaded; there is nothing to change.",
    "borrowed": 'Memory of CUDA graphs stays: compile without mode="reduce-overhead" to have it moved.',
    "pending": "Leave the context before backward, so that the last copies are enqueued.",
}
_NOTHING_SAVED = (
    "Nothing was saved inside a context. Enter OffloadActivations around forward, with gradients enabled and "
    "TORCHOFFLOAD_DISABLE not set."
)


def human_bytes(count: int) -> str:
    """``count`` bytes in the largest binary unit that leaves a number of at least 1, such as ``"1.5 GiB"``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _moved(name: str, nbytes: int, records: int) -> str:
    return f"  {name:<22}{human_bytes(nbytes):>12} in {records} records"


def _pair(name: str, now: int, peak: int) -> str:
    return f"  {name:<22}{human_bytes(now):>12} now, {human_bytes(peak)} at most"


def _kept_lines(seen: OffloadStats) -> list[str]:
    by_bytes = sorted(seen.records_kept, key=lambda reason: seen.bytes_kept.get(reason, 0), reverse=True)
    lines = []
    for reason in by_bytes:
        records, nbytes = seen.records_kept[reason], seen.bytes_kept.get(reason, 0)
        if records:
            lines.append(f"{_moved(f'kept: {reason}', nbytes, records)}; {_REASONS.get(reason, reason)}")
    return lines


def _tape_lines(seen: OffloadStats) -> list[str]:
    tapes = seen.tapes
    if not tapes:
        return []
    shown = tapes[-_TAPES_SHOWN:]
    titles = ("out", "back", "joined", "kept", "waits")
    lines = [f"  {f'last {len(shown)} tapes':<22}" + "".join(f"{title:>12}" for title in titles)]
    for number, tape in enumerate(shown, start=1):
        sizes = (tape.bytes_offloaded, tape.bytes_reloaded, tape.bytes_deduplicated, sum(tape.bytes_kept.values()))
        cells = [*(human_bytes(size) for size in sizes), str(tape.window_waits)]
        is_alive = len(shown) - number < seen.live_tapes  # those that are stand last
        lines.append(" " * 24 + "".join(f"{cell:>12}" for cell in cells) + ("  alive" if is_alive else ""))
    return lines


def _advice(seen: OffloadStats) -> list[str]:
    if seen.records_offloaded:
        return []
    kept = {reason: nbytes for reason, nbytes in seen.bytes_kept.items() if seen.records_kept.get(reason)}
    if not kept:
        return ["", f"NOTHING MOVED. {_NOTHING_SAVED}"]
    main = max((reason for reason in kept if reason != "parameter"), key=lambda r: kept[r], default="parameter")
    advice = _ADVICE.get(main, "")
    return ["", f"NOTHING MOVED, mostly because of {main!r}: {_REASONS.get(main, main)}. {advice}".rstrip()]


def _holders() -> Counter[str]:
    """Count the tensors with a history that Python holds, alike ones together: each keeps its whole graph."""
    found: Counter[str] = Counter()
    for each in gc.get_objects():
        if not issubclass(type(each), torch.Tensor):  # not isinstance: that asks the object, and lazy ones wake up
            continue
        try:
            origin = each.grad_fn
            if origin is not None:
                found[f"{each.dtype} {tuple(each.shape)} of {origin.name()}".removeprefix("torch.")] += 1
        except RuntimeError:  # a view that may not be asked any more
            continue
    return found


def _holder_lines(holders: Counter[str]) -> list[str]:
    total = sum(holders.values())
    lines = [f"  {'with a history':<22}{total:>12} tensors that Python objects hold, each with its graph"]
    lines += [f"{count:>36} x {text}" for text, count in holders.most_common(_HOLDERS_SHOWN)]
    return lines


def format_stats(seen: OffloadStats, holders: Counter[str] | None = None) -> str:
    """``seen`` as the text that ``report()`` returns."""
    lines = [
        "torchoffload, since the last reset_stats():",
        _moved("offloaded", seen.bytes_offloaded, seen.records_offloaded),
        _moved("reloaded", seen.bytes_reloaded, seen.records_reloaded),
        _moved("saved again, joined", seen.bytes_deduplicated, seen.records_deduplicated),
        *_kept_lines(seen),
        f"  {'waits':<22}{seen.window_waits:>12} for a full offload window; {seen.passed_by} reloads came too early",
        f"  {'windows, at most':<22}{human_bytes(seen.peak_offload_window_bytes):>12} out, "
        f"{human_bytes(seen.peak_reload_window_bytes)} back",
        _pair("slots", seen.slot_bytes, seen.peak_slot_bytes),
        _pair("pinned memory", seen.pinned_bytes, seen.peak_pinned_bytes),
        f"  {'alive':<22}{seen.live_handles:>12} of {seen.handles} handles, {seen.live_records} records, "
        f"{seen.live_slots} slots, {seen.live_tapes} tapes",
        *(_holder_lines(holders) if holders is not None else ()),
        *_tape_lines(seen),
        *_advice(seen),
    ]
    return "\n".join(lines)


def report(*, holders: bool = False) -> str:
    """One screen of text on what moved, what was kept and why, the latest tapes, and what is alive.

    Parameters
    ----------
    holders : bool
        Tell also which tensors with a history Python objects hold, by dtype, shape and operator, for when more is alive
        than should be: a graph lives as long as any of them. Looks through all objects, and takes a while.

    Returns
    -------
    str
        Lines without a trailing newline. When nothing moved, the last one says what to change.
    """
    return format_stats(stats(), _holders() if holders else None)
