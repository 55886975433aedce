"""The calls of a fitted model, by whichever of its modules the training loop calls.

As a rule that is the model. But a loop may also call a wrapper around the model (DDP), a module inside of it, as
``model.loss(x)`` does, or the blocks one after the other. So there are hooks on the model, on the modules that have
blocks inside, and on the blocks. The outermost call of any of these is a call of the model.
"""

import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn

from torchoffload._core import core
from torchoffload._fit.choosing.chooser import Chooser
from torchoffload._fit.model.backwards import Backwards
from torchoffload._fit.model.compiled_model import CompiledModel
from torchoffload._fit.model.driver import Driver
from torchoffload._pytorch import hook_stack
from torchoffload._pytorch.compiled_calls import add_call_hooks, called_modules, keep_call_hooks, remove_call_hooks
from torchoffload._pytorch.module_hooks import has_returned
from torchoffload._pytorch.tracing import is_transformed
from torchoffload._warnings import warn_user

__all__ = ["ModelCalls"]


class _Outermost(threading.local):
    """The outermost call of this thread: the module, and the frame that runs as long as the call does."""

    module: nn.Module | None = None
    frame: FrameType | None = None
    is_opening = False  # whether the modules that are entered inside of it tell what the step begins with


class ModelCalls:
    """Tells the driver and the chooser of a model of its calls.

    Parameters
    ----------
    model : nn.Module
        The model. It is held weakly.
    driver : Driver or CompiledModel
        The driver that is told of the calls.
    chooser : Chooser or None
        The chooser of the blocks; None if they are given.

    Attributes
    ----------
    driver : Driver or CompiledModel
        The same.
    """

    def __init__(self, model: nn.Module, driver: Driver | CompiledModel, chooser: Chooser | None) -> None:
        self._model = weakref.ref(model)
        self.driver, self._chooser = driver, chooser
        self._outermost = _Outermost()
        # Of calls of other modules than the model: they are one call, until the backward of the first of them ends.
        self._of_parts = Backwards(self)
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._names: Mapping[nn.Module, str] = {}
        self._was_traced = self._was_in_context = False
        self._install(model)

    def _install(self, model: nn.Module) -> None:
        """Have hooks on the model and on all that a loop may call instead of it."""
        self._names = self.driver.names
        wanted = {model, *_with_inside(model, self._names)}
        for module in set(self._modules) - wanted:
            self._uninstall(module)
        for module in wanted:
            if module is model or module not in _calls:
                remove_call_hooks(module, _enter, _leave)
                add_call_hooks(module, _enter, _leave, outermost=True)
                _calls[module] = self
                self._modules.add(module)

    def _uninstall(self, module: nn.Module) -> None:
        self._modules.discard(module)
        if _calls.get(module) is self:
            del _calls[module]
            remove_call_hooks(module, _enter, _leave)

    def remove(self) -> None:
        """Take the hooks away."""
        for module in list(self._modules):
            self._uninstall(module)

    def enter(self, module: nn.Module, args: Any, kwargs: Any, frame: FrameType) -> None:
        """Take notice of the beginning of a call of the model or of a part of it."""
        outermost, model = self._outermost, self._model()
        if outermost.module is not None:
            # A call that was left by a KeyboardInterrupt is still noted: PyTorch runs no hook then.
            may_have_ended = module is model or module is outermost.module
            if not may_have_ended or not _has_ended(outermost.frame):
                if outermost.is_opening and _is_training_call():
                    outermost.is_opening = self.driver.module_opens(module)
                return
            outermost.module = outermost.frame = None
            self.driver.clock.open_calls.end()
        if model is None or not _is_training_call():
            return
        outermost.module, outermost.frame, outermost.is_opening = module, frame, False
        self.driver.clock.open_calls.begin(frame)
        try:
            self._begins(model, module, args, kwargs, frame)
            outermost.is_opening = self.driver.is_opening
        except BaseException:
            outermost.module = outermost.frame = None
            self.driver.clock.open_calls.end()
            raise

    def _begins(self, model: nn.Module, module: nn.Module, args: Any, kwargs: Any, frame: FrameType) -> None:
        hook_stack.drop_ended()  # else the hooks of a call that a KeyboardInterrupt has left are taken for the user's
        self._warn_of_context()
        for block in self._names:
            keep_call_hooks(block)
        # If the program keeps the output of a part, that output's backward may never come.
        clock = self.driver.clock
        # A step that ran out of memory is over, although the program may keep outputs of its calls. Ranks that plan
        # together begin their calls together, and so do not look.
        looks = isinstance(self.driver, CompiledModel) or self.driver.agreement is None
        goes_on = not clock.is_between_steps and not (looks and clock.has_lost_step)
        clock.note_call(module, (args, kwargs))
        if module is not model and self._of_parts.has_open_calls and goes_on:
            self.driver.call_goes_on((args, kwargs))
            return
        chooser, driver = self._chooser, self.driver
        if chooser is None or isinstance(driver, CompiledModel):
            driver.call_begins((args, kwargs))
        else:
            if driver.lacks_blocks:
                chooser.begin_anew()
            if not chooser.takes_call(driver, module, args, kwargs, frame):
                driver.call_begins((args, kwargs))
                chooser.agree(driver)
        if self._names is not self.driver.names:
            self._install(model)

    def _warn_of_context(self) -> None:
        """Warn, once, if the call is inside of a context, which moves tensors that the plan keeps."""
        if not self._was_in_context and isinstance(getattr(hook_stack.top_pack_hook(), "__self__", None), core.Context):
            self._was_in_context = True
            name = self.driver.model_name
            warn_user(
                f"torchoffload: {name}, which torchoffload.fit was called for, is called inside of a context such as "
                "OffloadActivations. The context moves what the plan of fit keeps, so that the plan's time and memory "
                "are no longer true. Leave the context out, or remove() what fit returned."
            )

    def leave(self, module: nn.Module, output: Any, *, has_returned: bool) -> None:
        """Take notice of the end of a call, whose output is None if forward has raised."""
        outermost, model = self._outermost, self._model()
        if outermost.module is not module or model is None:
            return
        outermost.module = outermost.frame = None
        self.driver.clock.open_calls.end()
        if module is not model:
            self._of_parts.follow(output)
        driver, chooser = self.driver, self._chooser
        if (
            chooser is None
            or isinstance(driver, CompiledModel)
            or not chooser.has_taken_call(driver, has_returned=has_returned)
        ):
            if module is model and not has_returned:
                self.driver.call_raised()
            self.driver.call_ends(output)
        elif self._names is not self.driver.names:
            self._install(model)

    def backward_begins(self) -> None:
        """Take notice of a backward of a part."""

    def backward_ends(self) -> None:
        """Take notice of the end of a backward of a part."""

    def is_inner_backward(self) -> bool:
        """Return whether a backward of a part is that of a gradient inside of a call."""
        return self.driver.clock.is_inner_backward()

    def note_traced(self) -> None:
        """Warn, once, that the model is a part of a compiled region."""
        if not self._was_traced:
            self._was_traced = True
            name = self.driver.model_name
            warn_user(
                f"torchoffload: a call of {name} became a part of a region of torch.compile, in which fit sees no "
                "blocks: it does nothing there. Call fit for the model that torch.compile returned, so that its graph "
                "is planned as it is compiled (without fit: torchoffload.compile_options(memory=...)), or compile the "
                "blocks instead, each by itself (block.compile())."
            )


