"""What a selective checkpoint saved of each call of an operator, until the recomputation comes to that call."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._pytree import tree_leaves, tree_map

from torchoffload._core import core
from torchoffload._pytorch.tensor_subclasses import plain_tensors
from torchoffload._pytorch.user_code import saves_for_user_code

__all__ = ["RECOMPUTED", "Cache", "Kept", "Mark", "PackHook", "Packed", "Saved", "is_made_of", "key_of", "storages"]

PackHook = Callable[[torch.Tensor], object]

# The words of torch.utils.checkpoint, which a program may look for.
_MUTATED = "Tensor cached during selective activation checkpoint has been mutated"
_EXTRA_TIME = (
    "Trying to backward an extra time. You are only allowed to backward once on any region computed under selective "
    "activation checkpoint."
)
_MISMATCH = (
    "This can happen if the operations in the checkpointed region are nondeterministic or depend on global state that "
    "changed between forward and backward."
)

# Before, a recomputation could call what its forward had not, as long as none of it was saved.
_COUNTS_ALL = hasattr(torch_checkpoint, "_RECOMPUTE")


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Detached, with the tensor's own version counter, as autograd's kernels below which a mode runs would not make it.

    Detached, since the tensor becomes part of the graph that holds the cache once its operator has returned.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class Kept:
    """A tensor that stays, and the version that it has to have."""

    def __init__(self, tensor: torch.Tensor, may_change: bool) -> None:
        self._tensor = _alias(tensor)
        self._version = None if may_change else self._tensor._version

    def get(self) -> torch.Tensor:
        if self._version is not None and self._tensor._version != self._version:
            raise RuntimeError(_MUTATED)
        return self._tensor


class Packed:
    """A tensor that a context took."""

    @saves_for_user_code  # which what is computed again calls with it
    def __init__(self, tensor: torch.Tensor, pack: PackHook) -> None:
        self._handle = pack(_alias(tensor))
        self._held: torch.Tensor | None = None

    def hold(self) -> None:
        """Have it here until it is asked for; an error is for then."""
        with contextlib.suppress(RuntimeError):
            self._held = core.unpack(self._handle)

    def let_go(self) -> None:
        self._held = None

    def get(self) -> torch.Tensor:
        try:
            return core.unpack(self._handle)  # what is held is given again, and its version is looked at anew
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise RuntimeError(_MUTATED) from error
        finally:
            self._held = None


def storages(value: Any) -> Iterator[int]:
    """What tells apart the storages of all tensors in ``value``."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            for plain in plain_tensors(leaf):
                if plain.layout is torch.strided and not plain.is_quantized:
                    yield plain.untyped_storage()._cdata


def is_made_of(output: Any, arguments: Any) -> bool:
    """Whether all tensors of ``output`` are on the memory of ``arguments``."""
    shared = set(storages(output))
    return bool(shared) and shared <= set(storages(arguments))


@dataclass(frozen=True)
class Saved:
    """What one call of an operator returned, with a Kept or a Packed for each tensor."""

    output: Any

    def packed(self) -> list[Packed]:
        return [each for each in tree_leaves(self.output) if isinstance(each, Packed)]

    def restore(self) -> Any:
        return tree_map(lambda each: each.get() if isinstance(each, (Kept, Packed)) else each, self.output)


class Mark:
    """An entry of the cache that holds nothing."""


RECOMPUTED = Mark()
_CONSUMED = Mark()


def key_of(operator: Any, arguments: tuple[Any, ...]) -> Any:
    """What calls are counted by: the operator, and for one that runs a graph that graph, too."""
    if not isinstance(operator, torch._ops.HigherOrderOperator) or not arguments:
        return operator
    graph = arguments[0]
    return operator, graph if isinstance(graph, int) else getattr(graph, "idx", None)


class Cache:
    """What was saved of each call, by operator and by how many calls of it came before."""

    def __init__(self) -> None:
        self.entries: defaultdict[Any, list[Saved | Mark]] = defaultdict(list)
        self._packed: list[Packed] = []  # in the order of forward, until a recomputation has held them

    def add(self, key: Any, entry: Saved | Mark) -> None:
        self.entries[key].append(entry)
        if isinstance(entry, Saved):
            self._packed += entry.packed()

    def hold_all(self) -> None:
        """Ask for all that was packed in the order of reloads, the last first. It will all be here in the end."""
        for packed in reversed(self._packed):
            packed.hold()

    def let_go(self) -> None:
        for packed in self._packed:
            packed.let_go()
        self._packed.clear()

    def take(self, operator: Any, key: Any, index: int) -> Saved | None:
        """Return the entry, which is then consumed; None for a call that is computed again."""
        calls = self.entries.get(key, [])
        if index >= len(calls):
            if not _COUNTS_ALL and all(entry is RECOMPUTED for entry in calls):
                return None
            where = f"invocation index {index} " if calls else ""
            raise RuntimeError(f"{operator} {where}encountered during backward but not found in storage. {_MISMATCH}")
        entry = calls[index]
        if entry is _CONSUMED:
            raise RuntimeError(_EXTRA_TIME)
        if not isinstance(entry, Saved):
            return None
        calls[index] = _CONSUMED
        return entry
