"""The blocks that a surveyed step called."""

import weakref
from collections.abc import Iterable, Mapping

from torch import nn

__all__ = ["CalledBlocks"]


class CalledBlocks:
    """The block of each call of a surveyed step, in the order of forward. The modules are held weakly.

    Parameters
    ----------
    modules : iterable of nn.Module
        The blocks.
    names : mapping of nn.Module to str
        The names of all blocks of the model.

    Attributes
    ----------
    names : tuple of str
        The name of each call's block.
    """

    def __init__(self, modules: Iterable[nn.Module], names: Mapping[nn.Module, str]) -> None:
        blocks = list(modules)
        self.names = tuple(names[module] for module in blocks)
        self._modules = [weakref.ref(module) for module in blocks]

    @property
    def modules(self) -> list[nn.Module]:
        """The block of each call. RuntimeError if one of them is gone."""
        found = [module for each in self._modules if (module := each()) is not None]
        if len(found) < len(self._modules):
            raise RuntimeError(
                "torchoffload: a block of the model that was fitted does not exist any more: remove() what fit "
                "returned, and call fit again"
            )
        return found
