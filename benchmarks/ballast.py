"""Takes memory of the device away from PyTorch, so that it finds as much as on a smaller device.

``torch.cuda.set_per_process_memory_fraction`` does not do that: where segments are expandable, PyTorch holds the whole
of a request against that limit, though a part of it may lie in memory that it has reserved already. So it gives back
what it caches more often than on a device of that size.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

__all__ = ["Ballast"]

_STEP_BYTES = 16 << 20  # what is left besides, for kernels that are loaded later
_MOST_STEPS = 16  # the device may not have all that it calls free


class Ballast:
    """Memory of the current device that nobody uses."""

    def __init__(self) -> None:
        self._address = ctypes.c_void_p()

    def leave(self, nbytes: float | None) -> None:
        """Take so much that ``nbytes`` and a little are left for PyTorch, with what it uses; None: give all back.

        RuntimeError if the device has less.
        """
        runtime = _runtime()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        if self._address:
            _check(runtime.cudaFree(self._address))
            self._address = ctypes.c_void_p()
        if nbytes is None:
            return
        free, _ = torch.cuda.mem_get_info()
        others = free + torch.cuda.memory_reserved() - nbytes
        if others < 0:
            raise RuntimeError(f"the device has {-others / 2**30:.1f} GiB less than {nbytes / 2**30:.1f} GiB")
        taken = int(others) - _STEP_BYTES
        for _ in range(_MOST_STEPS):
            if taken <= 0 or runtime.cudaMalloc(ctypes.byref(self._address), ctypes.c_size_t(taken)) == 0:
                return
            runtime.cudaGetLastError()  # else PyTorch's next call would report it
            taken -= _STEP_BYTES
        raise RuntimeError(f"no ballast of {taken / 2**30:.1f} GiB can be taken")


def _check(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"the CUDA runtime returned {status}")


def _runtime() -> ctypes.CDLL:
    """Return the CUDA runtime that PyTorch has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if "libcudart" in path:
            return ctypes.CDLL(f"/{path}")
    raise RuntimeError("PyTorch has loaded no library of the CUDA runtime")
