"""Which memory PyTorch's CUDA graph trees manage by themselves (torch.compile with mode="reduce-overhead")."""

import functools
import threading
import types
from typing import Any

import torch

from torchoffload._warnings import warn_user

_NAME = "tree_manager_containers"


def pools(trees: types.ModuleType) -> list[tuple[int, tuple[int, int]]]:
    """Device and private pool of each tree of this thread.

    Parameters
    ----------
    trees : module
        ``torch._inductor.cudagraph_trees``, whose names are PyTorch's own and may change. A version that has others is
        warned of once.
    """
    try:
        managers = [(device, container.tree_manager) for device, container in _containers(trees.local).items()]
        return [(device, tuple(manager.cuda_graphs_thread_pool)) for device, manager in managers if manager is not None]
    except AttributeError as error:
        _warn_of(str(error))
        return []


def _containers(local: threading.local) -> dict[int, Any]:
    """Of this thread, or, on a thread of autograd's, of the one that called backward."""
    containers: dict[int, Any] = getattr(local, _NAME, {})
    if not hasattr(local, _NAME) and torch._C._is_key_in_tls(_NAME):
        containers = torch._C._get_obj_in_tls(_NAME)
    return containers


@functools.cache  # once
def _warn_of(missing: str) -> None:
    warn_user(
        f"torchoffload: torch {torch.__version__} has other CUDA graph trees than are known here ({missing}). What "
        'they save must stay, and is not recognised: compile without mode="reduce-overhead" inside a context.'
    )
