"""Exempting the output head of a model: finding the head, and keeping its saved tensors on the device.

The hooks are functions of this module and not closures, so that they are copied and pickled together with the model:
the head of a copy is exempt as well. They are recognised by identity, so that no head gets a second pair of them.
"""

import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from torchoffload._core import core
from torchoffload._pytorch import hook_stack
from torchoffload._pytorch.hook_stack import Role
from torchoffload._pytorch.module_hooks import remove_forward_hooks
from torchoffload._pytorch.module_wrappers import INNER_NAMES_OF_MODELS, PEFT

__all__ = ["find_heads", "install_head_hooks", "remove_head_hooks"]

_HEAD_NAMES = ("output", "lm_head", "head")
_NESTED_NAMES = ("decoder", "language_model", "model", "text_model")

_install_lock = threading.Lock()


def _attribute(owner: object, name: str) -> Any:
    """Return an attribute of a module that we did not write; None if there is none, or if reading it raises an error.

    A property of a model that is only half built may raise anything.
    """
    try:
        return getattr(owner, name, None)
    except Exception:
        return None


def _output_embeddings(model: nn.Module) -> Any:
    """Ask the model itself for its head. Models of Hugging Face can be asked; some without a head raise an error."""
    get_output_embeddings = _attribute(model, "get_output_embeddings")
    try:
        return get_output_embeddings() if callable(get_output_embeddings) else None
    except Exception:
        return None


def _modules_to_hook(head: object) -> Iterator[nn.Module]:
    """Yield the modules whose forward computes the head.

    That is ``head`` itself, the modules in it if it is a list or a dictionary, or the ``linear`` of a tied head.
    """
    if isinstance(head, (nn.ModuleList, nn.ModuleDict)):
        children = head.values() if isinstance(head, nn.ModuleDict) else head
        for child in children:
            yield from _modules_to_hook(child)
    elif isinstance(head, nn.Module):
        yield head
    elif isinstance(linear := _attribute(head, "linear"), nn.Module):  # torchtune's TiedLinear is no module
        yield linear


def _own_heads(model: nn.Module) -> list[nn.Module]:
    candidates = [_attribute(model, name) for name in _HEAD_NAMES]
    candidates.append(_output_embeddings(model))
    return [module for candidate in candidates if candidate is not None for module in _modules_to_hook(candidate)]


def _inner_models(model: nn.Module) -> list[nn.Module]:
    inner = [_attribute(model, name) for name in (*INNER_NAMES_OF_MODELS, *_NESTED_NAMES)]
    # Only of PEFT: models of Hugging Face also have a `base_model`, which is their body without the head.
    if _attribute(model, "peft_config") is not None:
        inner.append(_attribute(model, PEFT))
    return [module for module in inner if isinstance(module, nn.Module)]


def find_heads(model: nn.Module) -> list[nn.Module]:
    """Return the output heads of ``model``, looking through wrappers and nested models until one level has any.

    Returns
    -------
    list of torch.nn.Module
        Usually one module. Empty if no head was found.
    """
    level, seen = [model], {id(model)}
    while level:
        heads = {id(head): head for candidate in level for head in _own_heads(candidate)}
        if heads:
            return list(heads.values())
        level = [inner for candidate in level for inner in _inner_models(candidate)]
        level = list({id(inner): inner for inner in level if id(inner) not in seen}.values())
        seen.update(id(inner) for inner in level)
    return []


def _enter_head(head: nn.Module, _inputs: Any) -> None:
    # A compiled region saves its tensors after its whole forward, when this hook is over. So it must not be traced.
    if torch.compiler.is_compiling():
        return
    hook_stack.drop_ended()
    innermost = hook_stack.innermost()
    frame = sys._getframe(1)
    if isinstance(getattr(hook_stack.top_pack_hook(), "__self__", None), core.Context):
        hook_stack.push(head, Role.HEAD, saved_tensors_hooks(core.noop_pack, core.unpack), frame)
    elif innermost is not None and innermost.owner is head:
        # The head called itself. An entry without hooks keeps each call paired with its end.
        hook_stack.push(head, Role.HEAD, None, frame)
    # Otherwise the head's saved tensors go to hooks of somebody else, such as those of a checkpoint, which count the
    # tensors they get; or there are no hooks at all.


def _leave_head(head: nn.Module, _inputs: Any, _output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    hook_stack.leave(head)


def _install(head: nn.Module) -> None:
    if _enter_head in head._forward_pre_hooks.values() and _leave_head in head._forward_hooks.values():
        return
    remove_forward_hooks(head, _enter_head, _leave_head)
    head.register_forward_pre_hook(_enter_head, prepend=True)
    head.register_forward_hook(_leave_head, always_call=True)


def install_head_hooks(model: nn.Module) -> int:
    """Exempt the output heads of ``model`` from offloading. A head that is exempt already is left as it is.

    Returns
    -------
    int
        The number of heads that were found.
    """
    heads = find_heads(model)
    with _install_lock:
        for head in heads:
            _install(head)
    return len(heads)


def remove_head_hooks(model: nn.Module) -> int:
    """Remove the hooks from all modules of ``model``, and from a tied head, which is no module of the model.

    Returns
    -------
    int
        The number of modules that had the hooks.
    """
    modules = {id(module): module for module in (*model.modules(), *find_heads(model))}
    with _install_lock:
        return sum(remove_forward_hooks(module, _enter_head, _leave_head) for module in modules.values())
