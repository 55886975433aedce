"""Recording one call of a block: its operators, what they read, make and write, how long they take, what is saved."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchoffload._core import core
from torchoffload._fit.agreement import communicated, counts_of_groups, wait_for, wait_for_all
from torchoffload._fit.operators import (
    Kind,
    addresses,
    communicates,
    draws_by_tag,
    has_storage,
    is_counted,
    kind_of,
    made_by,
    scalars,
    storages,
    takes_generator,
    tensors,
    to_one_rank,
    written,
)
from torchoffload._fit.values import LinkShares, Values, bytes_of

__all__ = ["BlockRecord", "Clock", "Numbers", "OperatorCall", "Recorder", "hooks_in_force"]


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
    returns_tensors : bool
        Whether it returned any tensor, also one without a storage of its own, as sparse ones are.
    leaves_uninitialised : bool
        Whether it left what it made for somebody else to fill.
    takes_generator : bool
        Whether it was given a random number generator.
    scalars : tuple or None
        For an operator that PyTorch does not know, the numbers and the like among its arguments.
    """

    operator: Any
    duration_ns: int = 0
    reads: frozenset[int]
    makes: frozenset[int]
    writes: frozenset[int]
    returns: frozenset[int]
    draws: bool
    returns_tensors: bool = True
    leaves_uninitialised: bool = False
    takes_generator: bool = False
    scalars: tuple[Any, ...] | None = None


@dataclass
class BlockRecord:
    """What one call of a block did.

    Attributes
    ----------
    operators : list of OperatorCall
        In the order of the calls.
    nbytes : dict of int to int
        The size of each storage in bytes.
    link_shares : dict of int to float
        The part of a storage's bytes that the link carries, if it moves, where that is less than 1.
    inputs : frozenset of int
        The storages of the block's arguments.
    own : frozenset of int
        The storages of the block's parameters and buffers.
    made : set of int
        The storages that were made in the call.
    saved : frozenset of int
        The storages of what autograd saved, and of what code has read past PyTorch's dispatcher.
    has_hidden_writes : bool
        Whether a value changed and no operator wrote to it: a kernel did that was called past PyTorch's dispatcher.
    groups : tuple of ProcessGroup
        The groups of ranks that called collectives in it.
    """

    operators: list[OperatorCall] = field(default_factory=list)
    nbytes: dict[int, int] = field(default_factory=dict)
    link_shares: dict[int, float] = field(default_factory=dict)
    inputs: frozenset[int] = frozenset()
    own: frozenset[int] = frozenset()
    made: set[int] = field(default_factory=set)
    saved: frozenset[int] = frozenset()
    has_hidden_writes: bool = False
    groups: tuple[Any, ...] = ()

    def link_share_of(self, storages: Iterable[int]) -> float:
        """Return the part of the bytes of several storages that the link carries."""
        sizes = {number: self.nbytes[number] for number in storages}
        on_link = sum(nbytes * self.link_shares.get(number, 1.0) for number, nbytes in sizes.items())
        return on_link / (sum(sizes.values()) or 1) if on_link else 1.0


_weak: Any = StorageWeakRef  # the class has no annotations
_aten = torch.ops.aten
_UNINITIALISED = frozenset(
    (
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    )
)


class Numbers:
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

    def alive(self) -> Iterator[tuple[int, torch.UntypedStorage]]:
        """Yield number and storage of those that are still there."""
        for number, weak in self._known.values():
            storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is not None:
                yield number, storage


class Clock:
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


_DATA: Any = torch.Tensor.data
_READS = frozenset(
    (
        torch.Tensor.__array__,
        torch.Tensor.__dlpack__,
        _DATA.__get__,
        torch.Tensor.data_ptr,
        torch.Tensor.numpy,
        torch.Tensor.storage,
        torch.Tensor.tolist,
        torch.Tensor.untyped_storage,
    )
)


