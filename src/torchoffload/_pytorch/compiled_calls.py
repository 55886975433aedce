"""Calls of modules that torch.compile has compiled, and hooks around such calls.

PyTorch has three ways to compile a module. ``torch.compile(module)`` returns another module, whose hooks run eagerly
around the compiled call; so do the hooks of a module whose ``forward`` was replaced by ``torch.compile(forward)``. But
``module.compile()`` compiles the call together with the hooks of the module, so that they are traced and gone. Hooks of
ours on such a module stand in an object around the call that ``module.compile()`` has put into ``_compiled_call_impl``.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from torchoffload._pytorch.module_hooks import remove_forward_hooks
from torchoffload._pytorch.module_wrappers import COMPILED, COMPILED_FROM

__all__ = [
    "add_call_hooks",
    "called_modules",
    "compiled_call",
    "has_compiled",
    "is_compiled",
    "keep_call_hooks",
    "not_traced",
    "remove_call_hooks",
    "runs_hooks_around_call",
    "set_compiled_call",
]


class _Pair(NamedTuple):
    enter: Callable[..., Any]
    leave: Callable[..., Any] | None


_lock = threading.RLock()
_pairs: "weakref.WeakKeyDictionary[nn.Module, tuple[_Pair, ...]]" = weakref.WeakKeyDictionary()


class _Around:
    """Stands in ``_compiled_call_impl``. PyTorch leaves that out of copies, which are plain modules then."""

    def __init__(self, module: nn.Module, compiled: Callable[..., Any]) -> None:
        self.module, self.compiled = weakref.ref(module), compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # inside of another compiled region, which traces no hooks
            return self.compiled(*args, **kwargs)
        return not_traced(_call)(self, args, kwargs)


@functools.cache
def not_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function marked as not to be traced: below a frame that Dynamo has given up it would be."""
    disable: Any = torch._dynamo.disable
    return disable(function)  # type: ignore[no-any-return]


def _call(around: _Around, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    module = around.module()
    pairs = () if module is None else _pairs.get(module, ())
    entered: list[_Pair] = []
    output = None
    try:
        for pair in pairs:
            pair.enter(module, args, kwargs)
            entered.append(pair)
        output = around.compiled(*args, **kwargs)
    finally:
        for pair in reversed(entered):
            if pair.leave is not None:
                pair.leave(module, args, output)
    return output


def is_compiled(module: nn.Module) -> bool:
    """Return whether a call of the module runs code that torch.compile has made of it."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    if module._compiled_call_impl is not None or COMPILED in module._modules:
        return True
    forward = module.__dict__.get("forward", type(module).forward)
    return hasattr(forward, COMPILED_FROM)


def has_compiled(module: nn.Module) -> bool:
    """Return whether the module is compiled, or one inside of it: not all of its operators are seen then."""
    return any(map(is_compiled, module.modules()))


def called_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a model whose calls can be seen by hooks, each once.

    Modules inside of a compiled one are left out, and so are TorchScript modules, which take no hooks.
    """
    waiting, seen = [model], set()
    while waiting:
        module = waiting.pop()
        if module in seen or isinstance(module, torch.jit.ScriptModule):
            continue
        seen.add(module)
        yield module
        if not is_compiled(module):
            waiting += reversed(list(module.children()))


def runs_hooks_around_call(module: nn.Module) -> bool:
    """Return whether hooks of ours stand around the compiled call of the module, and not among its hooks."""
    return isinstance(module._compiled_call_impl, _Around)


def compiled_call(module: nn.Module) -> Callable[..., Any]:
    """Return the function that hooks of ours stand around: the compiled call of the module, or its forward."""
    compiled = module._compiled_call_impl
    return compiled.compiled if isinstance(compiled, _Around) else module.forward


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Have a module that was compiled in place make another call, inside of the hooks that stand around it."""
    with _lock:
        compiled = module._compiled_call_impl
        if isinstance(compiled, _Around):
            compiled.compiled = call
        else:
            module._compiled_call_impl = call


def add_call_hooks(
    module: nn.Module, enter: Callable[..., Any], leave: Callable[..., Any] | None, *, outermost: bool = False
) -> None:
    """Have a module call hooks at the beginning and at the end of each call, nearest to its forward.

    Parameters
    ----------
    module : nn.Module
        The module.
    enter : callable
        Called with the module and the positional and keyword arguments.
    leave : callable or None
        Called with the module, the positional arguments, and the output; with None if forward has raised.
    outermost : bool, default False
        Whether they come around all other hooks, and not nearest to the forward.
    """
    with _lock:
        pair, others = _Pair(enter, leave), _pairs.get(module, ())
        _pairs[module] = (pair, *others) if outermost else (*others, pair)
        if module._compiled_call_impl is None:
            module.register_forward_pre_hook(enter, prepend=outermost, with_kwargs=True)
            if leave is not None:
                module.register_forward_hook(leave, prepend=not outermost, always_call=True)
        else:
            keep_call_hooks(module)


def keep_call_hooks(module: nn.Module) -> None:
    """Put the hooks of a module that was compiled in place, maybe since they were added, around its compiled call."""
    compiled = module._compiled_call_impl
    if compiled is None or isinstance(compiled, _Around):
        return
    with _lock:
        pairs = _pairs.get(module, ())
        for pair in pairs:
            remove_forward_hooks(module, pair.enter, pair.leave)
        if pairs:
            module._compiled_call_impl = _Around(module, compiled)


def remove_call_hooks(module: nn.Module, enter: Callable[..., Any], leave: Callable[..., Any] | None) -> None:
    """Take hooks away again, wherever they stand. Then ``module.compile()``'s own call is back in its place."""
    with _lock:
        remove_forward_hooks(module, enter, leave)
        pairs = tuple(pair for pair in _pairs.pop(module, ()) if pair != (enter, leave))
        if pairs:
            _pairs[module] = pairs
        compiled = module._compiled_call_impl
        if isinstance(compiled, _Around) and not pairs:
            module._compiled_call_impl = compiled.compiled
