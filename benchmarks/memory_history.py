"""memory_history.py: what held a device's memory when an allocation failed.

``record()`` has PyTorch note where each block of memory was allocated, and writes the largest holders to a file at each
failed allocation. It costs some time in every allocation, so times that are measured meanwhile say little.
"""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import torch

GIB = 1 << 30
FRAMES = 14
HOLDERS = 25


def record(out: Path) -> None:
    """From here on append the holders of memory to `out` whenever an allocation fails, also one that is tried again."""
    torch.cuda.memory._record_memory_history("state", stacks="python", max_entries=1)

    def failed(device: int, nbytes: int, _device_total: int, _device_free: int) -> None:
        with out.open("a") as file:
            file.write(f"=== {nbytes / GIB:.3f} GiB could not be had on device {device}\n{holders(device)}\n")

    torch._C._cuda_attach_out_of_memory_observer(failed)


def holders(device: int) -> str:
    """Return what is allocated now, by the program's lines that allocated it, the largest first."""
    free, total = torch.cuda.mem_get_info(device)
    sizes: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    by_state: collections.Counter[str] = collections.Counter()
    gaps: list[int] = []
    for segment in torch.cuda.memory._snapshot(device)["segments"]:
        for block in segment["blocks"]:
            by_state[block["state"]] += block["size"]
            if block["state"] == "inactive":
                gaps.append(block["size"])
                continue
            place = _place(block.get("frames", []))
            sizes[place] += block["size"]
            counts[place] += 1
    largest = sorted(gaps, reverse=True)[:8]
    lines = [
        f"free on the device {free / GIB:.3f} of {total / GIB:.1f} GiB; allocated "
        f"{torch.cuda.memory_allocated(device) / GIB:.3f}, reserved {torch.cuda.memory_reserved(device) / GIB:.3f}",
        "by state: " + ", ".join(f"{state} {size / GIB:.3f}" for state, size in by_state.items()),
        f"largest gaps, MiB: {[round(size / 2**20, 1) for size in largest]}",
    ]
    for place, size in sizes.most_common(HOLDERS):
        lines.append(f"{size / GIB:7.3f} GiB in {counts[place]} blocks: {place}")
    return "\n".join(lines)


def _place(frames: list[dict[str, Any]]) -> str:
    return " < ".join(f"{Path(each['filename']).name}:{each['line']} {each['name']}" for each in frames[:FRAMES])
