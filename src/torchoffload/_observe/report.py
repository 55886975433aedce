"""report(): the statistics as text, with advice if nothing moved and, on demand, with the tensors still alive."""

import gc
import sys
from collections import Counter
from collections.abc import Iterable

import torch
from torch.utils._pytree import tree_leaves

from torchoffload._core import core
from torchoffload._devices import accelerators_in_use, meter_for
from torchoffload._observe.idle import idle_advice
from torchoffload._observe.module_stats import module_lines
from torchoffload._observe.profile import latest_timing
from torchoffload._observe.reasons import REASONS
from torchoffload._observe.rows import disk_lines, kept_lines, moved_line, row, timing_lines
from torchoffload._observe.stats import OffloadStats, TapeStats, stats
from torchoffload._observe.units import human_bytes

__all__ = ["human_bytes", "report"]

_TAPES_SHOWN = 6
_HOLDERS_SHOWN = 5


def _pair(name: str, now: int, peak: int) -> str:
    return row(name, human_bytes(now), f"now, {human_bytes(peak)} at most")


def _loss_lines(tapes: tuple[TapeStats, ...]) -> list[str]:
    """Return the line on the memory that the latest closed tape gave up; an open tape has given up nothing yet."""
    if not tapes:
        return []
    away = next((tape.bytes_away for tape in reversed(tapes) if tape.bytes_away), 0)
    rest = "less device memory than without us, of the latest tape that gave any up"
    return [row("freed at the loss", human_bytes(away), rest)]


def _tape_lines(seen: OffloadStats) -> list[str]:
    tapes = seen.tapes
    if not tapes:
        return []
    shown = tapes[-_TAPES_SHOWN:]
    titles = ("out", "back", "joined", "kept", "freed", "waits")
    lines = [f"  {f'last {len(shown)} tapes':<22}" + "".join(f"{title:>12}" for title in titles)]
    for number, tape in enumerate(shown, start=1):
        kept_bytes = sum(tape.bytes_kept.values())
        sizes = (tape.bytes_offloaded, tape.bytes_reloaded, tape.bytes_deduplicated, kept_bytes, tape.bytes_away)
        cells = [*(human_bytes(size) for size in sizes), str(tape.window_waits)]
        is_alive = len(shown) - number < seen.live_tapes  # tapes that are alive are the last ones
        lines.append(" " * 24 + "".join(f"{cell:>12}" for cell in cells) + ("  alive" if is_alive else ""))
    return lines


def _device_lines() -> list[str]:
    """Return lines on the accelerators that were used: the figures of PyTorch's allocator, and notes on backends."""
    lines = []
    for device in accelerators_in_use():
        now_bytes, peak_bytes = meter_for(device).used_bytes()
        if peak_bytes:
            lines.append(_pair(f"memory of {device}", now_bytes, peak_bytes))
    return [*lines, *(f"  {note}" for note in core.backend_notes())]


def _advice(seen: OffloadStats) -> list[str]:
    if seen.records_offloaded:
        return []
    kept = {reason: nbytes for reason, nbytes in seen.bytes_kept.items() if seen.records_kept.get(reason)}
    if not kept:
        return ["", f"NOTHING MOVED. {idle_advice()}"]
    main = max((reason for reason in kept if reason != "parameter"), key=lambda r: kept[r], default="parameter")
    return ["", f"NOTHING MOVED, mostly because of {main!r}: {REASONS[main].meaning}. {REASONS[main].advice}"]


def _moving_bytes(tape: TapeStats) -> int:
    """Return the bytes that could have moved, whether they did or not: all but parameters."""
    return tape.bytes_offloaded + sum(nbytes for reason, nbytes in tape.bytes_kept.items() if reason != "parameter")


def _saved_at_once_lines(tapes: tuple[TapeStats, ...]) -> list[str]:
    """Return advice for a model that was compiled as a whole.

    Such a model is one operator, which saves most of the tape at once as its forward ends, and backward asks for it
    next.
    """
    closed = [tape for tape in tapes if _moving_bytes(tape)]
    if not closed:
        return []
    latest = closed[-1]
    soon_bytes = latest.bytes_kept.get("needed_soon", 0)
    if 2 * min(soon_bytes, latest.bytes_at_once) <= _moving_bytes(latest):
        return []
    return [
        "",
        f"{human_bytes(soon_bytes)} of the latest tape stay on the device: one operator saved most of it at once,",
        "as the forward of a model that is compiled as a whole does when it ends, and backward asks for it right",
        "after. Compile it as in `torch.compile(model, options=torchoffload.compile_options())`, and take the first",
        "step inside of the context: then its values move while it computes. Or compile the blocks instead, as in",
        "`for layer in model.model.layers: layer.compile()`: each one's saved values move while the others compute.",
    ]


def _holders() -> Counter[str]:
    """Count the tensors with an autograd history that Python objects hold, by dtype, shape and operator.

    Each of them keeps its whole graph alive.
    """
    found: Counter[str] = Counter()
    for each in gc.get_objects():
        # Not isinstance: that reads an attribute of the object, which makes lazily imported objects import themselves.
        if not issubclass(type(each), torch.Tensor):
            continue
        try:
            origin = each.grad_fn
            if origin is not None:
                found[f"{_kind(each.dtype, tuple(each.shape))} of {origin.name()}"] += 1
        except RuntimeError:  # autograd refuses to tell the history of some views whose base was changed in place
            continue
    return found


