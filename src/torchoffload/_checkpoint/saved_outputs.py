"""The outputs of operators that a selective checkpoint saved in forward, until the recomputation asks for them.

An output is identified by its operator and by how many calls of that operator came before.
"""

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

__all__ = [
    "RECOMPUTED",
    "Cache",
    "Kept",
    "Mark",
    "PackHook",
    "Packed",
    "Saved",
    "is_made_of",
    "key_of",
    "storages",
]

PackHook = Callable[[torch.Tensor], object]

# These are the texts of torch.utils.checkpoint, which a program may look for.
_MUTATED = "Tensor cached during selective activation checkpoint has been mutated"
_EXTRA_TIME = (
    "Trying to backward an extra time. You are only allowed to backward once on any region computed under selective "
    "activation checkpoint."
)
_MISMATCH = (
    "This can happen if the operations in the checkpointed region are nondeterministic or depend on global state that "
    "changed between forward and backward."
)

# The namespaces of operators whose outputs have their values on the current stream once the operator has returned.
_FILLED_ON_RETURN = frozenset(("aten", "prims"))

# Whether this version of torch also counts calls that are not saved. Without that, the recomputation may call an
# operator more often than forward did, as long as no call of it was saved.
_COUNTS_ALL = hasattr(torch_checkpoint, "_RECOMPUTE")


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` detached, with the version counter that it has.

    It is detached because the tensor becomes part of the autograd graph that holds the cache, once its operator has
    returned. A dispatch mode runs below autograd's kernels. There detach() would give the result a version counter of
    its own, and a later write to the tensor would not be noticed. The guard includes the kernel that shares the
    counter.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class Kept:
    """A tensor that stays on the device.

    Parameters
    ----------
    tensor : torch.Tensor
        The output of an operator.
    may_change : bool
        Whether the tensor may be written to afterwards. If not, ``get`` checks its version.
    """

    def __init__(self, tensor: torch.Tensor, may_change: bool) -> None:
        self._tensor = alias(tensor)
        self._version = None if may_change else self._tensor._version

    def get(self) -> torch.Tensor:
        """Return the tensor, as a new object; RuntimeError if it was written to and must not have been."""
        return _unless_mutated(self.get_unless_mutated())

    def get_unless_mutated(self) -> torch.Tensor | None:
        """Return the tensor, as a new object; None if it was written to and must not have been.

        It is a new one because it becomes part of the graph of the recomputation. That graph holds this object, which
        would otherwise hold the graph.
        """
        if self._version is not None and self._tensor._version != self._version:
            return None
        return alias(self._tensor)


class Packed:
    """A tensor that was packed by a context.

    Parameters
    ----------
    tensor : torch.Tensor
        The output of an operator.
    pack : callable
        The pack hook of the context.
    operator : operator
        The operator that returned it.
    """

    @saves_for_user_code  # the recomputation gives the tensor to code of the user's
    def __init__(self, tensor: torch.Tensor, pack: PackHook, operator: Any) -> None:
        packed = alias(tensor)
        # Tensors that other operators return may be filled by a stream of theirs, which the program joins later.
        is_filled = getattr(operator, "namespace", "") in _FILLED_ON_RETURN
        self._handle = core.pack_made(pack, packed) if is_filled else pack(packed)
        self._held: torch.Tensor | None = None

    def hold(self) -> None:
        """Bring the tensor to the device and hold it until it is asked for. Errors are left for ``get`` to raise."""
        with contextlib.suppress(RuntimeError):
            self._held = core.unpack(self._handle)

    def let_go(self) -> None:
        """Hold the tensor no longer."""
        self._held = None

    def get(self) -> torch.Tensor:
        """Return the tensor on the device; RuntimeError if it was written to since it was packed."""
        return _unless_mutated(self.get_unless_mutated())

    def get_unless_mutated(self) -> torch.Tensor | None:
        """Return the tensor on the device; None if it was written to since it was packed."""
        try:
            # If the tensor is held, this returns the same memory again. The core checks its version once more.
            return core.unpack(self._handle)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            return None
        finally:
            self._held = None


def _unless_mutated(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise RuntimeError(_MUTATED)
    return tensor


def storages(value: Any) -> Iterator[int]:
    """Yield a number for the storage of each tensor in ``value``; different storages have different numbers."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            for plain in plain_tensors(leaf):
                if plain.layout is torch.strided and not plain.is_quantized:
                    yield plain.untyped_storage()._cdata


def is_made_of(output: Any, arguments: Any) -> bool:
    """Return whether ``output`` has tensors, and all of them share memory with ``arguments``, as views do."""
    shared = set(storages(output))
    return bool(shared) and shared <= set(storages(arguments))


@dataclass(frozen=True)
class Saved:
    """The return value of one call of an operator, with a Kept or a Packed in the place of each tensor."""

    output: Any

    def packed(self) -> list[Packed]:
        return [each for each in tree_leaves(self.output) if isinstance(each, Packed)]

    def restore(self) -> Any:
        return tree_map(lambda each: each.get() if isinstance(each, (Kept, Packed)) else each, self.output)


class Mark:
    """An entry of the cache for a call whose output it does not hold."""


RECOMPUTED = Mark()
_CONSUMED = Mark()


def key_of(operator: Any, arguments: tuple[Any, ...]) -> Any:
    """Return the key by which calls are counted: the operator, and the graph, for an operator that runs one."""
    if not isinstance(operator, torch._ops.HigherOrderOperator) or not arguments:
        return operator
    graph = arguments[0]
    return operator, graph if isinstance(graph, int) else getattr(graph, "idx", None)


class Cache:
    """The saved outputs of each call, by operator and by the number of earlier calls of it."""

    def __init__(self) -> None:
        self.entries: defaultdict[Any, list[Saved | Mark]] = defaultdict(list)
        self._packed: list[Packed] = []  # in the order of forward; empty after the first recomputation

    def add(self, key: Any, entry: Saved | Mark) -> None:
        self.entries[key].append(entry)
        if isinstance(entry, Saved):
            self._packed += entry.packed()

    def hold_all(self) -> None:
        """Bring all packed tensors to the device, the last one first, which is the order of reloads.

        Asked for in the order of the recomputation, they would come in the opposite order to the reloads that run
        ahead. All of them are on the device at the end of the recomputation anyway.
        """
        for packed in reversed(self._packed):
            packed.hold()

    def let_go(self) -> None:
        for packed in self._packed:
            packed.let_go()
        self._packed.clear()

    def take(self, operator: Any, key: Any, index: int) -> Saved | None:
        """Return the saved outputs of a call and mark them as consumed; None if the call is to be computed again.

        Parameters
        ----------
        operator : operator
            For messages.
        key : hashable
            The result of ``key_of`` for the call.
        index : int
            How many calls with this key came before in the recomputation.

        Raises
        ------
        RuntimeError
            The entry was consumed before, or forward made no such call.
        """
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
