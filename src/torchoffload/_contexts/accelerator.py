"""Checking that there is a device that ``tier="host"`` serves, before any forward runs."""

from torchoffload._contexts.disabling import is_disabled
from torchoffload._core import core
from torchoffload._devices import cuda_device_count, other_accelerator_is_there

__all__ = ["require_accelerator"]


def _is_there() -> bool:
    # torch counts the devices through NVML if it can. If the core asked CUDA itself, CUDA would initialize its driver:
    # a process that is forked afterwards could not use CUDA, and the count would ignore a later change of
    # CUDA_VISIBLE_DEVICES. So a CUDA build of the core is asked only if it may have a simulated device.
    if core.built_with_cuda and cuda_device_count() > 0:
        return True
    is_test_build = hasattr(core, "testing")
    if is_test_build or not core.built_with_cuda:
        return core.accelerator_available()
    return other_accelerator_is_there()


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
            f"accelerator, and there is none (PyTorch sees no CUDA device, and no accelerator of another type). Give "
            f'{caller} tier="disk" to move CPU tensors to disk.'
        )
