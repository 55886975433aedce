"""Page-locked host memory, taken the way torchoffload takes it and the way PyTorch does, each with the time it took."""

from __future__ import annotations

import mmap
import time
from dataclasses import dataclass

import torch

HUGE_PAGE_BYTES = 2 << 20
PORTABLE = 1  # cudaHostRegisterPortable


@dataclass
class Pinned:
    """Memory as a tensor of bytes. ``seconds``: how long each part of taking it took."""

    tensor: torch.Tensor
    seconds: dict[str, float]


class Registered(Pinned):
    """Mapped, in 2 MiB pages where there are any, touched by PyTorch's threads, then registered with CUDA.

    ``release()`` before the tensor goes: CUDA may not be asked any more once Python ends.
    """

    def __init__(self, nbytes: int) -> None:
        start = time.perf_counter()
        mapped = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES)
        mapped.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        first = -whole.data_ptr() % HUGE_PAGE_BYTES
        tensor = whole[first : first + nbytes]
        tensor.zero_()
        touched = time.perf_counter()
        _check("cudaHostRegister", torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), nbytes, PORTABLE))
        super().__init__(tensor, {"touch": touched - start, "register": time.perf_counter() - touched})

    def release(self) -> None:
        """Make it plain memory again. No copy may be under way."""
        _check("cudaHostUnregister", torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr()))


def pinned_by_pytorch(nbytes: int) -> Pinned:
    """Take memory from PyTorch's caching host allocator, which had none of this size."""
    start = time.perf_counter()
    tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return Pinned(tensor, {"allocate": time.perf_counter() - start})


def _check(call: str, result: object) -> None:
    cudart = torch.cuda.cudart()
    if result != cudart.cudaError.success:
        raise RuntimeError(f"{call} failed: {cudart.cudaGetErrorString(result)}")
