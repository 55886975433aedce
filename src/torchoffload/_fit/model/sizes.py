"""The sizes of calls, by the bytes of their arguments' tensors, and the states that tell a block's calls apart."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchoffload._pytorch.compiled_calls import add_call_hooks, remove_call_hooks
from torchoffload._pytorch.tracing import is_transformed

__all__ = ["BlockCalls", "argument_bytes", "is_watched", "state_of_block", "tensors_in"]

_MOST_OBJECTS = 256  # that are looked into for tensors
_PLAIN = (int, float, str, bytes, bool, complex, type, torch.dtype, torch.device, torch.Size, nn.Module)


def argument_bytes(value: Any) -> int:
    """Return the bytes of the tensors in arguments: in tuples, lists, dicts, and the attributes of objects."""
    return sum(map(_bytes_of, tensors_in(value)))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in tuples, lists, dicts, and the attributes of objects, at any depth."""
    waiting, seen = [value], {id(value)}
    looked_into = 0
    while waiting:
        each = waiting.pop()
        if isinstance(each, torch.Tensor):
            yield each
            continue
        looked_into += 1
        if looked_into > _MOST_OBJECTS:
            break
        for inner in _parts_of(each):
            if inner is not None and not isinstance(inner, _PLAIN) and id(inner) not in seen:
                seen.add(id(inner))
                waiting.append(inner)


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _parts_of(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (tuple, list, set, frozenset)):
        return list(value)
    slots = (getattr(value, name, None) for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
    return [*getattr(value, "__dict__", {}).values(), *slots]


def state_of_block(module: nn.Module, inputs: Any) -> Any:
    """Return a value by which a block's calls differ beside the shapes of their arguments.

    Its modules and their modes, its parameters, which of these and of the arguments want gradients, and autocast.
    """
    modules = tuple((type(each), each.training) for each in module.modules())
    parameters = tuple((_shape_of(each), each.dtype, each.requires_grad) for each in module.parameters())
    given = [each for each in _flat(inputs) if isinstance(each, torch.Tensor)]
    arguments = tuple((each.dtype, each.requires_grad, each.dim()) for each in given)
    device_type = next((each.device.type for each in given), "cpu")
    autocast = torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type)
    return modules, parameters, arguments, autocast


def _shape_of(parameter: torch.Tensor) -> tuple[int, ...] | None:
    return None if is_lazy(parameter) else tuple(parameter.shape)


def _flat(inputs: Any) -> Iterable[Any]:
    args, kwargs = inputs
    for each in (*args, *kwargs.values()):
        if isinstance(each, (tuple, list)):
            yield from each
        else:
            yield each


_watched: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[BlockCalls]]" = weakref.WeakKeyDictionary()


def is_watched(module: nn.Module) -> bool:
    """Return whether a module is a block of a fitted model that still exists."""
    calls = None if (reference := _watched.get(module)) is None else reference()
    return calls is not None and calls.has_model()


class BlockCalls:
    """Light hooks on blocks, which tell of the arguments of each call, under any plan.

    In each step they look at the state of one call of a block more closely, another one each time.

    Parameters
    ----------
    tell : callable
        Called with the bytes of the arguments of each call with gradients.
    tell_state : callable
        Called with the state of the block that is looked at.
    tell_output : callable, optional
        Called with the output of each call with gradients.
    has_model : callable, optional
        Returns whether the model still exists that the blocks belong to.
    """

    def __init__(
        self,
        tell: Callable[[int], None],
        tell_state: Callable[[Any], None],
        tell_output: Callable[[Any], None] = lambda _output: None,
        has_model: Callable[[], bool] = lambda: True,
    ) -> None:
        self._tell, self._tell_state, self.tell_output, self.has_model = tell, tell_state, tell_output, has_model
        self._blocks: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._number = 0  # of the next call in the step
        self._looked_at, self._looks_at_all = 0, True  # the number of the call to look at

    def watch(self, blocks: Iterable[nn.Module]) -> None:
        """Install the hooks on blocks, which are held weakly."""
        for block in blocks:
            remove_call_hooks(block, _enter, _leave)
            # In front of all others: fit's other hook has to be the last one before forward.
            add_call_hooks(block, _enter, _leave, outermost=True)
            self._blocks.add(block)
            _watched[block] = weakref.ref(self)

    def note(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Take notice of a call."""
        nbytes = 0
        for each in (*args, *kwargs.values()):
            nbytes += _bytes_of(each) if isinstance(each, torch.Tensor) else 0
        if nbytes == 0 and (args or kwargs):
            nbytes = argument_bytes((args, kwargs))
        self._tell(nbytes)
        if self._looks_at_all or self._number == self._looked_at:
            self._tell_state(state_of_block(module, (args, kwargs)))
        self._number += 1

    def begin_step(self, *, looks_at_all: bool = False) -> None:
        """Look at another call than before, or at all of them."""
        self._looks_at_all = looks_at_all
        if self._number > 0:
            self._looked_at = self._looked_at + 1 if self._looked_at < self._number - 1 else 0
        self._number = 0

    def remove(self) -> None:
        """Take the hooks away."""
        for block in self._blocks:
            if (reference := _watched.get(block)) is not None and reference() is self:  # not another model's by now
                remove_call_hooks(block, _enter, _leave)
                del _watched[block]
        self._blocks.clear()


def _calls_of(module: nn.Module) -> BlockCalls | None:
    """Return the object to tell of a call: of a block, and no copy of one, with gradients, and not in backward."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
        return None
    if is_transformed():
        return None
    reference = _watched.get(module)
    return None if reference is None else reference()


def _enter(module: nn.Module, args: Any, kwargs: Any = None) -> None:
    calls = _calls_of(module)
    if calls is not None:
        # PyTorch leaves the keywords out if an earlier hook of this very call has registered this one anew.
        calls.note(module, args, kwargs or {})


def _leave(module: nn.Module, _args: Any, output: Any) -> None:
    calls = _calls_of(module)
    if calls is not None:
        calls.tell_output(output)
