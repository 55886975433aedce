"""Changes of a dry run outside of the model, put back."""

import contextlib
import random
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["undone"]


@contextlib.contextmanager
def undone(model: nn.Module) -> Iterator[None]:
    """Put back the changes of a forward outside of a model."""
    devices = {each.device for each in [*model.parameters(), *model.buffers()]}
    modules = [(each, torch.get_device_module(each.type)) for each in devices if each.type not in ("cpu", "meta")]
    drawing = [(each, module) for each, module in modules if hasattr(module, "get_rng_state")]
    states = [(each, module, module.get_rng_state(each)) for each, module in drawing]
    state, python_state = torch.get_rng_state(), random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    is_cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with warnings.catch_warnings(), _not_taken_for_a_trace():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_autocast_cache_enabled(is_cached)
        torch.set_rng_state(state)
        for device, module, device_state in states:
            # Setting it has cuDNN's recurrent layers draw a new dropout state at their next call.
            if not torch.equal(module.get_rng_state(device), device_state):
                module.set_rng_state(device_state, device)
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


@contextlib.contextmanager
def _not_taken_for_a_trace() -> Iterator[None]:
    """Have transformers compute on this thread as it does with data.

    It takes fake tensors for a trace, and then makes a mask instead of calling a causal kernel
    (``transformers.utils.import_utils.is_tracing``).
    """
    module: Any = sys.modules.get("transformers.utils.import_utils")
    real = getattr(module, "is_fake_tensor", None)
    if real is None:
        yield
        return
    thread = threading.get_ident()
    module.is_fake_tensor = lambda tensor: threading.get_ident() != thread and real(tensor)
    try:
        yield
    finally:
        module.is_fake_tensor = real
