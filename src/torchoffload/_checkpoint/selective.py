"""selective_checkpoint_context_fn: selective activation checkpoints whose saved outputs move.

PyTorch's selective checkpoint holds the outputs that its policy saves in a cache of its own, which no saved-tensor hook
sees. Here they are packed through the open context like any saved tensor, and unpacked when the recomputation comes to
them.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from torchoffload._checkpoint.saved_outputs import (
    RECOMPUTED,
    Cache,
    Kept,
    Mark,
    Packed,
    PackHook,
    Saved,
    is_made_of,
    key_of,
    storages,
)
from torchoffload._contexts.disabling import is_disabled
from torchoffload._contexts.options import check_bool
from torchoffload._core import core
from torchoffload._pytorch import hook_stack
from torchoffload._pytorch.collectives import communicates
from torchoffload._pytorch.hook_stack import Role

__all__ = ["selective_checkpoint_context_fn"]

PolicyFn = Callable[..., CheckpointPolicy | bool]
_Contexts = tuple[TorchDispatchMode, TorchDispatchMode]

_make_stock_contexts: Any = create_selective_checkpoint_contexts  # the function has no annotations


def _policies(*names: str) -> frozenset[CheckpointPolicy]:
    """Return the policies of these names that this version of torch has."""
    return frozenset(policy for policy in CheckpointPolicy if policy.name in names)


_SAVED = _policies("MUST_SAVE", "PREFER_SAVE")
_OFFLOADED = _policies("MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD")
_MUST_OFFLOAD = _policies("MUST_CPU_OFFLOAD")

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
    """Make the two contexts of a selective checkpoint whose saved outputs move.

    This function takes the place of ``torch.utils.checkpoint.create_selective_checkpoint_contexts``, with the same
    policies. Inside an OffloadActivations, the outputs that the policy saves move like any saved tensor, under the
    options of that context. Outside of one, or inside a NoOpManager, they stay. ``torch.compile`` gets PyTorch's own
    contexts, and with them the policy.

    Parameters
    ----------
    policy_fn_or_list : callable or list of torch._ops.OpOverload
        A policy, or a list of the operators whose outputs are saved. A policy is called in forward, after each
        operator, with a ``SelectiveCheckpointContext``, the operator and the operator's arguments, and returns a
        ``CheckpointPolicy``, or True to save. ``MUST_CPU_OFFLOAD`` and ``PREFER_CPU_OFFLOAD`` save the output and move
        it; PyTorch itself recomputes it without ``torch.compile``.
    allow_cache_entry_mutation : bool, default False
        Whether saved outputs may be written to afterwards. Then there is no error for it, and all of them stay on the
        device, so that the recomputation sees the writes.
    only_cpu_offload : bool, default False
        Move only outputs that the policy marks with ``MUST_CPU_OFFLOAD`` or ``PREFER_CPU_OFFLOAD``.

    Returns
    -------
    tuple of two TorchDispatchMode
        The contexts for the forward and for the recomputation.

    Raises
    ------
    TypeError
        An argument is not a bool, or, raised by PyTorch, the policy is wrong.
    ValueError
        ``only_cpu_offload`` is set and this version of torch has no such policies; or, raised by PyTorch, the policy is
        wrong.
    RuntimeError
        In forward, the policy returned ``MUST_CPU_OFFLOAD`` and no context of torchoffload is open, or
        ``allow_cache_entry_mutation`` is set. In backward, with the messages of PyTorch, a saved output was written to,
        backward ran a second time, or the recomputation called other operators than forward.

    Notes
    -----
    A saved output that shares memory with an input of its operator, such as a view, is not held. The recomputation
    makes it again, which copies nothing. A collective's output is saved and stays on the device, since it may be on its
    way still. ``PREFER_CPU_OFFLOAD`` outside of any context of torchoffload acts as ``PREFER_SAVE``.

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
    cache = Cache()
    return _Forward(policy, cache, allow_cache_entry_mutation, only_cpu_offload), _Recomputation(cache)


def _is_traced() -> bool:
    """Return whether operators are traced or faked now. Then the partitioner of the tracer takes the policy instead."""
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.PROXY, keys.FAKE, keys.FUNCTIONAL))


def _save_listed(operators: list[Any]) -> PolicyFn:
    def policy(_context: SelectiveCheckpointContext, operator: Any, *_arguments: Any, **_keywords: Any) -> bool:
        return operator in operators

    return policy


_CONTEXT_TAKES_OUTPUT = "op_output" in inspect.signature(SelectiveCheckpointContext).parameters


def _policy_context(output: Any) -> SelectiveCheckpointContext:
    given = {"op_output": output} if _CONTEXT_TAKES_OUTPUT else {}
    return SelectiveCheckpointContext(is_recompute=False, **given)


def _pack_hook_in_force() -> PackHook | None:
    """Return the pack hook of the innermost open context of ours, even if hooks of a checkpoint were pushed after it.

    It is ``core.noop_pack`` if everything shall stay, and None if no context of ours is open.
    """
    for entry in hook_stack.innermost_first():
        if entry.hooks is not None:
            pack: PackHook = entry.hooks.pack_hook
            return pack
        if entry.role is Role.CONTEXT:
            return core.noop_pack  # the context was entered while offloading was disabled
    return core.noop_pack if is_disabled() else None


def _is_mutable(operator: Any) -> bool:
    return bool(getattr(getattr(operator, "_schema", None), "is_mutable", False))


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    # Both are as in PyTorch's own modes: a compiled region inside stays compiled, and an operator that runs a graph is
    # seen as one operator.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _Forward(_Mode):  # type: ignore[no-untyped-call]
    def __init__(self, policy: PolicyFn, cache: Cache, may_change: bool, only_cpu_offload: bool) -> None:
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
            self._cache.add(key_of(func, args), self._entry(policy, func, output, (args, keywords)))
        return output

    def _entry(self, policy: CheckpointPolicy, operator: Any, output: Any, arguments: Any) -> Saved | Mark:
        if policy not in _SAVED and policy not in _OFFLOADED:
            return RECOMPUTED
        pack = self._pack_hook_for(policy, operator)
        moves = not communicates(operator)  # whose output may be on its way still: a copy would not wait
        if not _is_mutable(operator) and is_made_of(output, arguments):
            return RECOMPUTED
        shared = set(storages(arguments))

        def save(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if pack is None or not moves or not shared.isdisjoint(storages(value)):
                return Kept(value, self._may_change)
            return Packed(value, pack, operator)

        return Saved(tree_map(save, output))

    def _pack_hook_for(self, policy: CheckpointPolicy, operator: Any) -> PackHook | None:
        """Return the pack hook for an output that ``policy`` saves; None if the output stays."""
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
    def __init__(self, cache: Cache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache
        self._calls: defaultdict[Any, int] = defaultdict(int)

    def __enter__(self) -> Self:
        self._calls.clear()  # each recomputation counts the calls anew
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
        key = key_of(func, args)
        index = self._calls[key]
        self._calls[key] += 1
        entry = self._cache.take(func, key, index)
        return func(*args, **(kwargs or {})) if entry is None else entry.restore()
