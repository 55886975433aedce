"""A copy of a model and its arguments without memory: its tensors are fake, and it shares nothing with the model."""

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from torchoffload._fit.choosing.collector import leaves_in
from torchoffload._fit.choosing.leftovers import DryMode
from torchoffload._pytorch.compiled_calls import called_modules
from torchoffload._pytorch.module_wrappers import COMPILED, COMPILED_FROM

__all__ = ["FakeCopy", "cannot_be_copied"]

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
# transformers registers hooks once that collect the hidden states of a model, and remembers it here. They are not
# copied, so it has to register them on the copy: some models give the hidden states to a head of their own.
_COLLECTS = "_output_capturing_hooks_installed"
_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)


def cannot_be_copied(model: nn.Module) -> str | None:
    """Return why a forward of a copy of the model would do more than compute, or would differ from the model's."""
    if any(getattr(torch_module, name) for name in _GLOBAL_HOOKS):
        return "hooks on all modules are registered"
    if _get_current_dispatch_mode_stack():
        return "a dispatch mode is active"
    function_modes: Any = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if any(not isinstance(mode, DeviceContext) for mode in function_modes):
        return "a mode for functions is active"
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            return f"{name or 'the model'} is a TorchScript module, which would run for real"
        if not _calls_itself(module):
            return f"{name or 'the model'} has a forward of another object, which would not be that of a copy"
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if type(tensor) not in _TENSORS:
            return f"{name} is a {type(tensor).__name__}"
    return None


def _calls_itself(module: nn.Module) -> bool:
    """Return whether the forward of a module is a method of it, so that the copy's is a method of the copy."""
    forward = None if COMPILED in module._modules else module.__dict__.get("forward")
    forward = getattr(forward, COMPILED_FROM, forward)
    return forward is None or getattr(forward, "__self__", None) is module


class _Fakes(TorchFunctionMode):
    """While something is deep-copied, the copies of its tensors are fake."""

    def __init__(self, of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.of = of

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self.of(tensor)
            return memo[id(tensor)]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class FakeCopy:
    """A copy of a model and of the arguments of a call.

    Hooks are not copied. Neither is compiled code: the copy runs the code that it was compiled from.

    Parameters
    ----------
    model : nn.Module
        The model.
    arguments : tuple
        The positional and the keyword arguments of the call.
    make_fake : callable, optional
        Makes the fake tensor of a tensor under the mode that it is given. Default: one that is like the tensor.

    Attributes
    ----------
    mode : DryMode
        The mode under which the copy can be called.
    model, arguments : nn.Module, tuple
        The copies.
    originals : dict of nn.Module to nn.Module
        For each module of the copy that is called the module of the model that it stands for. A compiled module is one
        module, whatever modules are inside.
    """

    def __init__(
        self,
        model: nn.Module,
        arguments: Any,
        make_fake: Callable[[DryMode, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.mode = mode = DryMode(allow_non_fake_inputs=True)
        make = make_fake or _like
        modules = list(model.modules())
        memo: dict[int, Any] = {}
        for module in modules:
            for name in _HOOKS:
                hooks = getattr(module, name)
                memo[id(hooks)] = type(hooks)()
        for leaf in leaves_in([[vars(module) for module in modules], arguments]):
            if isinstance(leaf, torch.Generator):  # it would be copied by way of a tensor
                memo[id(leaf)] = leaf.clone_state()
        with _Fakes(lambda tensor: make(mode, tensor)) as fakes:
            with mode.giving_addresses():
                recurrent = [each for each in modules if isinstance(each, nn.RNNBase)]
                memo |= {id(each): fakes.of(each) for layer in recurrent for each in layer.parameters()}
            for tensor in [*model.parameters(), *model.buffers()]:
                if id(tensor) not in memo:
                    memo[id(tensor)] = fakes.of(tensor)
            copied, self.arguments = copy.deepcopy((model, arguments), memo)
        for module in modules:
            _take_compiled_away(memo[id(module)])
            _take_cudnn_dropout_away(memo[id(module)])
            if isinstance(module, nn.RNNBase):
                _give_addresses(memo[id(module)], mode)
            vars(memo[id(module)]).pop(_COLLECTS, None)
        self.model = getattr(copied, COMPILED) if COMPILED in copied._modules else copied
        self.originals = {
            memo[id(getattr(each, COMPILED) if COMPILED in each._modules else each)]: each
            for each in called_modules(model)
        }


def _like(mode: DryMode, tensor: torch.Tensor) -> torch.Tensor:
    return mode.from_tensor(tensor, static_shapes=True)


def _take_cudnn_dropout_away(module: nn.Module) -> None:
    """Have a copied recurrent layer on CUDA drop nothing out.

    cuDNN keeps the state of its dropout in a table of libtorch's, which a dry run would fill with a tensor without
    data, and for which it would use up the seed. No operator's output has another size without dropout.
    """
    if isinstance(module, nn.RNNBase) and any(each.device.type == "cuda" for each in module.parameters()):
        module.dropout = 0.0


def _give_addresses(module: nn.Module, mode: DryMode) -> None:
    """Have a copied recurrent layer run where tensors give addresses: PyTorch compares those of its weights.

    Its results give none to others.
    """
    forward = module.forward

    def in_mode(*args: Any, **kwargs: Any) -> Any:
        with mode.giving_addresses():
            results = forward(*args, **kwargs)
        for leaf in tree_leaves(results):
            if isinstance(leaf, torch.Tensor):
                torch._C._set_throw_on_mutable_data_ptr(leaf)
        return results

    module.forward = in_mode


def _take_compiled_away(module: nn.Module) -> None:
    """Have a copied module run its original forward, and not the compiled one."""
    forward = module.__dict__.get("forward")
    original = getattr(forward, COMPILED_FROM, None)
    if original is not None and COMPILED not in module._modules:
        module.forward = MethodType(original.__func__, module)
    for name, child in module._modules.items():
        if child is not None and COMPILED in child._modules:
            module._modules[name] = child._modules[COMPILED]
