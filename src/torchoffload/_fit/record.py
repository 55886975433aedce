"""Recording one call of a block: its operators, what they read, make and write, how long they take, what is saved."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchoffload._core import core
from torchoffload._fit.operators import Kind, draws_by_tag, is_counted, kind_of, storages, tensors, written

__all__ = ["BlockRecord", "OperatorCall", "Recorder"]


@dataclass(kw_only=True)
class OperatorCall:
    """One call of a counted operator. Storages are named by numbers, in the order in which they were first seen.

    Attributes
    ----------
    operator : operator
        What was called.
    duration_ns : int
        How long it took on its device.
    reads, makes, writes, returns : frozenset of int
        The storages of its arguments; those that it made; those that it wrote to and did not make; those that it
        returned.
    draws : bool
        Whether it drew random numbers, or its tags say that it may.
    returns_arguments : bool
        Whether each tensor that it returned is one of its arguments itself, as of an operator in place.
    """

    operator: Any
    duration_ns: int = 0
    reads: frozenset[int]
    makes: frozenset[int]
    writes: frozenset[int]
    returns: frozenset[int]
    draws: bool
    returns_arguments: bool


@dataclass
class BlockRecord:
    """What one call of a block did.

    Attributes
    ----------
    operators : list of OperatorCall
        In the order of the calls.
    nbytes : dict of int to int
        The size of each storage in bytes.
    inputs : frozenset of int
        The storages of the block's arguments.
    saved : frozenset of int
        The storages of what autograd saved.
    """

    operators: list[OperatorCall] = field(default_factory=list)
    nbytes: dict[int, int] = field(default_factory=dict)
    inputs: frozenset[int] = frozenset()
    saved: frozenset[int] = frozenset()


_weak: Any = StorageWeakRef  # the class has no annotations


class _Numbers:
    """Numbers for storages. An address names another storage once its storage is gone, so storages are held weakly."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, object]] = {}
        self.nbytes: dict[int, int] = {}

    def of(self, storage: torch.UntypedStorage) -> int:
        known = self._known.get(storage._cdata)
        if known is None:
            known = self._known[storage._cdata] = (len(self._known), _weak(storage))
            self.nbytes[known[0]] = storage.nbytes()
        return known[0]

    def of_all(self, value: Any) -> frozenset[int]:
        return frozenset(self.of(storage) for storage in storages(value))

    @property
    def count(self) -> int:
        return len(self._known)


class _Clock:
    """Moments on the device that computes, and the time between two of them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter_ns()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def between_ns(self, begin: Any, end: Any) -> int:
        if self._device.type == "cpu":
            return int(end - begin)
        end.synchronize()
        return int(begin.elapsed_time(end) * 1e6)


class _Generators:
    """The states of the random number generators that a block may draw from."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = [device for device in set(devices) if device.type not in {"cpu", "meta"}]

    def states(self) -> list[torch.Tensor]:
        return [torch.get_rng_state()] + [
            torch.get_device_module(device.type).get_rng_state(device) for device in self._devices
        ]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that records the call of a block that is made inside it.

    Parameters
    ----------
    module : nn.Module
        The block. Its buffers are looked at before and after each operator that reads them: some operators write to
        them and neither their schemas nor the buffers' versions say so.
    inputs : nest of containers
        The arguments of the call.
    """

    def __init__(self, module: nn.Module, inputs: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = BlockRecord()
        self._numbers = numbers = _Numbers()
        self.record.nbytes = numbers.nbytes
        self.record.inputs = numbers.of_all(inputs)
        numbers.of_all(list(module.parameters()))
        self._buffers = numbers.of_all(list(module.buffers()))
        self._saved: set[int] = set()
        self._moments: list[tuple[Any, Any]] = []
        devices = [tensor.device for tensor in tensors((inputs, list(module.parameters())))]
        self._clock = _Clock(next(iter(devices), torch.device("cpu")))
        self._generators = _Generators(devices)
        self._hooks: saved_tensors_hooks | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled regions compiled; a compiled region is one operator."""
        return True

    def __enter__(self) -> Self:
        pack, unpack = _hooks_in_force()

        def note(tensor: torch.Tensor) -> object:
            self._saved |= self._numbers.of_all(tensor)
            return pack(tensor)

        self._hooks = saved_tensors_hooks(note, unpack)
        self._hooks.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if self._hooks is not None:
            self._hooks.__exit__(*exception)
        self.record.saved = frozenset(self._saved)
        for call, (begin, end) in zip(self.record.operators, self._moments, strict=True):
            call.duration_ns = self._clock.between_ns(begin, end)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if not is_counted(func, args):
            output = func(*args, **keywords)
            if kind_of(func) is not Kind.VIEW:
                self._numbers.of_all(output)
            return output
        arguments = (args, keywords)
        reads = self._numbers.of_all(arguments)
        before = self._buffer_values(arguments)
        generators = self._generators.states()
        count = self._numbers.count
        begin = self._clock.now()
        output = func(*args, **keywords)
        self._moments.append((begin, self._clock.now()))
        returns = self._numbers.of_all(output)
        writes = set(self._numbers.of_all(written(func, args, keywords)))
        writes |= {number for number, buffer, value in before if not torch.equal(buffer, value)}
        states = self._generators.states()
        has_drawn = not all(torch.equal(old, new) for old, new in zip(generators, states, strict=True))
        given = {id(leaf) for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)}
        returned = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        self.record.operators.append(
            OperatorCall(
                operator=func,
                reads=reads,
                makes=frozenset(number for number in returns if number >= count),
                writes=frozenset(writes),
                returns=returns,
                draws=has_drawn or draws_by_tag(func),
                returns_arguments=all(id(leaf) in given for leaf in returned),
            )
        )
        return output

    def _buffer_values(self, arguments: Any) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Return number, tensor and a copy of each buffer of the block among the arguments."""
        return [
            (number, tensor, tensor.clone())
            for tensor in tensors(arguments)
            for number in self._numbers.of_all(tensor) & self._buffers
        ]


def _hooks_in_force() -> tuple[Callable[[torch.Tensor], object], Callable[[Any], torch.Tensor]]:
    """Return the pack and the unpack hook that autograd would call; without any, hooks that change nothing."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return (core.noop_pack, core.unpack) if hooks is None else hooks
