"""The hooks on the forward of a planned block: they run it as PyTorch's non-reentrant checkpoint would, by its plan.

The hooks are functions of this module, and what they do is looked up by the module that is called, so that a copy of
the module is an ordinary module.
"""

import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._pytree import tree_flatten, tree_unflatten

from torchoffload._core import core
from torchoffload._fit.graph import BlockPlan
from torchoffload._fit.operators import addresses
from torchoffload._fit.recompute import Recomputation
from torchoffload._fit.record import Recorder
from torchoffload._fit.replay import Call, Forward, Watch
from torchoffload._fit.whole import COMPILED_CALL, WholeRecorder, call_again
from torchoffload._pytorch import hook_stack
from torchoffload._pytorch.compiled_calls import (
    add_call_hooks,
    compiled_call,
    has_compiled,
    remove_call_hooks,
    runs_hooks_around_call,
)
from torchoffload._pytorch.hook_stack import Role
from torchoffload._pytorch.tracing import is_transformed

__all__ = ["can_checkpoint", "plan_block", "unplan_block", "watch_block"]

_checkpoint: Any = getattr(torch_checkpoint, "_checkpoint_without_reentrant_generator", None)
_PARAMETERS = ("fn", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop", "args")


def can_checkpoint() -> bool:
    """Return whether this version of torch has the checkpoint that planned blocks are made of."""
    return (
        _checkpoint is not None and tuple(inspect.signature(_checkpoint).parameters)[: len(_PARAMETERS)] == _PARAMETERS
    )


class _Block:
    """A planned or a watched block. It owns the entries in ``hook_stack`` that calls of its module make."""

    def __init__(self, watch: Callable[[nn.Module, Any], Watch]) -> None:
        self.watch = watch


_lock = threading.RLock()
_blocks: "weakref.WeakKeyDictionary[nn.Module, _Block]" = weakref.WeakKeyDictionary()


def plan_block(module: nn.Module, plan: BlockPlan) -> None:
    """Have a module follow a plan in each forward with gradients from now on.

    Parameters
    ----------
    module : nn.Module
        The block.
    plan : BlockPlan
        What its recomputation keeps, leaves out and computes again. It replaces the plan that the module had.
    """
    watch = Watch(plan)
    watch_block(module, lambda _module, _inputs: watch)


def watch_block(module: nn.Module, watch: Callable[[nn.Module, Any], Watch]) -> None:
    """Have a function say, in each forward of a module with gradients, what the module does in it.

    Parameters
    ----------
    module : nn.Module
        The block.
    watch : callable
        Called with the module and its arguments, a tuple of the positional and the keyword ones. It replaces the plan
        or the function that the module had.
    """
    with _lock:
        if module not in _blocks:
            _install(module)
        _blocks[module] = _Block(watch)


def unplan_block(module: nn.Module) -> None:
    """Take the plan or the watch of a module, and its hooks, away; autograd graphs that are alive stay valid."""
    with _lock:
        if _blocks.pop(module, None) is not None:
            remove_call_hooks(module, _enter, _leave)


def _install(module: nn.Module) -> None:
    remove_call_hooks(module, _enter, _leave)
    # Our pre-hook runs last and our forward hook first, so that what other hooks do is no part of the block: it would
    # not be done again by the recomputation, which calls forward alone.
    add_call_hooks(module, _enter, _leave)


def _is_innermost(module: nn.Module) -> bool:
    """Return whether no other hook comes between ours and the module's forward, or its compiled call."""
    if runs_hooks_around_call(module):
        return True
    if torch_module._global_forward_hooks:
        return False
    last_before = next(reversed(module._forward_pre_hooks.values()), None)
    return last_before is _enter and next(iter(module._forward_hooks.values()), None) is _leave


def _may_checkpoint() -> bool:
    """Return whether autograd would save tensors here, and nobody else has hooks on them.

    What is computed in backward is a recomputation itself. Inside of a checkpoint of the user's, that one recomputes
    the whole block; it counts what its hooks get, so that they have to get the same each time.
    """
    if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
        return False
    if is_transformed():
        return False
    if torch_checkpoint._checkpoint_debug_enabled:  # it takes no modes of others
        return False
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return False
    pack = hook_stack.top_pack_hook()
    return pack is None or pack is core.noop_pack or isinstance(getattr(pack, "__self__", None), core.Context)


def _enter(module: nn.Module, args: Any, kwargs: Any = None) -> None:
    if torch.compiler.is_compiling():
        return
    block = _blocks.get(module)
    if block is None:
        return  # the module is a copy
    hook_stack.drop_ended()
    # Where the hook was registered anew since the call began, PyTorch calls the former one, without the keywords.
    if kwargs is None or not _may_checkpoint():
        _note_plain_call(block)
        return
    if not _is_innermost(module):
        with _lock:
            _install(module)  # for the next call; in this one the other hooks run between ours and forward
        _note_plain_call(block)
        return
    watch = block.watch(module, (args, kwargs))
    if watch.records:
        steps = _recorded(module, watch, args, kwargs)
    elif watch.plan is not None:
        steps = _checkpointed(module, watch.plan, watch, args, kwargs)
    else:
        steps = _plain()
    hook_stack.push(block, Role.MODULE, None, sys._getframe(1), partial(_finish, steps, watch))
    next(steps)


def _note_plain_call(block: _Block) -> None:
    """A call of the module inside a call of itself has an entry, too, so that its end does not end the outer one."""
    innermost = hook_stack.innermost()
    if innermost is not None and innermost.owner is block:
        hook_stack.push(block, Role.MODULE, None, sys._getframe(2))


def _leave(module: nn.Module, _args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    block = _blocks.get(module)
    if block is not None:
        _outcome.has_returned = output is not None  # PyTorch calls this hook with None where forward has raised
        try:
            hook_stack.leave(block)
        finally:
            _outcome.has_returned = False


class _Outcome(threading.local):
    has_returned = False


_outcome = _Outcome()


def _plain() -> Generator[None, None, None]:
    yield


def _recorded(module: nn.Module, watch: Watch, args: Any, kwargs: Any) -> Generator[None, None, None]:
    with (WholeRecorder if has_compiled(module) else Recorder)(module, (args, kwargs)) as recorder:
        yield
    if _outcome.has_returned:
        watch.recorded(recorder.record)


def _checkpointed(
    module: nn.Module, plan: BlockPlan, watch: Watch, args: Any, kwargs: Any
) -> Generator[None, None, None]:
    """Return PyTorch's generator around a checkpointed call, to be advanced once before and once after forward."""
    flat, structure = tree_flatten((args, kwargs))
    if plan.operators == (COMPILED_CALL,):
        return call_again(_checkpoint, compiled_call(module), watch, flat, structure)
    pack = hook_stack.top_pack_hook()
    call = Call(module, plan, None if pack is core.noop_pack else pack, (args, kwargs), watch)

    def forward(*leaves: Any) -> None:
        positional, keywords = tree_unflatten(list(leaves), structure)
        call.runs.open[-1].inputs = addresses(list(leaves))
        with call.state.in_place(), call.effects.in_place():
            module.forward(*positional, **keywords)

    def modes() -> tuple[Forward, Recomputation]:
        return Forward(call), Recomputation(call)

    check: str = torch_checkpoint._DEFAULT_DETERMINISM_MODE
    steps: Generator[None, None, None] = _checkpoint(forward, True, modes, check, False, True, *flat)
    return steps


def _finish(steps: Generator[None, None, None], watch: Watch) -> None:
    for _ in steps:
        raise RuntimeError("torchoffload: PyTorch's checkpoint has another form than expected")
    if _outcome.has_returned:
        watch.ended()
