"""Removing forward hooks from a module by the function that was registered, not by the handle that PyTorch returned.

A module that was copied or unpickled has copies of our hooks, but nobody has the handles to remove them with.
"""

import sys
from types import FrameType
from typing import Any

from torch import nn

__all__ = ["has_returned", "remove_forward_hooks"]


def has_returned(output: object, caller: FrameType) -> bool:
    """Return whether forward has returned, in a forward hook that is called also if it has raised.

    Such a hook is given None then, and also if forward returned None. PyTorch calls it while it handles the exception.

    Parameters
    ----------
    output : object
        The output that the hook was given.
    caller : FrameType
        The frame that called the hook.
    """
    if output is not None:
        return True
    error = sys.exception()
    return error is None or error.__traceback__ is None or error.__traceback__.tb_frame is not caller


def _remove(hooks: dict[int, Any], hook: object, *tables_of_options: dict[int, Any]) -> int:
    keys = [key for key, registered in hooks.items() if registered is hook]
    for key in keys:
        del hooks[key]
        for options in tables_of_options:
            options.pop(key, None)
    return len(keys)


def remove_forward_hooks(module: nn.Module, pre_hook: object, hook: object) -> bool:
    """Remove a forward pre-hook and a forward hook from ``module``, however often each is registered.

    Parameters
    ----------
    module : torch.nn.Module
        The module; the modules inside it are left alone.
    pre_hook, hook : callable
        The functions that were given to ``register_forward_pre_hook`` and ``register_forward_hook``.

    Returns
    -------
    bool
        Whether either of them was registered.
    """
    removed = _remove(module._forward_pre_hooks, pre_hook, module._forward_pre_hooks_with_kwargs)
    removed += _remove(
        module._forward_hooks, hook, module._forward_hooks_with_kwargs, module._forward_hooks_always_called
    )
    return removed > 0
