"""What the examples with several processes share: a group of them, and a verdict that all agree on."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import statistics
import time
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Self

import torch
import torch.distributed as dist

import torchoffload
from _options import MIB, device_of


@contextlib.contextmanager
def process_group(arguments: argparse.Namespace) -> Iterator[torch.device]:
    """Join the processes that torchrun started: NCCL with a GPU each, or gloo on the CPU. Give this one's device."""
    if "RANK" not in os.environ:
        raise SystemExit("start this with torchrun, for example: torchrun --standalone --nproc-per-node 2 SCRIPT")
    if find_spec("numpy") is None:
        raise SystemExit("this example needs numpy, since torch.distributed does: pip install numpy")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to be deterministic
    device = device_of(arguments)
    if device.type == "cuda":
        rank, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if rank >= count:
            raise SystemExit(f"{count} GPUs for more processes: give --nproc-per-node {count}, or --tier disk")
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    is_cuda = device.type == "cuda"
    dist.init_process_group("nccl" if is_cuda else "gloo", device_id=device if is_cuda else None)
    try:
        yield device
    finally:
        dist.destroy_process_group()


class Steps:
    """Times of steps and, on CUDA, the peak of memory; what is built on first use is in the first step's time only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: list[float] = []
        self._start = 0.0
        torchoffload.reset_stats()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def __enter__(self) -> Self:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._seconds.append(time.perf_counter() - self._start)

    def __str__(self) -> str:
        stats, count = torchoffload.stats(), len(self._seconds)
        text = f"{1000 * statistics.median(self._seconds[1:] or self._seconds):6.0f} ms a step"
        text += f", {stats.bytes_offloaded / MIB / count:6.0f} MiB moved a step"
        text += f", {stats.peak_slot_bytes / MIB:5.0f} MiB away at most"
        if self._device.type == "cuda":
            text += f", {torch.cuda.max_memory_allocated(self._device) / MIB:6.0f} MiB on the GPU at most"
        return text


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """One value for all the bits of ``tensors``."""
    bits = hashlib.sha256()
    for tensor in tensors:
        bits.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return bits.hexdigest()


def gather(line: str) -> list[str]:
    """One line of each process, in the order of ranks."""
    lines: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(lines, line)
    return [each or "" for each in lines]
