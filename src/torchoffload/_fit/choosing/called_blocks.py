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
    def modules(self) -> list[nn.Module | None]:
        """The block of each call; None if it does not exist any more."""
        return [each() for each in self._modules]
