"""Finding the memory pools of PyTorch's CUDA graph trees, which torch.compile(mode="reduce-overhead") uses.

A graph tree reuses the memory in its pool at every replay, without telling anybody. So tensors in these pools must not
be moved, and the compiled core asks this module which pools there are.
"""

import functools
import threading
import types
from typing import Any

import torch

from torchoffload._warnings import warn_user

_NAME = "tree_manager_containers"


def pools(trees: types.ModuleType) -> list[tuple[int, tuple[int, int]]]:
    """Return the device and the private pool of each graph tree of this thread. Called by the compiled core.

    Parameters
    ----------
    trees : module
        ``torch._inductor.cudagraph_trees``. The names inside it are private to PyTorch and may change; if they did, a
        warning is given once and no pools are returned.

    Returns
    -------
    list of tuple
        For each tree, the index of its CUDA device and the two numbers that identify its pool.
    """
    try:
        managers = [(device, container.tree_manager) for device, container in _containers(trees.local).items()]
        return [(device, tuple(manager.cuda_graphs_thread_pool)) for device, manager in managers if manager is not None]
    except AttributeError as error:
        _warn_of(str(error))
        return []


def _containers(local: threading.local) -> dict[int, Any]:
    """Return the trees of this thread; on a thread of autograd's engine, those of the thread that called backward."""
    containers: dict[int, Any] = getattr(local, _NAME, {})
    if not hasattr(local, _NAME) and torch._C._is_key_in_tls(_NAME):
        containers = torch._C._get_obj_in_tls(_NAME)
    return containers


@functools.cache  # so that the warning is given once
def _warn_of(missing: str) -> None:
    warn_user(
        f"torchoffload: torch {torch.__version__} has other CUDA graph trees than are known here ({missing}). Their "
        'memory must not be moved, and cannot be recognised: compile without mode="reduce-overhead" inside a context.'
    )