_calls: "weakref.WeakKeyDictionary[nn.Module, ModelCalls]" = weakref.WeakKeyDictionary()


def _with_inside(model: nn.Module, blocks: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield blocks, and the modules around them, as far as their calls can be seen."""
    chosen = set(blocks)
    for module in called_modules(model):
        if module in chosen or not chosen.isdisjoint(module.modules()):
            yield module


def _is_training_call() -> bool:
    return torch.is_grad_enabled() and not is_transformed() and torch._C._current_graph_task_id() == -1


def _has_ended(frame: FrameType | None) -> bool:
    if frame is None:
        return True
    try:
        frame.clear()
    except RuntimeError:  # Python refuses to clear a frame that is running
        return False
    return True


def _note_traced(identity: int) -> None:
    """Called by Dynamo while it traces a call; nothing of ours runs in that call later."""
    for module, calls in list(_calls.items()):
        if id(module) == identity and calls._model() is module and torch.is_grad_enabled():
            calls.note_traced()


# Dynamo calls it with constants, as it traces, and puts the constant that it returns into the graph.
_note_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _enter(module: nn.Module, args: Any, kwargs: Any = None) -> None:
    if torch.compiler.is_compiling():
        _note_traced(id(module))
        return
    calls = _calls.get(module)  # None for a copy
    if calls is not None:
        calls.enter(module, args, kwargs or {}, sys._getframe(1))


def _leave(module: nn.Module, _args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    calls = _calls.get(module)
    if calls is not None:
        calls.leave(module, output, has_returned=has_returned(output, sys._getframe(1)))
