"""The record of one call of a block: its operators, the storages they read, make and write, and their times."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from torchoffload._core import core
from torchoffload._devices import meter_for
from torchoffload._fit.machine.agreement import communicated, counts_of_groups, wait_for
from torchoffload._fit.machine.operators import tensors
from torchoffload._pytorch import hook_stack
from torchoffload._pytorch.operator_mode import OperatorMode

__all__ = ["PLACES", "BlockRecord", "OperatorCall", "Recorder", "Recording"]

PLACES = 64  # the masks of ``BlockActions`` have a bit for each of so many outputs of an operator
_MOST_HELD_BYTES = 64 << 10  # as of the small tensors that a call copies
# PyTorch's own operators draw random numbers from generators, whose states a replay restores. An operator of another
# library may return a state of its own from which it has drawn, and its other results may come out the same by chance.
_DRAW_FROM_GENERATORS = ("aten", "prims")


@dataclass(kw_only=True)
class OperatorCall:
    """One call of a counted operator. Storages are named by numbers, in the order in which they were first seen.

    Attributes
    ----------
    operator : operator
        The operator that was called.
    duration_ns : int
        How long it took on its device.
    reads : frozenset of (int, int)
        The storages of its arguments, each with the number of operators that had written to it by then.
    makes, writes : frozenset of int
        The storages that it made; those that it wrote to and did not make.
    draws : bool
        Whether it drew random numbers, or its tags say that it may.
    runs_once : bool
        Whether it must not run again, because it wrote to a storage that the block has not made, or read one after the
        block wrote to it. Its output is held.
    differs : bool
        Whether it must not run again, because its output came out differently when the call was verified.
    held : frozenset of int
        Small storages that it made and that alone came out differently, such as the random state that attention
        returns without dropout, which nobody has set. They are held, and the operator may run again.
    """

    operator: Any
    duration_ns: int = 0
    reads: frozenset[tuple[int, int]]
    makes: frozenset[int]
    writes: frozenset[int]
    draws: bool = False
    runs_once: bool = False
    differs: bool = False
    held: frozenset[int] = frozenset()


@dataclass
class BlockRecord:
    """The record of one call of a block.

    Attributes
    ----------
    operators : list of OperatorCall
        In the order of the calls.
    nbytes : dict of int to int
        The size of each storage in bytes.
    epochs : dict of int to int
        How many operators have written to each storage.
    inputs : frozenset of int
        The storages of the block's arguments.
    own : frozenset of int
        The storages from outside that are none of its arguments, such as those of parameters.
    made : set of int
        The storages that were made in the call.
    held : frozenset of int
        Those of them whose values the call holds in any case, since they cannot be made again.
    saved : frozenset of int
        The storages of the tensors that autograd saved.
    refusal : str or None
        Why the call cannot be computed again at all.
    had_no_room : bool
        Whether that is because there was no memory to compute it again right away.
    groups : tuple of ProcessGroup
        The groups of ranks that called collectives in it.
    copies_inputs : bool
        Whether a call holds copies of the arguments that autograd does not save, since the program may write to them.
    """

    operators: list[OperatorCall] = field(default_factory=list)
    nbytes: dict[int, int] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)
    inputs: frozenset[int] = frozenset()
    own: frozenset[int] = frozenset()
    made: set[int] = field(default_factory=set)
    held: frozenset[int] = frozenset()
    saved: frozenset[int] = frozenset()
    refusal: str | None = None
    had_no_room: bool = False
    groups: tuple[Any, ...] = ()
    copies_inputs: bool = False


class Recording:
    """One call of a block while it is recorded.

    Parameters
    ----------
    module : nn.Module
        The block.
    inputs : nest of containers
        The arguments of the call.
    context : Context or None
        The core's context that moves saved tensors, if there is one.
    observer : object
        Is told when the call is computed again.

    Attributes
    ----------
    call : RecordedCall
        The core's record.
    """

    def __init__(self, module: nn.Module, inputs: Any, context: Any, observer: Any) -> None:
        wait_for(inputs)
        devices = [tensor.device for tensor in tensors((inputs, list(module.parameters())))]
        self._meter = meter_for(next(iter(devices), torch.device("cpu")))
        self._group_counts = counts_of_groups()
        addresses = core.storage_addresses(inputs)
        self.call = core.RecordedCall(None, addresses, context, observer, self._meter.now, True, False, True)

    def end(self, *, verifies: bool) -> BlockRecord:
        """Return the record of the call. Called when forward has ended, and before anything is forgotten."""
        record = BlockRecord(groups=communicated(self._group_counts))
        storages, operators = self.call.storages(), self.call.operators()
        for number, each in enumerate(storages):
            record.nbytes[number], record.epochs[number] = each["nbytes"], each["epochs"]
        record.inputs = _where(storages, "is_input")
        record.made = set(_where(storages, "is_made"))
        record.own = frozenset(range(len(storages))) - record.inputs - record.made
        record.held = _where(storages, "is_held")
        record.saved = _where(storages, "is_saved")
        counted = [each for each in operators if each["counted"] >= 0]
        record.operators = [
            OperatorCall(
                operator=_operator(each["name"], each["overload"]),
                reads=frozenset(each["reads"]),
                makes=frozenset(each["makes"]),
                writes=frozenset(each["writes"]),
                draws=each["draws"],
                runs_once=each["runs_once"],
            )
            for each in counted
        ]
        for number, begin, end in self.call.moments():
            if number >= 0:
                record.operators[number].duration_ns = max(1, int(1e9 * self._meter.between_s(begin, end)))
        if verifies:
            self._verify(record)
        return record

    def _verify(self, record: BlockRecord) -> None:
        """Have the call make everything again, and note the values that come out differently."""
        try:
            different = self.call.verify()
        except torch.OutOfMemoryError:
            record.had_no_room = True
            record.refusal = (
                "there was no memory to compute it again right after its forward, which shows whether it comes out the "
                "same: give smaller blocks (blocks=), or a smaller batch"
            )
            return
        except RuntimeError as error:
            record.refusal = f"computed again right away, it fails: {str(error).splitlines()[0]}"
            return
        by_operator: defaultdict[int, set[int]] = defaultdict(set)
        for number, storage in different:
            by_operator[number].add(storage)
        for number, storages in by_operator.items():
            if number < 0:
                record.refusal = "a cast of a parameter or an argument comes out differently when it is computed again"
                continue
            call = record.operators[number]
            is_known = getattr(call.operator, "namespace", "") in _DRAW_FROM_GENERATORS and len(call.makes) <= PLACES
            are_results = storages < call.makes and all(record.epochs[each] == 1 for each in storages)
            if is_known and are_results and sum(record.nbytes[each] for each in storages) <= _MOST_HELD_BYTES:
                call.held = frozenset(storages)
            else:
                call.differs = True


def _where(storages: list[dict[str, Any]], name: str) -> frozenset[int]:
    return frozenset(number for number, each in enumerate(storages) if each[name])


def _operator(name: str, overload: str) -> Any:
    namespace, _, base = name.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


class Recorder:
    """A context that records and verifies the call of a block that is made inside it, which nothing of is made again.

    Parameters
    ----------
    module : nn.Module
        The block.
    inputs : nest of containers
        The arguments of the call.

    Attributes
    ----------
    record : BlockRecord
        The record of the call, once the context is left.
    """

    def __init__(self, module: nn.Module, inputs: Any) -> None:
        context = getattr(hook_stack.top_pack_hook(), "__self__", None)
        self._recording = Recording(module, inputs, context if isinstance(context, core.Context) else None, None)
        self._mode = OperatorMode(self._recording.call.listener())
        self._hooks = saved_tensors_hooks(self._recording.call.pack_hook(), core.unpack)
        self.record = BlockRecord()

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        self._mode.__enter__()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._mode.__exit__(kind, error, traceback)
        self._hooks.__exit__(kind, error, traceback)
        self.record = self._recording.end(verifies=kind is None)
        self._recording.call.settle(True)
        self._recording.call.finish()
