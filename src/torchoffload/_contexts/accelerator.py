"""Whether there is a device that ``tier="host"`` serves, asked before any forward runs."""

import torch

from torchoffload._contexts.disabling import is_disabled
from torchoffload._core import core

__all__ = ["require_accelerator"]


def _is_there() -> bool:
    # torch counts the devices through NVML where it can. If the core asked CUDA itself, CUDA would initialize its
    # driver: a process that is forked afterwards could not use CUDA, and the count would ignore a later change of
    # CUDA_VISIBLE_DEVICES. So a CUDA build of the core is asked only if it may have a simulated device.
    if core.built_with_cuda and torch.cuda.device_count() > 0:
        return True
    is_test_build = hasattr(core, "testing")
    return (is_test_build or not core.built_with_cuda) and core.accelerator_available()


def require_accelerator(tier: str, caller: str) -> None:
    """Refuse ``tier="host"`` where there is no accelerator, on behalf of the call that the user made.

    Whether a model is on the accelerator already does not matter: it may be moved there before it runs.

    Parameters
    ----------
    tier : str
        What ``caller`` was given, or its default.
    caller : str
        The function or class that takes ``tier``.

    Raises
    ------
    RuntimeError
        There is none, and ``TORCHOFFLOAD_DISABLE`` is not set.
    """
    if tier == "host" and not is_disabled() and not _is_there():
        raise RuntimeError(
            f'torchoffload: {caller} was given tier="host", or left at it, which moves tensors of an accelerator, and '
            f'there is none (no CUDA device). Give {caller} tier="disk" to move CPU tensors to disk.'
        )
