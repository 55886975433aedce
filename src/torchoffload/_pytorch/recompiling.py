"""Compiling a module anew that torch.compile has compiled as a whole, with the same arguments and more options.

The arguments are read from private objects of PyTorch's. If these are not as known here, ``compile_arguments`` returns
None, and nothing is compiled anew.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchoffload._pytorch.compiled_calls import compiled_call, is_compiled, runs_hooks_around_call, set_compiled_call
from torchoffload._pytorch.module_wrappers import COMPILED

__all__ = [
    "CompileArguments",
    "compile_anew",
    "compile_arguments",
    "most_compiles",
    "set_whole_call",
    "whole_call_of",
]


@dataclass(frozen=True)
class CompileArguments:
    """The arguments of the call of ``torch.compile`` that compiled a module by inductor.

    Attributes
    ----------
    options : dict
        Inductor's options, those of a mode among them.
    keywords : dict
        The other arguments.
    """

    options: dict[str, Any]
    keywords: dict[str, Any]


def _is_wrapper(module: nn.Module) -> bool:
    """Return whether this is the other module that ``torch.compile(module)`` returns."""
    return COMPILED in module._modules


def whole_call_of(module: nn.Module) -> Callable[..., Any] | None:
    """Return the compiled function that a call of the module runs; None if the module was not compiled as a whole."""
    if isinstance(module, torch.jit.ScriptModule):
        return None
    if module._compiled_call_impl is not None:
        if _is_wrapper(module):
            return None
        return compiled_call(module) if runs_hooks_around_call(module) else module._compiled_call_impl
    return module.forward if _is_wrapper(module) else None


def set_whole_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Have a module that was compiled as a whole run another function."""
    if _is_wrapper(module):
        module.forward = call
    else:
        set_compiled_call(module, call)


def _dynamo_context(module: nn.Module, call: Callable[..., Any]) -> Any:
    """Return the object that holds the arguments of ``torch.compile``; None if there is none where it is known."""
    if _is_wrapper(module):
        return module.__dict__.get("dynamo_ctx")
    ask = getattr(call, "get_compiler_config", None)  # a closure over the object
    return inspect.getclosurevars(ask).nonlocals.get("self") if inspect.isfunction(ask) else None


def compile_arguments(module: nn.Module, call: Callable[..., Any]) -> CompileArguments | None:
    """Return the arguments with which a module was compiled as a whole.

    Parameters
    ----------
    module : nn.Module
        The module.
    call : callable
        The compiled function that ``torch.compile`` made of it.

    Returns
    -------
    CompileArguments or None
        None if the backend is not inductor, if an argument cannot be read or passed on, if a partitioner is among the
        options, or if the module is compiled twice.
    """
    context = _dynamo_context(module, call)
    names = ("callback", "fullgraph", "export", "_dynamic", "_hooks")
    if not all(hasattr(context, name) for name in names) or context.export:
        return None
    inner = module._modules.get(COMPILED)
    if inner is not None and (is_compiled(inner) or hasattr(inner, "_initialize_hook")):  # such as a lazy module
        return None
    if getattr(context, "_isolate_recompiles_id", -1) != -1 or getattr(context, "_shapes_spec", None) is not None:
        return None
    backend = context.callback
    while hasattr(backend, "_torchdynamo_orig_backend"):
        if getattr(backend, "_recompile_limit", None) is not None:
            return None
        backend = backend._torchdynamo_orig_backend
    if type(backend) is not getattr(torch, "_TorchCompileInductorWrapper", None):
        return None
    if "custom_partitioner_fn" in backend.config:
        return None
    options = dict(backend.config)
    guard_filter = getattr(context._hooks, "guard_filter_fn", None)
    if guard_filter is not None:
        options["guard_filter_fn"] = guard_filter
    keywords = {"fullgraph": bool(context.fullgraph), "dynamic": context._dynamic}
    if getattr(backend, "name", None) is not None:
        keywords["name"] = backend.name
    return CompileArguments(options, keywords)


def _isolates_recompiles() -> bool:
    compiler: Any = torch.compile
    return "isolate_recompiles" in inspect.signature(compiler).parameters


def most_compiles() -> int | None:
    """Return how often this release of PyTorch compiles a function, by all calls of torch.compile; None: any number."""
    return None if _isolates_recompiles() else int(torch._dynamo.config.recompile_limit)


def compile_anew(module: nn.Module, arguments: CompileArguments, options: dict[str, Any]) -> Callable[..., Any]:
    """Return the function that ``torch.compile`` makes of a module with more options, and leave the module as it is."""
    compiler: Any = torch.compile
    target = module._modules[COMPILED] if _is_wrapper(module) else module._call_impl
    keywords = dict(arguments.keywords)
    if _isolates_recompiles():
        keywords["isolate_recompiles"] = True
    again: Any = compiler(target, options={**arguments.options, **options}, **keywords)
    function: Callable[..., Any] = again.forward if _is_wrapper(module) else again
    return function
