"""The hooks on the forward of a planned block, by which the core records its operators and makes them again.

The hooks are functions of this module, and they look up their state by the module that is called, so that a copy of the
module is an ordinary module.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from torchoffload._core import core
from torchoffload._devices import is_capturing
from torchoffload._fit.block.graph import BlockPlan
from torchoffload._fit.block.record import Recording
from torchoffload._fit.block.replay import Watch
from torchoffload._fit.block.whole import whole_call
from torchoffload._pytorch import hook_stack
from torchoffload._pytorch.compiled_calls import add_call_hooks, has_compiled, remove_call_hooks
from torchoffload._pytorch.functional_transforms import let_transforms_run
from torchoffload._pytorch.hook_stack import Role
from torchoffload._pytorch.module_hooks import has_returned
from torchoffload._pytorch.operator_mode import OperatorMode
from torchoffload._pytorch.tracing import is_transformed

__all__ = ["plan_block", "unplan_block", "watch_block", "why_left_alone"]

_CHANGED = (
    "torchoffload: {name} {what}. The block needs the former value, and nothing that autograd saved would have needed "
    "it. Write to a copy, or leave the block out of fit's blocks."
)


class _Block:
    """A planned or a watched block. It owns the entries in ``hook_stack`` that calls of its module make."""

    def __init__(self, watch: Callable[[nn.Module, Any], Watch]) -> None:
        self.watch = watch
        self.why_left_alone: str | None = None  # in a call that autograd would save tensors of


_lock = threading.RLock()
_blocks: "weakref.WeakKeyDictionary[nn.Module, _Block]" = weakref.WeakKeyDictionary()


def plan_block(module: nn.Module, plan: BlockPlan) -> None:
    """Have a module follow a plan in each forward with gradients from now on.

    Parameters
    ----------
    module : nn.Module
        The block.
    plan : BlockPlan
        Which values forward keeps. All others that autograd saves are made again in backward. It replaces the plan that
        the module had.
    """
    watch = Watch(plan)
    watch_block(module, lambda _module, _inputs: watch)


def watch_block(module: nn.Module, watch: Callable[[nn.Module, Any], Watch]) -> None:
    """Have a function return, in each forward of a module with gradients, the watch that the forward follows.

    Parameters
    ----------
    module : nn.Module
        The block.
    watch : callable
        Called with the module and its arguments, a tuple of the positional and the keyword ones. It replaces the plan
        or the function that the module had.
    """
    let_transforms_run()
    with _lock:
        if module not in _blocks:
            remove_call_hooks(module, _enter, _leave)
            # Other hooks may come between these and forward: their operators are the block's then.
            add_call_hooks(module, _enter, _leave)
        _blocks[module] = _Block(watch)


def unplan_block(module: nn.Module) -> None:
    """Take the plan or the watch of a module, and its hooks, away; autograd graphs that are alive stay valid."""
    with _lock:
        if _blocks.pop(module, None) is not None:
            remove_call_hooks(module, _enter, _leave)


def _may_record() -> bool:
    """Return whether autograd would save tensors here, and nobody else has hooks on them.

    In backward a checkpoint of the user's is computed again. Inside of one in forward, that one computes the whole
    block again, as does a planned block around this one.
    """
    if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1 or is_transformed():
        return False
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return False
    if is_capturing():
        return False
    pack = hook_stack.top_pack_hook()
    return pack is None or pack is core.noop_pack or isinstance(getattr(pack, "__self__", None), core.Context)


def why_left_alone(module: nn.Module) -> str | None:
    """Return why a block that was called with gradients was neither recorded nor planned; None if that never was so."""
    block = _blocks.get(module)
    return None if block is None else block.why_left_alone


def _why_not() -> str | None:
    """Return why nothing is recorded here, if the program could do something about it."""
    if not torch.is_grad_enabled() or is_transformed():
        return None
    if torch._C._current_graph_task_id() != -1:
        return (
            "they are called in backward, as the program's own checkpoints with use_reentrant=True do. Leave these "
            "checkpoints away: fit chooses what is computed again"
        )
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return (
            "hooks on saved tensors are disabled around their calls (torch.autograd.graph.disable_saved_tensors_hooks)"
        )
    pack = hook_stack.top_pack_hook()
    origin = str(getattr(pack, "__module__", ""))
    if origin.startswith("torch.utils.checkpoint"):
        return (
            "they are called inside of checkpoints of the program's. Leave these checkpoints away: fit chooses what is "
            "computed again"
        )
    if pack is not None:
        return (
            f"the program has other hooks on saved tensors around their calls ({origin}."
            f"{getattr(pack, '__qualname__', type(pack).__name__)}). Leave them away, or leave fit away"
        )
    return None


def _enter(module: nn.Module, args: Any, kwargs: Any = None) -> None:
    if torch.compiler.is_compiling():
        return
    block = _blocks.get(module)
    if block is None:
        return  # the module is a copy
    hook_stack.drop_ended()
    # If the hook was registered anew since the call began, PyTorch calls the former one, without the keywords.
    may_record = _may_record()
    if not may_record and block.why_left_alone is None:
        block.why_left_alone = _why_not()
    watch = block.watch(module, (args, kwargs)) if kwargs is not None and may_record else None
    if watch is None or not (watch.records or watch.plan is not None):
        hook_stack.push(
            block, Role.MODULE, None, sys._getframe(1), None if watch is None else partial(_end_plain, watch)
        )
        return
    if has_compiled(module):
        steps = whole_call(module, watch, args, kwargs, lambda: _outcome.has_returned)
        hook_stack.push(block, Role.MODULE, None, sys._getframe(1), partial(_end_whole, steps, watch))
        next(steps)
        return
    context = getattr(hook_stack.top_pack_hook(), "__self__", None)
    context = context if isinstance(context, core.Context) else None
    observer = _Observer(module, watch)
    recording = None
    if watch.records:
        recording = Recording(module, (args, kwargs), context, observer)
        call = recording.call
    else:
        plan = None if watch.plan is None else watch.plan.actions
        inputs = core.storage_addresses((args, kwargs))
        clock = watch.now if watch.times_operators else None
        copies_inputs = watch.plan is not None and watch.plan.copies_inputs
        call = core.RecordedCall(plan, inputs, context, observer, clock, False, watch.times_operators, copies_inputs)
    mode = OperatorMode(call.listener())
    hooks = saved_tensors_hooks(call.pack_hook(), core.unpack)
    hook_stack.push(block, Role.MODULE, hooks, sys._getframe(1), partial(_end_recorded, call, mode, watch, recording))
    mode.__enter__()


def _leave(module: nn.Module, _args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    block = _blocks.get(module)
    if block is not None:
        _outcome.has_returned, _outcome.output = has_returned(output, sys._getframe(1)), output
        try:
            hook_stack.leave(block)
        finally:
            _outcome.has_returned, _outcome.output = False, None


class _Outcome(threading.local):
    has_returned = False
    output: Any = None


_outcome = _Outcome()


def _end_plain(watch: Watch) -> None:
    if _outcome.has_returned:
        watch.ended(_outcome.output)


def _end_whole(steps: Generator[None, None, None], watch: Watch) -> None:
    for _ in steps:
        raise RuntimeError("torchoffload: PyTorch's checkpoint has another form than expected")
    _end_plain(watch)


def _end_recorded(call: Any, mode: OperatorMode, watch: Watch, recording: Recording | None) -> None:
    mode.__exit__(None, None, None)
    try:
        if recording is not None:
            record = recording.end(verifies=_outcome.has_returned)
            may_recompute = _outcome.has_returned and watch.recorded(record)
            call.settle(not may_recompute)
    finally:
        call.finish()
    if call.left_at is not None:
        watch.left_plan()
    if _outcome.has_returned:
        watch.ended(_outcome.output)


class _Observer:
    """Is told by the core when a call is computed again, and names the tensors whose values are gone."""

    __slots__ = ("_module", "_watch")

    def __init__(self, module: nn.Module, watch: Watch) -> None:
        self._module = weakref.ref(module)
        self._watch = watch

    def begins_again(self) -> bool:
        """Returns whether the values that the plan keeps stay for a later backward."""
        self._watch.begins_again()
        return self._watch.keeps_for_later

    def ends_again(self, moments: list[tuple[int, Any, Any]]) -> None:
        if moments:
            self._watch.timed({number: (begin, end) for number, begin, end in moments if number >= 0})
        self._watch.ends_again()

    def inputs_were_written(self) -> None:
        self._watch.inputs_were_written()

    def refused(self, what: str, address: int) -> str:
        message = _CHANGED.format(name=self._name_of(address), what=what)
        self._watch.refused(message)
        return message

    def _name_of(self, address: int) -> str:
        module = self._module()
        for kind, named in (
            ("parameter", module.named_parameters() if module is not None else ()),
            ("buffer", module.named_buffers() if module is not None else ()),
        ):
            for name, tensor in named:
                if core.storage_addresses(tensor) == {address}:
                    return f"the {kind} {name} of shape {tuple(tensor.shape)} of a {type(module).__name__}"
        return "a tensor that was given to a block or comes from outside of it"
