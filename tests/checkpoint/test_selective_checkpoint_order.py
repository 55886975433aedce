"""selective_checkpoint_context_fn: each entry comes back once, though a block is computed again from its beginning."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from devices import Device
from gradients import Run, assert_same_gradients
from selective import NBYTES, PRODUCTS, selective

PRODUCTS_OF_A_BLOCK, BLOCKS = 6, 4


def products(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    for _ in range(PRODUCTS_OF_A_BLOCK):
        x = (x @ weight).tanh()
    return x


@pytest.mark.parametrize("window", [1, 2, 3, PRODUCTS_OF_A_BLOCK])
def test_each_is_reloaded_once_however_small_the_window(device_under_test: Device, window: int):
    def program(run: Run) -> Any:
        windows = {"offload_window_bytes": window * NBYTES, "reload_window_bytes": window * NBYTES}
        x, weight = run.leaf(32, 32), run.parameter(32, 32)
        context_fn = selective(run, PRODUCTS)
        with run.offload(**windows):
            y = x.exp()
            for _ in range(BLOCKS):
                y = checkpoint(products, y, weight, use_reentrant=False, context_fn=context_fn)
            loss = y.sum()
        loss.backward()
        return x.grad, weight.grad

    stats = assert_same_gradients(program, device=device_under_test)
    assert stats.records_offloaded >= PRODUCTS_OF_A_BLOCK * BLOCKS
    assert stats.passed_by == 0
    assert stats.records_reloaded <= stats.records_offloaded
