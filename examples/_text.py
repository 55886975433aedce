"""Real text that every machine has: the sources of Python's own standard library, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch


def standard_library_text(limit_bytes: int) -> torch.Tensor:
    """Read the first ``limit_bytes`` of the library's ``*.py`` files, in sorted order: uint8, shape (bytes,)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "dist-packages"} & set(path.parts):
            continue
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    if not text:
        raise SystemExit(f"no *.py file under {root}: this Python was installed without its sources")
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8)


def batches(
    text: torch.Tensor, batch: int, tokens: int, seed: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield endless (input, target) pairs, int64 of shape (batch, tokens); the target is the input one byte later."""
    if len(text) <= tokens:
        raise SystemExit(f"{len(text)} bytes of text are too few for sequences of {tokens} tokens")
    generator = torch.Generator().manual_seed(seed)
    reach = torch.arange(tokens + 1)
    while True:
        starts = torch.randint(len(text) - tokens, (batch, 1), generator=generator)
        rows = text[starts + reach].long().to(device)
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
