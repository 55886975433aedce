"""The modules that steps begin with."""

import weakref

from torch import nn

from torchoffload._fit.model.clock import Opener

__all__ = ["Openers"]


class Openers:
    """Finds out which module a step begins with, while modules are entered one inside of the other.

    The *opener* of a step is the innermost module around its first block: if a loop calls networks in turns, by
    themselves or by way of one module (``model(x, "critic")``), it tells the steps apart. Before the first block is
    called, the opener may not be certain: a module that is around known openers may call any of them. Until then it is
    taken for the one that the same call had before.

    Attributes
    ----------
    known : list of weakref.ref of nn.Module
        The openers of the steps that were surveyed.
    is_sure : bool
        Whether the opener of the latest step is certain.
    """

    def __init__(self) -> None:
        self.known: list[Opener] = []
        self.is_sure = False
        self._outer: Opener = None  # the module that the loop has called
        self._innermost: Opener = None  # that was entered
        self._latest: dict[Opener, Opener] = {}  # by the module that the loop calls
        self._inside: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()

    def take_blocks(self) -> None:
        """Take notice of other blocks, in other modules maybe."""
        self.known = [each for each in self.known if each is None or each() is not None]
        self.is_sure = False
        self._latest.clear()
        self._inside.clear()

    def call_begins(self, module: Opener) -> Opener:
        """Take notice of a call by the loop. Returns the opener if it begins a step; None if nothing tells of it."""
        self._outer = module
        return self.enters(module) or self._latest.get(module)

    def enters(self, module: Opener) -> Opener:
        """Take notice of a module that is entered before the first block. Returns the opener, if this tells of it."""
        self._innermost = module
        if not self.known:
            self.is_sure = False
            return module
        self.is_sure = module in self.known or not self._is_around(module)
        if not self.is_sure:
            return None
        self._latest[self._outer] = module
        return module

    def block_begins(self) -> Opener:
        """Take notice of the first block. Returns the opener."""
        self.is_sure = True
        self._latest[self._outer] = self._innermost
        return self._innermost

    def _is_around(self, opener: Opener) -> bool:
        module = None if opener is None else opener()
        if module is None:
            return False
        inside = self._inside.get(module)
        if inside is None:
            inside = self._inside[module] = weakref.WeakSet(module.modules())
        known = (None if each is None else each() for each in self.known)
        return any(each is not None and each in inside for each in known)
