"""selective_checkpoint_context_fn: what a selective checkpoint saves moves, too.

PyTorch's selective checkpoint holds what its policy saves in a storage of its own, which no saved-tensor hook sees.
Here it is packed through the open context like any saved tensor, and unpacked as the recomputation comes to it.
"""

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from torchoffload._contexts.disabling import is_disabled
from torchoffload._contexts.options import check_bool
from torchoffload._core import core
from torchoffload._pytorch import hook_stack
from torchoffload._pytorch.hook_stack import Role
from torchoffload._pytorch.tensor_subclasses import plain_tensors
from torchoffload._pytorch.user_code import saves_for_user_code

__all__ = ["selective_checkpoint_context_fn"]

PolicyFn = Callable[..., CheckpointPolicy | bool]
PackHook = Callable[[torch.Tensor], object]
_Contexts = tuple[TorchDispatchMode, TorchDispatchMode]

_make_stock_contexts: Any = create_selective_checkpoint_contexts  # which has no annotations


def _policies(*names: str) -> frozenset[CheckpointPolicy]:
    """Those of them that this torch has."""
    return frozenset(policy for policy in CheckpointPolicy if policy.name in names)


_SAVED = _policies("MUST_SAVE", "PREFER_SAVE")
_OFFLOADED = _policies("MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD")
_MUST_OFFLOAD = _policies("MUST_CPU_OFFLOAD")

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
_NO_CONTEXT = (
    "torchoffload: the policy returned MUST_CPU_OFFLOAD for {operator}, and no OffloadActivations is open here to move "
    "its output. Run the checkpointed function inside `with torchoffload.OffloadActivations():`, or return "
    "PREFER_CPU_OFFLOAD, which saves the output where it is when none is open."
)
_MUST_STAY = (
    "torchoffload: the policy returned MUST_CPU_OFFLOAD for {operator}, and with allow_cache_entry_mutation=True "
    "nothing is moved: what is written to after it was saved has to stay. Leave allow_cache_entry_mutation out, or "
    "return PREFER_CPU_OFFLOAD or MUST_SAVE."
)


def selective_checkpoint_context_fn(
    policy_fn_or_list: PolicyFn | list[Any],
    allow_cache_entry_mutation: bool = False,
    *,
    only_cpu_offload: bool = False,
) -> _Contexts:
    """Make the two contexts of a selective checkpoint whose saved tensors move.

    In place of ``torch.utils.checkpoint.create_selective_checkpoint_contexts``, with the same policies. Inside an
    OffloadActivations, what the policy saves moves like any saved tensor, under that context's options; with none open,
    or inside a NoOpManager, it stays. ``torch.compile`` gets PyTorch's own contexts, and with them the policy.

    Parameters
    ----------
    policy_fn_or_list : callable or list of torch._ops.OpOverload
        Called in forward, after each operator, with a ``SelectiveCheckpointContext``, the operator and its arguments;
        returns a ``CheckpointPolicy``, or True to save. Or the operators whose outputs are saved.
        ``MUST_CPU_OFFLOAD`` and ``PREFER_CPU_OFFLOAD``, which eager PyTorch takes for recomputing, save and move.
    allow_cache_entry_mutation : bool
        What was saved may be written to afterwards, without an error; it all stays, so that it follows the writes.
    only_cpu_offload : bool
        Move what the policy marks with ``MUST_CPU_OFFLOAD`` or ``PREFER_CPU_OFFLOAD``, and nothing else.

    Returns
    -------
    tuple of two TorchDispatchMode
        For the forward and for the recomputation.

    Raises
    ------
    TypeError, ValueError
        PyTorch's own for a wrong policy; ValueError for ``only_cpu_offload`` where this torch has no such policies.
    RuntimeError
        In forward: ``MUST_CPU_OFFLOAD`` and no context of ours is open, or ``allow_cache_entry_mutation`` is given. In
        backward, with PyTorch's words: what was saved was written to; a second backward; another recomputation.

    Notes
    -----
    A saved output that shares its operator's input's memory, such as a view, is made again in the recomputation, which
    copies nothing. PREFER_CPU_OFFLOAD with no context of ours open saves, as PREFER_SAVE does.

    Examples
    --------
    >>> save_products = [torch.ops.aten.mm.default]
    >>> context_fn = functools.partial(torchoffload.selective_checkpoint_context_fn, save_products)
    >>> with torchoffload.OffloadActivations():
    ...     loss = checkpoint(block, x, use_reentrant=False, context_fn=context_fn).sum()
    >>> loss.backward()
    """
    check_bool("allow_cache_entry_mutation", allow_cache_entry_mutation)
    check_bool("only_cpu_offload", only_cpu_offload)
    if only_cpu_offload and not _OFFLOADED:
        raise ValueError(
            f"only_cpu_offload=True would move nothing: torch {torch.__version__} has no "
            "CheckpointPolicy.MUST_CPU_OFFLOAD. Leave it out: what the policy saves is moved."
        )
    stock: _Contexts = _make_stock_contexts(policy_fn_or_list, allow_cache_entry_mutation)
    if _is_traced():
        return stock
    policy = _save_listed(policy_fn_or_list) if isinstance(policy_fn_or_list, list) else policy_fn_or_list
    cache = _Cache()
    return _Forward(policy, cache, allow_cache_entry_mutation, only_cpu_offload), _Recomputation(cache)


