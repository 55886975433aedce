"""Finding the blocks of a model by its structure alone: the modules that it repeats."""

from collections import Counter
from collections.abc import Iterator

from torch import nn

from torchoffload._pytorch.compiled_calls import is_compiled

__all__ = ["find_blocks", "innermost_blocks"]

_LISTS = (nn.ModuleList, nn.ModuleDict)
"""They are never called; they may be empty."""
_CONTAINERS = (*_LISTS, nn.Sequential)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules that ``model`` repeats, and those beside them, in its order; the model if it repeats none.

    Repeated are modules of the same class, with modules in them, that stand in one container; or beside each other, if
    no container has any. A block inside of a block is none. The modules beside them, such as embeddings and the
    last normalization, may have something to keep or to move as well. A module that is registered twice is there once.
    """
    return _with_the_rest(model, set(_outermost(model)))


def innermost_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the same, but blocks inside of blocks, and not those around them.

    The outermost ones may be whole stages of a hierarchical model, each of which saves nearly all that the model saves.
    """
    return _with_the_rest(model, set(_innermost(model)))


def _outermost(model: nn.Module) -> list[nn.Module]:
    return list(_repeated(model, only_containers=True)) or list(_repeated(model, only_containers=False))


def _innermost(model: nn.Module) -> Iterator[nn.Module]:
    for block in _outermost(model):
        yield from list(_innermost(block)) or [block]


def _with_the_rest(model: nn.Module, repeated: set[nn.Module]) -> list[nn.Module]:
    return list(dict.fromkeys(_beside(model, repeated))) if repeated else [model]


def _beside(module: nn.Module, repeated: set[nn.Module]) -> Iterator[nn.Module]:
    for child in _children(module):
        is_called = not isinstance(child, _LISTS)
        if is_called and (child in repeated or repeated.isdisjoint(child.modules())):
            yield child
        else:
            yield from _beside(child, repeated)


def _repeated(module: nn.Module, *, only_containers: bool) -> Iterator[nn.Module]:
    children = _children(module)
    blocks = set()
    if isinstance(module, _CONTAINERS) or not only_containers:
        counts = Counter(type(child) for child in children if _is_large(child))
        blocks = {child for child in children if _is_large(child) and counts[type(child)] > 1}
    for child in children:
        if child in blocks:
            yield child
        else:
            yield from _repeated(child, only_containers=only_containers)


def _children(module: nn.Module) -> list[nn.Module]:
    """Return the modules inside, if their calls can be seen."""
    return [] if is_compiled(module) else list(module.children())


def _is_large(module: nn.Module) -> bool:
    return not isinstance(module, _LISTS) and any(True for _ in module.children())
