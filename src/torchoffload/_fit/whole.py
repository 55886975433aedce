"""Blocks that are compiled, or that have compiled modules inside: each is one operator.

No operators are seen in what torch.compile has made, and its kernels allocate past PyTorch's dispatcher. So such a
block is a whole: all that it saves is kept, or moves, or its compiled call is made again in backward, as
``torch.utils.checkpoint`` does it.
"""

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any, Self

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_unflatten

from torchoffload._fit.agreement import communicated, counts_of_groups
from torchoffload._fit.operators import tensors
from torchoffload._fit.record import BlockRecord, Clock, Numbers, OperatorCall, hooks_in_force
from torchoffload._fit.replay import Watch

__all__ = ["COMPILED_CALL", "WholeRecorder", "call_again"]


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
        self._numbers = Numbers()
        self._state: list[torch.Tensor] = [*module.parameters(), *module.buffers()]
        self._inputs = inputs
        self.record.nbytes = self._numbers.nbytes
        self.record.inputs = self._numbers.of_all(inputs)
        self.record.own = self._numbers.of_all(self._state)
        self._saved: set[int] = set()
        self._clock = Clock(next((each.device for each in tensors((inputs, self._state))), torch.device("cpu")))

    def _versions(self) -> list[int]:
        return [each._version for each in [*self._state, *tensors(self._inputs)] if not each.is_inference()]

    def __enter__(self) -> Self:
        pack, unpack = hooks_in_force()

        def note(tensor: torch.Tensor) -> object:
            self._saved |= self._numbers.of_all(tensor)
            return pack(tensor)

        # Below a frame that Dynamo has given up it would trace the hook.
        disable: Any = torch._dynamo.disable
        self._hooks = saved_tensors_hooks(disable(note), unpack)
        self._before, self._group_counts = self._versions(), counts_of_groups()
        self._hooks.__enter__()
        self._begin = self._clock.now()
        return self

    def __exit__(self, *exception: object) -> None:
        end = self._clock.now()
        self._hooks.__exit__(*exception)
        record = self.record
        record.saved, record.groups = frozenset(self._saved), communicated(self._group_counts)
        makes = record.saved - record.inputs - record.own
        record.made = set(makes)
        # As BatchNorm's statistics: a second call would write to them a second time.
        record.has_hidden_writes = self._versions() != self._before
        record.operators.append(
            OperatorCall(
                operator=COMPILED_CALL,
                duration_ns=self._clock.between_ns(self._begin, end),
                reads=record.inputs | record.own,
                makes=makes,
                writes=frozenset(),
                returns=frozenset(),
                draws=False,  # a second call draws what the first one did
            )
        )


def call_again(
    checkpoint: Callable[..., Generator[None, None, None]],
    call: Callable[..., Any],
    watch: Watch,
    flat: list[Any],
    structure: Any,
) -> Generator[None, None, None]:
    """Return PyTorch's generator around a call that is made again in backward.

    Parameters
    ----------
    checkpoint : callable
        ``_checkpoint_without_reentrant_generator``.
    call : callable
        The compiled call.
    watch : Watch
        What is told of the second call.
    flat, structure : list, TreeSpec
        The arguments.
    """

    def forward(*leaves: Any) -> None:
        positional, keywords = tree_unflatten(list(leaves), structure)
        if watch.times_operators:
            watch.timed(0, lambda: call(*positional, **keywords))
        else:
            call(*positional, **keywords)

    @contextlib.contextmanager
    def recomputation() -> Iterator[None]:
        watch.begins_again()
        try:
            yield
        finally:
            watch.ends_again()

    return checkpoint(forward, True, lambda: (contextlib.nullcontext(), recomputation()), "default", False, True, *flat)
