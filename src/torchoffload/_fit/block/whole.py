"""Blocks that are compiled, or that have compiled modules inside: each is one operator.

No operators are seen in code that torch.compile has made, and its kernels allocate past PyTorch's dispatcher. So such a
block is a whole: all that it saves is kept, or moves, or its compiled call is made again in backward, as
``torch.utils.checkpoint`` does it.
"""

import contextlib
import inspect
from collections.abc import Callable, Generator, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._pytree import tree_flatten, tree_unflatten

from torchoffload._core import core
from torchoffload._devices import meter_for
from torchoffload._fit.block.record import BlockRecord, OperatorCall
from torchoffload._fit.block.replay import Watch
from torchoffload._fit.machine.agreement import communicated, counts_of_groups
from torchoffload._fit.machine.operators import storages, tensors
from torchoffload._pytorch.compiled_calls import compiled_call

__all__ = ["COMPILED_CALL", "WholeRecorder", "call_again", "can_checkpoint", "whole_call"]

_checkpoint: Any = getattr(torch_checkpoint, "_checkpoint_without_reentrant_generator", None)
_PARAMETERS = ("fn", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop", "args")
_MOST_OF_STORAGE = 4  # times the bytes of a tensor, for its storage to be copied
_weak: Any = StorageWeakRef  # the class has no annotations


def can_checkpoint() -> bool:
    """Return whether this version of torch has the checkpoint by which a compiled call is made again."""
    return (
        _checkpoint is not None and tuple(inspect.signature(_checkpoint).parameters)[: len(_PARAMETERS)] == _PARAMETERS
    )


class _Numbers:
    """Numbers for storages. An address names another storage once its storage is gone, so storages are held weakly."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, Any]] = {}
        self.nbytes: dict[int, int] = {}

    def of(self, storage: torch.UntypedStorage) -> int:
        known = self._known.get(storage._cdata)
        if known is None:
            known = self._known[storage._cdata] = (len(self._known), _weak(storage))
            self.nbytes[known[0]] = storage.nbytes()
        return known[0]

    def of_all(self, value: Any) -> frozenset[int]:
        return frozenset(self.of(storage) for storage in storages(value))


def _hooks_in_force() -> tuple[Callable[[torch.Tensor], object], Callable[[Any], torch.Tensor]]:
    """Return the pack and the unpack hook that autograd would call; without any, hooks that change nothing."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return (core.noop_pack, core.unpack) if hooks is None else hooks


def _draws_outside_of_generators(module: nn.Module) -> bool:
    """Return whether cuDNN would draw the module's dropout from a state of its own, which nobody can set back."""
    return (
        isinstance(module, nn.RNNBase)
        and module.training
        and module.dropout > 0
        and any(each.device.type != "cpu" for each in module.parameters())
    )


class _CompiledCall:
    """Stands for the call of a block among the operators of its record."""

    __name__ = "compiled_call"
    namespace = "torchoffload"

    def __str__(self) -> str:
        return self.__name__


COMPILED_CALL = _CompiledCall()


class WholeRecorder:
    """A context that records a call of a block as one operator.

    Parameters
    ----------
    module : nn.Module
        The block.
    inputs : nest of containers
        The arguments of the call.
    """

    def __init__(self, module: nn.Module, inputs: Any) -> None:
        self.record = BlockRecord()
        self._numbers = _Numbers()
        self._module = module
        self._state: list[torch.Tensor] = [*module.parameters(), *module.buffers()]
        self._inputs = inputs
        self.record.nbytes = self._numbers.nbytes
        self.record.inputs = self._numbers.of_all(inputs)
        self.record.own = self._numbers.of_all(self._state)
        self._saved: set[int] = set()
        self._meter = meter_for(next((each.device for each in tensors((inputs, self._state))), torch.device("cpu")))

    def _versions(self) -> list[int]:
        return [each._version for each in [*self._state, *tensors(self._inputs)] if not each.is_inference()]

    def __enter__(self) -> Self:
        pack, unpack = _hooks_in_force()

        def note(tensor: torch.Tensor) -> object:
            self._saved |= self._numbers.of_all(tensor)
            return pack(tensor)

        # Below a frame that Dynamo has given up it would trace the hook.
        disable: Any = torch._dynamo.disable
        self._hooks = saved_tensors_hooks(disable(note), unpack)
        self._before, self._group_counts = self._versions(), counts_of_groups()
        self._hooks.__enter__()
        self._begin = self._meter.now()
        return self

    def __exit__(self, *exception: object) -> None:
        end = self._meter.now()
        self._hooks.__exit__(*exception)
        record = self.record
        record.saved, record.groups = frozenset(self._saved), communicated(self._group_counts)
        makes = record.saved - record.inputs - record.own
        record.made = set(makes)
        # As BatchNorm's statistics: a second call would write to them a second time.
        if self._versions() != self._before:
            record.refusal = "it is compiled, and writes to parameters, buffers or arguments: a second call would, too"
        elif any(map(_draws_outside_of_generators, self._module.modules())):
            record.refusal = "it is compiled, and has a recurrent layer with dropout: a second call would draw others"
        elif not can_checkpoint():
            record.refusal = "it is compiled, and this version of torch has another checkpoint than fit knows"
        record.epochs = dict.fromkeys(record.nbytes, 0) | dict.fromkeys(makes, 1)
        record.operators.append(
            OperatorCall(
                operator=COMPILED_CALL,
                duration_ns=int(1e9 * self._meter.between_s(self._begin, end)),
                reads=frozenset((number, 0) for number in record.inputs | record.own),
                makes=makes,
                writes=frozenset(),
                draws=False,  # a second call draws the same numbers as the first
            )
        )


def call_again(
    checkpoint: Callable[..., Generator[None, None, None]],
    call: Callable[..., Any],
    watch: Watch,
    flat: list[Any],
    structure: Any,
    copies: Mapping[int, Any] = MappingProxyType({}),
) -> Generator[None, None, None]:
    """Return PyTorch's generator around a call that is made again in backward.

    Parameters
    ----------
    checkpoint : callable
        ``_checkpoint_without_reentrant_generator``.
    call : callable
        The compiled call.
    watch : Watch
        The watch that is told of the second call.
    flat, structure : list, TreeSpec
        The arguments.
    copies : mapping of int to CopiedInput
        Copies of those that the program may write to. The second call is given these.
    """
    # A copy has no history. As a leaf that requires gradients it would be taken for a parameter, and would not move.
    wants_gradients = [number in copies and each.requires_grad for number, each in enumerate(flat)]
    held = [copies[number].tensor if number in copies else each for number, each in enumerate(flat)]

    def with_gradients(leaf: Any, wants_gradients: bool) -> Any:
        return leaf.detach().requires_grad_() if wants_gradients else leaf

    def forward(*leaves: Any) -> None:
        positional, keywords = tree_unflatten(list(map(with_gradients, leaves, wants_gradients)), structure)
        begin = watch.now() if watch.times_operators else None
        call(*positional, **keywords)
        if watch.times_operators:
            watch.timed({0: (begin, watch.now())})

    @contextlib.contextmanager
    def recomputation() -> Iterator[None]:
        if any(each.was_written for each in copies.values()):
            watch.inputs_were_written()
        watch.begins_again()
        try:
            yield
        finally:
            watch.ends_again()

    return checkpoint(forward, True, lambda: (contextlib.nullcontext(), recomputation()), "default", False, True, *held)


def _copies_of(leaves: list[Any]) -> dict[int, Any]:
    return {number: core.CopiedInput(leaf) for number, leaf in enumerate(leaves) if _may_be_written(leaf)}


def _may_be_written(leaf: object) -> bool:
    """Return whether an argument is a plain tensor that the program may write to, and no parameter."""
    if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or leaf.is_inference() or not leaf.numel():
        return False
    # A batch of a data set that is on the device is a small part of a large storage.
    is_part = leaf.untyped_storage().nbytes() > _MOST_OF_STORAGE * leaf.numel() * leaf.element_size()
    return not is_part and not (leaf.is_leaf and leaf.requires_grad)


def whole_call(
    module: nn.Module, watch: Watch, args: Any, kwargs: Any, has_returned: Callable[[], bool]
) -> Generator[None, None, None]:
    """Return a generator around a call of a compiled block, to be advanced once before and once after the call.

    Parameters
    ----------
    module : nn.Module
        The block.
    watch : Watch
        The watch of the call, with the plan that it follows.
    args, kwargs : tuple, dict
        The arguments.
    has_returned : callable
        Returns, after the call, whether it returned.
    """
    if watch.records:
        with WholeRecorder(module, (args, kwargs)) as recorder:
            yield
        if has_returned():
            watch.recorded(recorder.record)
    elif watch.plan is not None and watch.plan.operators == (COMPILED_CALL,):
        flat, structure = tree_flatten((args, kwargs))
        copies = _copies_of(flat) if watch.plan.copies_inputs else {}
        yield from call_again(_checkpoint, compiled_call(module), watch, flat, structure, copies)
    else:
        yield