class _Reads(TorchFunctionMode):
    """Tells of tensors whose bytes are read, or may be, past PyTorch's dispatcher."""

    def __init__(self, tell: Callable[[Any], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READS:
            self._tell(args[:1])
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that records the call of a block that is made inside it.

    Parameters
    ----------
    module : nn.Module
        The block.
    inputs : nest of containers
        The arguments of the call.
    """

    def __init__(self, module: nn.Module, inputs: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = BlockRecord()
        self._numbers = numbers = Numbers()
        self._values = Values()
        self._shares = LinkShares(hooks_in_force()[0])
        self._is_looking = False
        wait_for(inputs)
        self._inputs = addresses(inputs)
        self.record.nbytes, self.record.link_shares = numbers.nbytes, self._shares.known
        self.record.inputs = numbers.of_all(inputs)
        self._note_shares(inputs, self.record.inputs)
        self.record.own = numbers.of_all([*module.parameters(), *module.buffers()])
        self._saved: set[int] = set()
        self._moments: list[tuple[Any, Any]] = []
        devices = [tensor.device for tensor in tensors((inputs, list(module.parameters())))]
        self._clock = Clock(next(iter(devices), torch.device("cpu")))
        self._generators = _Generators(devices)
        self._reads: Any = _Reads(self._note_read)
        self._hooks: saved_tensors_hooks | None = None
        self._group_counts: dict[Any, int] = {}

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled regions compiled; a compiled region is one operator."""
        return True

    def __enter__(self) -> Self:
        pack, unpack = hooks_in_force()
        self._group_counts = counts_of_groups()

        def note(tensor: torch.Tensor) -> object:
            self._saved |= self._numbers.of_all(tensor)
            self._look(tensor)
            return pack(tensor)

        self._hooks = saved_tensors_hooks(note, unpack)
        self._hooks.__enter__()
        self._reads.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._reads.__exit__(*exception)
        if self._hooks is not None:
            self._hooks.__exit__(*exception)
        self.record.saved = frozenset(self._saved)
        self.record.groups = communicated(self._group_counts)
        self._look_at_all()
        for call, (begin, end) in zip(self.record.operators, self._moments, strict=True):
            call.duration_ns = self._clock.between_ns(begin, end)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if self._is_looking:
            return func(*args, **keywords)
        arguments = (args, keywords)
        if not is_counted(func, args, self._inputs):
            output = func(*args, **keywords)
            if kind_of(func) is not Kind.VIEW:
                made = made_by(func, output, arguments)
                numbers = frozenset(self._numbers.of(each) for each in storages(output) if each._cdata in made)
                self.record.made |= numbers
                self._looking(lambda: self._note_shares(output, numbers))
            return output
        self._look(arguments)
        reads = self._numbers.of_all(arguments)
        generators = self._generators.states()
        begin = self._clock.now()
        output = func(*args, **keywords)
        if communicates(func) and not to_one_rank(func):
            self._looking(lambda: wait_for_all(output))
        self._moments.append((begin, self._clock.now()))
        makes = self._numbers.of_all(output) - reads
        self.record.made |= makes
        leaves_uninitialised = func in _UNINITIALISED
        if leaves_uninitialised:  # so that bytes which a kernel writes differ from those that it finds
            self._looking(lambda: [bytes_of(storage).fill_(0xA5) for storage in storages(output)])
        writes = self._numbers.of_all(written(func, args, keywords)) | self._changed(arguments)
        self._looking(lambda: self._note_values((output, arguments), makes | writes))
        states = self._generators.states()
        has_drawn = not all(torch.equal(old, new) for old, new in zip(generators, states, strict=True))
        self.record.operators.append(
            OperatorCall(
                operator=func,
                reads=reads,
                makes=makes,
                writes=writes,
                returns=self._numbers.of_all(output),
                draws=has_drawn or draws_by_tag(func),
                returns_tensors=any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(output)),
                leaves_uninitialised=leaves_uninitialised,
                takes_generator=takes_generator(func, arguments),
                scalars=scalars(func, arguments),
            )
        )
        return output

    def _note_read(self, value: Any) -> None:
        if not self._is_looking:
            self._saved |= self._numbers.of_all(value)

    def _note_values(self, value: Any, numbers: frozenset[int]) -> None:
        for storage in storages(value):
            if (number := self._numbers.of(storage)) in numbers:
                self._values.note(number, storage)
        self._note_shares(value, numbers)

    def _note_shares(self, value: Any, numbers: frozenset[int]) -> None:
        for tensor in tensors(value):
            if has_storage(tensor) and (number := self._numbers.of(tensor.untyped_storage())) in numbers:
                self._shares.note(number, tensor)

    def _looking(self, do: Callable[[], object]) -> None:
        """Do something that is not recorded."""
        was_looking, self._is_looking = self._is_looking, True
        try:
            do()
        finally:
            self._is_looking = was_looking

    def _changed(self, value: Any) -> frozenset[int]:
        """Return the storages of the tensors in ``value`` whose bytes are not what they were when last looked at."""
        changed: set[int] = set()

        def look() -> None:
            for storage in storages(value):
                number = self._numbers.of(storage)
                if storage.device.type != "meta" and self._values.have_changed(number, storage):
                    changed.add(number)

        self._looking(look)
        return frozenset(changed)

    def _look(self, value: Any) -> None:
        """Look for writes that no operator made."""
        if self._changed(value):
            self.record.has_hidden_writes = True

    def _look_at_all(self) -> None:
        for number, storage in self._numbers.alive():
            if number in self.record.made and self._values.have_changed(number, storage):
                self.record.has_hidden_writes = True


def hooks_in_force() -> tuple[Callable[[torch.Tensor], object], Callable[[Any], torch.Tensor]]:
    """Return the pack and the unpack hook that autograd would call; without any, hooks that change nothing."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return (core.noop_pack, core.unpack) if hooks is None else hooks
