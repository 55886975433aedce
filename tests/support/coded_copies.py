"""coded_copies.py: one saved tensor that crosses the link coded, and what backward reads of it.

The same on CUDA and on the simulated device, so that a test of the GPU's kernels is known to be right before it runs
there.
"""

import contextlib
import gc
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

import torchoffload
from devices import Device

NOTHING_AHEAD = {"offload_window_bytes": 0, "reload_window_bytes": 0}
_window_bytes = itertools.count(1)


@contextlib.contextmanager
def codes_of_cuda(device: Device) -> Iterator[None]:
    """Records are coded by their dtypes, and float32 only where it is known to suit, as on CUDA without switches.

    The suite's switches are turned off, which the device's fixture turns on for each test on CUDA: one has all dtypes
    coded at once, and with the other nothing is learned, as slots are on a disk when the host would look at them.
    """
    if not device.is_simulated:
        if device.codes or os.environ.get("TORCHOFFLOAD_TEST_SPILLED") == "1":
            _testing().code_everything(False)
            _testing().spill_everything(None)
        yield
        return
    _testing().code_as_on_cuda(True)
    try:
        yield
    finally:
        _testing().code_as_on_cuda(False)


@contextlib.contextmanager
def codes_held_up() -> Iterator[None]:
    """The code of simulated devices does not get ready. Needs the test build."""
    _testing().hold_coding(True)
    try:
        yield
    finally:
        _testing().hold_coding(False)


def _testing() -> Any:
    from torchoffload._C_testing import testing

    return testing


def piece_bytes(device: Device) -> int:
    """What is coded at a time. A sixteenth of it on CUDA, and a half of it on the simulated device, is the least."""
    return 1024 if device.is_simulated else 16 << 20


def options_for(dtype: torch.dtype) -> dict[str, Any]:
    """Options under which records of this dtype are coded: float32 from the second step with these very options on.

    What is learned belongs to the windows. With windows of their own, these steps know of no others.
    """
    learns = {"learn": True, "reload_window_bytes": next(_window_bytes)} if dtype == torch.float32 else {}
    return {"compress": True, **NOTHING_AHEAD, **learns}


def saved_and_back(device: Device, values: torch.Tensor) -> torch.Tensor:
    """What backward reads of `values`, a tensor on the device, once its memory was written over.

    Where they are float32, an earlier step has saved values of the same shape that were widened from bfloat16. The
    statistics are those of the save of `values` alone.
    """
    options = options_for(values.dtype)
    if values.dtype == torch.float32:
        save_and_read(device, lambda: torch.ones_like(values), options)
    return save_and_read(device, values.clone, options)


def save_and_read(device: Device, make: Callable[[], torch.Tensor], options: dict[str, Any]) -> torch.Tensor:
    """What backward reads of the values that `make` returns, whose memory is written over if nobody else holds it."""
    gc.collect()
    torchoffload.reset_stats()
    values = make()
    weight = torch.ones_like(values, requires_grad=True)
    with device.context(**options):
        y = values * weight
    shape, dtype = values.shape, values.dtype
    del values, weight
    garbage = [torch.full(shape, float("nan"), dtype=dtype, device=device.torch_device) for _ in range(4)]
    del garbage
    saved = y.grad_fn._saved_self
    if saved is None:
        saved = y.grad_fn._saved_other
    # The host looks at a slot when its record is released, and learns nothing from bytes that have not arrived.
    if device.name == "cuda":
        torch.cuda.current_stream().synchronize()
    return saved


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    assert left.dtype == right.dtype
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def random_bits(device: Device, numel: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return bits.to(device.torch_device).view(dtype)


def of_bfloat16_bits(device: Device, bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values of these 16 bits each, as bfloat16 or widened to float32, on the device.

    By their bits, since converting would make NaNs quiet.
    """
    bits = bits.to(device.torch_device)
    return bits.view(torch.bfloat16) if dtype == torch.bfloat16 else (bits.int() << 16).view(torch.float32)
