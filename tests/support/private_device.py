"""private_device.py: the simulated devices as PyTorch's own devices "privateuseone:0" and "privateuseone:1".

Their tensors are made as on any device of PyTorch's: ``torch.ones(3, device="privateuseone")``. Copies run late, and a
missing wait shows in the values or raises, as in ``simulated.py``.
"""

import contextlib
import sys
import types
from collections.abc import Iterator

import torch

from simulated import Simulation
from torchoffload import _C_testing

_control = _C_testing.testing

NAME = "privateuseone"
_running = 0  # simulations


def register() -> None:
    """Make the devices known to PyTorch. Call it before the first backward of the process."""
    if hasattr(torch, NAME):
        return
    _control.register_private_devices()
    module = types.ModuleType(f"torch.{NAME}")
    module.is_available = lambda: _running > 0  # type: ignore[attr-defined]
    module.device_count = lambda: _control.private_device_count  # type: ignore[attr-defined]
    module.current_device = _control.current_device  # type: ignore[attr-defined]
    module._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]  # type: ignore[attr-defined]
    # Random operators run on the CPU, with its generator, so there is no state beside the CPU's.
    module.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]
    module.get_rng_state = lambda device=None: torch.get_rng_state()  # type: ignore[attr-defined]
    module.set_rng_state = lambda state, device=None: None  # type: ignore[attr-defined]
    torch._register_device_module(NAME, module)
    assert f"torch.{NAME}" in sys.modules


@contextlib.contextmanager
def private_devices(mode: str = "late", seed: int = 0) -> Iterator[Simulation]:
    """Run a simulation of these devices; see ``simulated_device``."""
    global _running
    register()
    # Autograd orders the streams of the one accelerator that PyTorch has. From here on it is this one.
    torch.utils.rename_privateuse1_backend(NAME)
    _control.start_private_simulation(mode, seed)
    simulation = Simulation(_control.private_device_count)
    _running += 1
    try:
        yield simulation
    finally:
        _running -= 1
        _control.stop_private_simulation()
    simulation.check()
