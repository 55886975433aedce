"""Finding the blocks of a model: the modules that it repeats."""

from collections import Counter
from collections.abc import Iterator

from torch import nn

__all__ = ["find_blocks"]

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules that ``model`` repeats, in its order; ``model`` itself if it repeats none.

    Those are modules of the same class, with modules in them, that stand in one container; or beside each other, if no
    container has any. A block inside of a block is none.
    """
    return list(_repeated(model, only_containers=True)) or list(_repeated(model, only_containers=False)) or [model]


def _repeated(module: nn.Module, *, only_containers: bool) -> Iterator[nn.Module]:
    children = list(module.children())
    blocks = set()
    if isinstance(module, _CONTAINERS) or not only_containers:
        counts = Counter(type(child) for child in children if _is_large(child))
        blocks = {child for child in children if _is_large(child) and counts[type(child)] > 1}
    for child in children:
        if child in blocks:
            yield child
        else:
            yield from _repeated(child, only_containers=only_containers)


def _is_large(module: nn.Module) -> bool:
    return not isinstance(module, _CONTAINERS[::2]) and any(True for _ in module.children())