def _is_traced() -> bool:
    """Whether what runs now is traced or faked: its partitioner takes the policy, and there are no bytes to move."""
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.PROXY, keys.FAKE, keys.FUNCTIONAL))


def _save_listed(operators: list[Any]) -> PolicyFn:
    def policy(_context: SelectiveCheckpointContext, operator: Any, *_arguments: Any, **_keywords: Any) -> bool:
        return operator in operators

    return policy


# Before, a recomputation could call what its forward had not, as long as none of it was saved.
_COUNTS_ALL = hasattr(torch_checkpoint, "_RECOMPUTE")
_CONTEXT_TAKES_OUTPUT = "op_output" in inspect.signature(SelectiveCheckpointContext).parameters


def _policy_context(output: Any) -> SelectiveCheckpointContext:
    given = {"op_output": output} if _CONTEXT_TAKES_OUTPUT else {}
    return SelectiveCheckpointContext(is_recompute=False, **given)


def _pack_hook_in_force() -> PackHook | None:
    """Return the pack hook of what is open innermost, also where a checkpoint's own hooks stand before it.

    ``core.noop_pack`` where everything is asked to stay; None where nothing of ours is open.
    """
    for entry in hook_stack.innermost_first():
        if entry.hooks is not None:
            pack: PackHook = entry.hooks.pack_hook
            return pack
        if entry.role is Role.CONTEXT:
            return core.noop_pack  # entered while everything was turned off
    return core.noop_pack if is_disabled() else None


# ---- what is saved ----


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Detached, with the tensor's own version counter, as autograd's kernels below which a mode runs would not make it.

    Detached, since the tensor becomes part of the graph that holds the cache once its operator has returned.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class _Kept:
    """A tensor that stays, and the version that it has to have."""

    def __init__(self, tensor: torch.Tensor, may_change: bool) -> None:
        self._tensor = _alias(tensor)
        self._version = None if may_change else self._tensor._version

    def get(self) -> torch.Tensor:
        if self._version is not None and self._tensor._version != self._version:
            raise RuntimeError(_MUTATED)
        return self._tensor


class _Packed:
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


