"""What tests of fit begin with on CUDA: no memory of the tests before them."""

import gc

import pytest
import torch


@pytest.fixture(autouse=True)
def _nothing_is_left_on_the_device():
    """Free what other tests have left there: cuBLAS keeps 32 MiB for each stream, which is more than these models take.

    Their budgets are a few KiB apart. Beside what is left over, the whole segments that PyTorch's allocator reserves
    exceed such a budget by a little, and fit plans for less again and again.
    """
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