def _kind(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{dtype} {shape}".removeprefix("torch.")


def _on_ctx_lines() -> list[str]:
    """Return lines on the tensors that living nodes of custom Functions hold as attributes of ctx, by Function.

    They were not given to ``ctx.save_for_backward``, so no saved-tensor hooks see them.
    """
    found: dict[str, dict[int, int]] = {}
    for each in gc.get_objects():
        if not issubclass(type(each), torch.autograd.function.BackwardCFunction):
            continue
        tensors = (leaf for leaf in tree_leaves(list(vars(each).values())) if issubclass(type(leaf), torch.Tensor))
        for tensor in tensors:
            if issubclass(type(tensor), torch.nn.Parameter):
                continue
            try:
                storage = tensor.untyped_storage()
            except (RuntimeError, NotImplementedError):  # a layout without storage
                continue
            found.setdefault(type(each).__name__.removesuffix("Backward"), {})[storage._cdata] = storage.nbytes()
    if not found:
        return []
    sizes = sorted(((sum(storages.values()), name) for name, storages in found.items()), reverse=True)
    rest = "in attributes of ctx, which no hooks see; ctx.save_for_backward() lets them move"
    lines = [row("on ctx", human_bytes(sum(nbytes for nbytes, _ in sizes)), rest)]
    return lines + [f"{human_bytes(nbytes):>36} of {name}" for nbytes, name in sizes[:_HOLDERS_SHOWN]]


def _graph_lines() -> list[str]:
    """Return lines on the compiled graphs that were planned; nothing is imported for them if none was."""
    planned = sys.modules.get("torchoffload._compile.planned")
    return planned.plan_lines() if planned is not None else []


def _holder_lines() -> list[str]:
    holders = _holders()
    total = sum(holders.values())
    lines = [row("with a history", str(total), "tensors that Python objects hold, each with its graph")]
    return lines + [f"{count:>36} x {text}" for text, count in holders.most_common(_HOLDERS_SHOWN)]


def _live_save_lines() -> list[str]:
    """Return lines on the saved tensors that are alive, by dtype and shape; the kind with the oldest comes first."""
    ages_s: dict[str, list[float]] = {}
    for dtype, shape, nbytes, age_s in core.live_saves():
        if shape is None:
            kind = f"{dtype} without plain storage".removeprefix("torch.")
        else:
            kind = f"{_kind(dtype, shape)}, {human_bytes(nbytes)} each"
        ages_s.setdefault(kind, []).append(age_s)
    if not ages_s:
        return []
    kinds = sorted(ages_s.items(), key=lambda kind: max(kind[1]), reverse=True)
    total = sum(len(ages) for _, ages in kinds)
    oldest_s = max(kinds[0][1])
    lines = [row("saved tensors alive", str(total), f"of {len(kinds)} kinds, the oldest {oldest_s:.1f} s old")]
    return lines + [
        f"{len(ages):>36} x {text}, {min(ages):.1f} to {max(ages):.1f} s old" for text, ages in kinds[:_HOLDERS_SHOWN]
    ]


def format_stats(seen: OffloadStats, *, more: Iterable[str] = ()) -> str:
    """Format ``seen`` as ``report()`` does, with the lines ``more`` from other sources."""
    lines = [
        "torchoffload, since the last reset_stats():",
        moved_line("offloaded", seen.bytes_offloaded, seen.records_offloaded),
        moved_line("reloaded", seen.bytes_reloaded, seen.records_reloaded),
        moved_line("saved again, joined", seen.bytes_deduplicated, seen.records_deduplicated),
        *disk_lines(seen.bytes_spilled, seen.bytes_fetched, seen.disk_waits, seen.disk_wait_s),
        *kept_lines(seen),
        *_loss_lines(seen.tapes),
        row("waits", str(seen.window_waits), f"for a full offload window; {seen.passed_by} reloads came too early"),
        row(
            "windows, at most",
            human_bytes(seen.peak_offload_window_bytes),
            f"out, {human_bytes(seen.peak_reload_window_bytes)} back",
        ),
        _pair("slots", seen.slot_bytes, seen.peak_slot_bytes),
        _pair("pinned memory", seen.pinned_bytes, seen.peak_pinned_bytes)
        + f"; {human_bytes(seen.pinned_bytes_used)} of it in use",
        row(
            "alive",
            str(seen.live_handles),
            f"of {seen.handles} handles, {seen.live_records} records, {seen.live_slots} slots, {seen.live_tapes} tapes",
        ),
        *more,
        *_tape_lines(seen),
        *(_saved_at_once_lines(seen.tapes) or _advice(seen)),
    ]
    return "\n".join(lines)


def report(*, holders: bool = False) -> str:
    """Describe as one screen of text the records moved and kept, the reasons, the memory, and the latest tapes.

    After a ``profile()`` the text also has how long the compute stream waited for copies, the rates that the copies
    reached, and the device memory that the profile saw. ``reset_stats()`` forgets these.

    Parameters
    ----------
    holders : bool, default False
        Use it when more memory is in use than should be. It adds the saved tensors that are alive, by dtype, shape,
        bytes and age; the tensors that living graphs hold as attributes of the ctx of custom Functions, which no
        saved-tensor hooks see; and the tensors with an autograd history that Python objects hold, by dtype, shape and
        operator. An autograd graph, with everything that it saved, lives as long as any of the latter. This looks
        through all Python objects and takes a while.

    Returns
    -------
    str
        Lines of text, without a newline at the end. If nothing moved, the last line gives advice.
    """
    more = [*module_lines(), *_device_lines(), *_graph_lines()]
    if latest := latest_timing():
        tape_count, timing = latest
        more += [f"  in the latest profile(), {tape_count} tapes:", *timing_lines(timing, indent="  ")]
    if holders:
        more += [*_live_save_lines(), *_on_ctx_lines(), *_holder_lines()]
    return format_stats(stats(), more=more)
