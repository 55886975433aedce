"""Checking that there is a device that ``tier="host"`` serves, before any forward runs."""

import torch

from torchoffload._contexts.disabling import is_disabled
from torchoffload._core import core

__all__ = ["require_accelerator"]


def _is_there() -> bool:
    # torch counts the devices through NVML if it can. If the core asked CUDA itself, CUDA would initialize its driver:
    # a process that is forked afterwards could not use CUDA, and the count would ignore a later change of
    # CUDA_VISIBLE_DEVICES. So a CUDA build of the core is asked only if it may have a simulated device.
    if core.built_with_cuda and torch.cuda.device_count() > 0:
        return True
    is_test_build = hasattr(core, "testing")
    return (is_test_build or not core.built_with_cuda) and core.accelerator_available()


def require_accelerator(tier: str, caller: str) -> None:
    """Refuse ``tier="host"`` on a machine without an accelerator, in the name of the function that the user called.

    Only the machine counts. A model may still be on the CPU, since it can be moved to the accelerator before it runs.

    Parameters
    ----------
    tier : {"host", "disk"}
        The tier that ``caller`` was given, or its default.
    caller : str
        The name of the function or class that takes ``tier``, for the message.

    Raises
    ------
    RuntimeError
        The tier is "host", there is no accelerator, and ``TORCHOFFLOAD_DISABLE`` is not set to 1.
    """
    if tier == "host" and not is_disabled() and not _is_there():
        raise RuntimeError(
            f'torchoffload: {caller} was given tier="host", which is also the default. It moves tensors of an '
            f'accelerator, and there is none (no CUDA device). Give {caller} tier="disk" to move CPU tensors to disk.'
        )