def _storages(value: Any) -> Iterator[int]:
    """What tells apart the storages of all tensors in ``value``."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            for plain in plain_tensors(leaf):
                if plain.layout is torch.strided and not plain.is_quantized:
                    yield plain.untyped_storage()._cdata


def _is_made_of(output: Any, arguments: Any) -> bool:
    """Whether all tensors of ``output`` are on the memory of ``arguments``."""
    shared = set(_storages(output))
    return bool(shared) and shared <= set(_storages(arguments))


def _is_mutable(operator: Any) -> bool:
    return bool(getattr(getattr(operator, "_schema", None), "is_mutable", False))


@dataclass(frozen=True)
class _Saved:
    """What one call of an operator returned, with a _Kept or a _Packed for each tensor."""

    output: Any

    def packed(self) -> list[_Packed]:
        return [each for each in tree_leaves(self.output) if isinstance(each, _Packed)]

    def restore(self) -> Any:
        return tree_map(lambda each: each.get() if isinstance(each, (_Kept, _Packed)) else each, self.output)


class _Mark:
    """An entry of the cache that holds nothing."""


_RECOMPUTED = _Mark()
_CONSUMED = _Mark()


def _key(operator: Any, arguments: tuple[Any, ...]) -> Any:
    """What calls are counted by: the operator, and for one that runs a graph that graph, too."""
    if not isinstance(operator, torch._ops.HigherOrderOperator) or not arguments:
        return operator
    graph = arguments[0]
    return operator, graph if isinstance(graph, int) else getattr(graph, "idx", None)


class _Cache:
    """What was saved of each call, by operator and by how many calls of it came before."""

    def __init__(self) -> None:
        self.entries: defaultdict[Any, list[_Saved | _Mark]] = defaultdict(list)
        self._packed: list[_Packed] = []  # in the order of forward, until a recomputation has held them

    def add(self, key: Any, entry: _Saved | _Mark) -> None:
        self.entries[key].append(entry)
        if isinstance(entry, _Saved):
            self._packed += entry.packed()

    def hold_all(self) -> None:
        """Ask for all that was packed in the order of reloads, the last first. It will all be here in the end."""
        for packed in reversed(self._packed):
            packed.hold()

    def let_go(self) -> None:
        for packed in self._packed:
            packed.let_go()
        self._packed.clear()

    def take(self, operator: Any, key: Any, index: int) -> _Saved | None:
        """Return the entry, which is then consumed; None for a call that is computed again."""
        calls = self.entries.get(key, [])
        if index >= len(calls):
            if not _COUNTS_ALL and all(entry is _RECOMPUTED for entry in calls):
                return None
            where = f"invocation index {index} " if calls else ""
            raise RuntimeError(f"{operator} {where}encountered during backward but not found in storage. {_MISMATCH}")
        entry = calls[index]
        if entry is _CONSUMED:
            raise RuntimeError(_EXTRA_TIME)
        if not isinstance(entry, _Saved):
            return None
        calls[index] = _CONSUMED
        return entry


# ---- the two contexts ----


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    # As PyTorch's own: a compiled region inside stays compiled, and an operator that runs a graph comes here whole.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _Forward(_Mode):  # type: ignore[no-untyped-call]
    def __init__(self, policy: PolicyFn, cache: _Cache, may_change: bool, only_cpu_offload: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._policy = policy
        self._cache = cache
        self._may_change = may_change
        self._only_cpu_offload = only_cpu_offload

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        output = func(*args, **keywords)
        if func not in SAC_IGNORED_OPS:
            policy = self._policy(_policy_context(output), func, *args, **keywords)
            if isinstance(policy, bool):
                policy = CheckpointPolicy.MUST_SAVE if policy else CheckpointPolicy.PREFER_RECOMPUTE
            self._cache.add(_key(func, args), self._entry(policy, func, output, (args, keywords)))
        return output

    def _entry(self, policy: CheckpointPolicy, operator: Any, output: Any, arguments: Any) -> _Saved | _Mark:
        if policy not in _SAVED and policy not in _OFFLOADED:
            return _RECOMPUTED
        pack = self._pack_hook_for(policy, operator)
        if not _is_mutable(operator) and _is_made_of(output, arguments):
            return _RECOMPUTED
        shared = set(_storages(arguments))

        def save(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if pack is None or not shared.isdisjoint(_storages(value)):
                return _Kept(value, self._may_change)
            return _Packed(value, pack)

        return _Saved(tree_map(save, output))

    def _pack_hook_for(self, policy: CheckpointPolicy, operator: Any) -> PackHook | None:
        """Return what takes that which ``policy`` saves; None where it stays."""
        if self._may_change:
            if policy in _MUST_OFFLOAD:
                raise RuntimeError(_MUST_STAY.format(operator=operator))
            return None
        if self._only_cpu_offload and policy not in _OFFLOADED:
            return None
        pack = _pack_hook_in_force()
        if pack is None and policy in _MUST_OFFLOAD:
            raise RuntimeError(_NO_CONTEXT.format(operator=operator))
        return None if pack is core.noop_pack else pack


class _Recomputation(_Mode):  # type: ignore[no-untyped-call]
    def __init__(self, cache: _Cache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache
        self._calls: defaultdict[Any, int] = defaultdict(int)

    def __enter__(self) -> Self:
        self._calls.clear()  # another recomputation counts anew
        self._cache.hold_all()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._cache.let_go()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in SAC_IGNORED_OPS:
            return func(*args, **(kwargs or {}))
        key = _key(func, args)
        index = self._calls[key]
        self._calls[key] += 1
        entry = self._cache.take(func, key, index)
        return func(*args, **(kwargs or {})) if entry is None else entry.restore()
