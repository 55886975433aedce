"""The blocks of a fitted model as they follow a plan: which of them compute again, and which of them move."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from torchoffload._contexts.offload_activations import OffloadActivations
from torchoffload._contexts.options import OffloadOptions
from torchoffload._core import core
from torchoffload._fit.block.blocks import unplan_block, watch_block
from torchoffload._fit.block.replay import Watch
from torchoffload._modules.hooks import Offloading, Turn
from torchoffload._modules.offload_modules import OffloadedModules, install_offloading
from torchoffload._modules.selection import Chosen, choose

__all__ = ["BlockWindows", "Following"]


class BlockWindows(NamedTuple):
    """The windows of one block, in bytes.

    Attributes
    ----------
    offload_bytes : int
        The offload window while its forward runs.
    after_bytes : int
        The offload window from its end to the beginning of the next block, or at the loss.
    reload_bytes : int
        The reload window while its backward runs.
    """

    offload_bytes: int
    after_bytes: int
    reload_bytes: int


class Following:
    """The blocks of a model, their names, and the contexts under which they move.

    Parameters
    ----------
    model, chosen : nn.Module, list of Chosen
        The model, and its blocks in the order of ``model.named_modules()``.
    may_move : bool
        Whether anything may move.
    options : OffloadOptions
        The options of the contexts that move.

    Attributes
    ----------
    names : mapping of nn.Module to str
        The names of the blocks.
    all_names : tuple of str
        The names of all blocks, also of those that do not exist any more.
    """

    def __init__(self, model: nn.Module, chosen: list[Chosen], *, may_move: bool, options: OffloadOptions) -> None:
        # Held weakly: an object that a model's hooks hold must not hold the model.
        self.names = weakref.WeakKeyDictionary({each.module: each.name for each in chosen})
        self.all_names = tuple(self.names.values())
        self._modules_then = weakref.WeakSet(model.modules())
        self._numbers = weakref.WeakKeyDictionary({each.module: number for number, each in enumerate(chosen, start=1)})
        self._model = weakref.ref(model)
        self._keywords = options.as_keywords()
        self._handle: OffloadedModules | None = None
        if may_move and chosen:
            modules = choose(model, list(self.names))
            manager = OffloadActivations(model=model, **self._keywords)
            self._handle = install_offloading(model, modules, Offloading(model, modules, manager, is_of_fit=True))

    @property
    def gone(self) -> tuple[str, ...]:
        """The names of the blocks that do not exist any more."""
        if len(self.names) == len(self.all_names):
            return ()
        left = set(self.names.values())
        return tuple(name for name in self.all_names if name not in left)

    def was_in_model(self, module: nn.Module) -> bool:
        """Return whether the model had a module as the blocks were taken."""
        return module in self._modules_then

    def missing(self, model: nn.Module) -> list[nn.Module]:
        """Return the blocks that exist, and that the model does not have any more."""
        inside = set(model.modules())
        return [each for each in self.names if each not in inside]

    def leave(self, blocks: Iterable[nn.Module]) -> None:
        """Leave blocks alone from now on, as if they did not exist any more."""
        for block in blocks:
            unplan_block(block)
            del self.names[block]

    def follow(
        self,
        blocks: Mapping[nn.Module, Callable[[nn.Module, Any], Watch]],
        moving: Mapping[nn.Module, Sequence[bool]],
        window_bytes: int,
        windows: Mapping[nn.Module, Sequence[BlockWindows]] | None = None,
        *,
        repeats: bool = True,
    ) -> None:
        """Change the plans of the blocks from the next call of the model on.

        Parameters
        ----------
        blocks : mapping
            The watch of each call of a block, for those that compute something again or are watched.
        moving : mapping of nn.Module to sequence of bool
            For each block, whether anything of its calls moves, in the order of the calls of a step.
        window_bytes : int
            The size of either window, if blocks have none of their own.
        windows : mapping of nn.Module to sequence of BlockWindows, optional
            The windows of each call of each block.
        repeats : bool
            Whether calls behind the last one begin with the first one's again. Else they have those of the last one.
        """
        if self._handle is not None:
            # Blocks with windows of their own follow a plan, which has no room for tensors that would stay because of
            # the learned rates: a context whose windows have 0 bytes keeps none of these.
            size = 0 if windows else window_bytes
            options = self._keywords | {"offload_window_bytes": size, "reload_window_bytes": size}
            manager = OffloadActivations(model=self._model(), **options)
            turns: dict[int, list[Turn]] = {}
            numbers = self._numbers
            if windows:
                all_windows = [each for calls in windows.values() for each in calls]
                anywhere = BlockWindows(*map(min, zip(*all_windows, strict=True)))
                first = [anywhere] * (1 + len(self.all_names))  # those of each block's first call, by its number
                for module, calls in windows.items():
                    first[numbers[module]] = calls[0]
                    each = [Turn(*turn) for turn in zip(moving.get(module, [False] * len(calls)), calls, strict=True)]
                    if len(set(each)) > 1:
                        turns[numbers[module]] = each
                core.set_module_windows(manager._context, first)
            self._handle._offloading.change(
                manager, [numbers[module] for module, moves in moving.items() if any(moves)], turns, repeats=repeats
            )
        for module in set(self.names) - set(blocks):
            unplan_block(module)
        for module, watch in blocks.items():
            watch_block(module, watch)

    def reset_turns(self, called: Mapping[nn.Module, int] | None = None) -> None:
        """Begin with the first call of each block again: a step begins. ``called``: the calls that it had already."""
        if self._handle is not None:
            counts = {self._numbers[each]: count for each, count in (called or {}).items()}
            self._handle._offloading.reset_turns(counts)

    def remove(self) -> None:
        """Take all hooks away."""
        for module in self.names:
            unplan_block(module)
        if self._handle is not None:
            self._handle.remove()
