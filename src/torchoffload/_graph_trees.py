"""Which memory PyTorch's CUDA graph trees manage by themselves (torch.compile with mode="reduce-overhead")."""

import types


def pools(trees: types.ModuleType) -> list[tuple[int, tuple[int, int]]]:
    """Device and private pool of each tree of this thread.

    Parameters
    ----------
    trees : module
        ``torch._inductor.cudagraph_trees``, whose names are PyTorch's own. Where a version has others, nothing is found,
        and PyTorch says in an error that it cannot checkpoint a block.
    """
    try:
        containers = trees.get_obj(trees.local, "tree_manager_containers")
        managers = [(device, container.tree_manager) for device, container in containers.items()]
        return [(device, tuple(manager.cuda_graphs_thread_pool)) for device, manager in managers if manager is not None]
    except AttributeError:
        return []
