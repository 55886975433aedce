"""PyTorch's CUDA allocator: segments that grow, which leave fewer pieces of memory that nothing fits into."""

import os
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["ALLOCATORS", "prepare_allocator", "stuck_bytes"]

ALLOCATORS = ("expandable", "as it is")
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")
_EXPANDABLE = "expandable_segments:True"
_IS_EXPANDABLE = "the allocator's segments are expandable"
_PROBE_BYTES = 1 << 20  # the most that PyTorch puts into a segment of small tensors, which has 2 MiB


def prepare_allocator(device: torch.device, wanted: str) -> str:
    """Turn expandable segments on, if the user has chosen nothing and nothing forbids it.

    They stay on for the life of the process: memory that is allocated in such a segment is given back as any other.

    Parameters
    ----------
    device : torch.device
        The device of the model.
    wanted : {"expandable", "as it is"}
        The choice of the user.

    Returns
    -------
    str
        The kind of the allocator's segments, and why, for people; empty if the device has no such allocator.
    """
    if device.type != "cuda":
        return ""
    if wanted == "as it is":
        return 'the allocator is as it was: allocator="as it is"'
    if _EXPANDABLE in _settings():
        return _IS_EXPANDABLE
    why = _why_not(device)
    if why is not None:
        return f"the allocator is as it was: {why}"
    if _is_expanding():  # as another fit has made it: before torch 2.13, settings of run time cannot be asked for
        return _IS_EXPANDABLE
    _set(_EXPANDABLE)
    if _makes_expandable(device):
        return _IS_EXPANDABLE
    _set("expandable_segments:False")
    return "the allocator is as it was: this platform has no expandable segments"


def stuck_bytes(device: torch.device) -> int | None:
    """Return the bytes that the allocator cannot give back to the device, though nothing is in them.

    Pages of expandable segments are given back one by one as the device runs out of memory. Another segment is given
    back only if nothing at all is in it. Segments in the pool of a CUDA graph are not given back.

    Returns
    -------
    int or None
        The bytes; None if new segments are not expandable, or if the allocator is not PyTorch's native one.
    """
    if device.type != "cuda" or torch.cuda.memory.get_allocator_backend() != "native" or _is_pluggable():
        return None
    if not _is_expanding():
        return None
    # There may be none at the moment: an emptied cache has no pages of them.
    if not any(each.get("is_expandable") for each in _segments(device)) and not _makes_expandable(device):
        return None
    return sum(int(each["total_size"] - each["allocated_size"]) for each in _segments(device) if _is_stuck(each))


def _is_stuck(segment: dict[str, Any]) -> bool:
    """Return whether the free bytes of a segment stay in it as the device runs out of memory."""
    if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
        return True
    return segment["allocated_size"] > 0 and not segment.get("is_expandable")


def _why_not(device: torch.device) -> str | None:
    """Return why the allocator is left as it is; None if it may be changed."""
    chosen = next((name for name in _VARIABLES if os.environ.get(name)), None)
    if chosen is not None:
        return f"{chosen} is set"
    if _settings():
        return f"it was set to {_settings()!r}"
    backend = torch.cuda.memory.get_allocator_backend()
    if backend != "native":
        return f"its backend is {backend!r}"
    if _is_pluggable():
        return "the program has its own"
    if torch.cuda.get_per_process_memory_fraction(device) < 1:
        return "a memory fraction is set, against which PyTorch counts more of such segments than they take"
    return None


def _is_pluggable() -> bool:
    """Return whether ``torch.cuda.memory.change_current_allocator`` was called."""
    try:
        stats: Any = torch.cuda.memory_stats_as_nested_dict()
    except RuntimeError:  # a pluggable allocator has no statistics
        return True
    return not stats and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _settings() -> str:
    """Return the allocator's settings, from run time or the environment; empty if it cannot be asked."""
    getter: Callable[[], str] | None = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    return "" if getter is None else getter()


def _set(settings: str) -> None:
    setter: Callable[[str], None] | None = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if setter is None:  # before torch 2.10
        setter = torch.cuda.memory._set_allocator_settings
    setter(settings)


def _makes_expandable(device: torch.device) -> bool:
    """Return whether a new segment is expandable, which a driver or a platform may not have.

    Small tensors are made until one needs a new segment: each segment that holds something has room for at most one of
    them. A side stream would need a new segment at once, but the first of PyTorch's side streams makes 32, which took
    70 MiB of an H200.
    """
    torch.cuda.empty_cache()
    segments = _segments(device)
    if any(each.get("is_expandable") for each in segments):  # new pages of it would not be a new segment
        return True
    known = {segment["address"] for segment in segments}
    found = False
    probes = []
    for _ in range(len(known) + 1):
        try:
            probes.append(torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=device))
        except RuntimeError:  # out of memory as well, which tells nothing
            break
        address = probes[-1].data_ptr()
        holder = next(
            (each for each in _segments(device) if each["address"] <= address < each["address"] + each["total_size"]),
            None,
        )
        if holder is None:  # the allocator caches nothing, as under PYTORCH_NO_CUDA_MEMORY_CACHING
            break
        if holder["address"] not in known:
            found = bool(holder.get("is_expandable"))
            break
    probes.clear()
    torch.cuda.empty_cache()
    return found


def _is_expanding() -> bool:
    """Return whether the allocator is set to make segments expandable, as it says itself."""
    told: dict[str, Any] = _snapshot().get("allocator_settings", {})
    return bool(told.get("expandable_segments"))


def _segments(device: torch.device) -> list[dict[str, Any]]:
    index = torch.cuda.current_device() if device.index is None else device.index
    return [each for each in _snapshot()["segments"] if each["device"] == index]


def _snapshot() -> dict[str, Any]:
    found: dict[str, Any] = torch.cuda.memory._snapshot()
    return found
