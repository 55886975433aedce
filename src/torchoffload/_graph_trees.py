"""Which memory PyTorch's CUDA graph trees manage by themselves (torch.compile with mode="reduce-overhead")."""

import functools
import types

import torch

from torchoffload._warnings import warn_user


def pools(trees: types.ModuleType) -> list[tuple[int, tuple[int, int]]]:
    """Device and private pool of each tree of this thread.

    Parameters
    ----------
    trees : module
        ``torch._inductor.cudagraph_trees``, whose names are PyTorch's own and may change. A version that has others is
        warned of once.
    """
    try:
        containers = trees.get_obj(trees.local, "tree_manager_containers")
        managers = [(device, container.tree_manager) for device, container in containers.items()]
        return [(device, tuple(manager.cuda_graphs_thread_pool)) for device, manager in managers if manager is not None]
    except AttributeError as error:
        _warn_of(str(error))
        return []


@functools.cache  # once
def _warn_of(missing: str) -> None:
    warn_user(
        f"torchoffload: torch {torch.__version__} has other CUDA graph trees than are known here ({missing}). What "
        'they save must stay, and is not recognised: compile without mode="reduce-overhead" inside a context.'
    )
