"""Kinds of blocks: which blocks do the same, and the ways to run a block that its record allows."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from torchoffload._fit.block.graph import MOST_OPERATORS, BlockPlan, Corner, block_frontier, group_operators
from torchoffload._fit.block.record import BlockRecord
from torchoffload._fit.machine.operators import communicates, to_one_rank
from torchoffload._fit.plan.step import BlockCall, BlockKind, Output, Step, Way, backward_order
from torchoffload._fit.survey.measured import HostTimes, Measured, MeasuredKind, structure_of
from torchoffload._pytorch.compiled_calls import has_compiled

__all__ = ["SurveyedKind", "hull", "kind_of_call", "step_of"]

# The time that the modes of a block take for each operator, at the very least: of two ways that take as long the one
# without modes is better. The time that they really take shows when plans are tried.
_MODES_S = 1e-6
_LEAVE_MEMORY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


def kind_of_call(module: nn.Module, inputs: Any) -> tuple[Any, ...]:
    """Return a value that is the same for calls of blocks that do the same."""
    modules = tuple((name, type(each), each.training) for name, each in module.named_modules())
    tensors = tuple(
        (name, None if is_lazy(each) else tuple(each.shape), each.dtype, each.requires_grad)
        for table in (module.named_parameters(), module.named_buffers())
        for name, each in table
    )
    arguments = tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else type(leaf)
        for leaf in tree_leaves(inputs)
    )
    device_type = next((each.device.type for each in tree_leaves(inputs) if isinstance(each, torch.Tensor)), "cpu")
    autocast = torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type)
    return modules, tensors, arguments, autocast, has_compiled(module)


class SurveyedKind:
    """All blocks that do the same, and the ways to run them.

    Parameters
    ----------
    record : BlockRecord
        The record of a call of one of them.
    may_recompute, may_agree : bool
        Whether the user allows to compute again, and whether ranks may agree on it.

    Attributes
    ----------
    obstacle : str or None
        Why no block of the kind can be computed again; None if it can.
    groups : tuple of ProcessGroup
        The groups of ranks that communicate in the block, and have to compute it again alike; none if they may not.
    are_inputs_known : bool
        Whether a step has shown if the program writes to the arguments of a block after its forward. Until then they
        are copied.
    least : BlockPlan or None
        The plan of the least memory; None if there is an obstacle.
    """

    def __init__(self, record: BlockRecord, may_recompute: bool, may_agree: bool = True) -> None:
        self._record = record
        self.obstacle: str | None = None
        called = {call.operator for call in record.operators}
        names = {each.__name__ for each in called if communicates(each)}
        if not may_recompute:
            self.obstacle = "recompute=False"
        elif any(getattr(each, "namespace", "") == "fsdp" for each in called):
            self.obstacle = "FSDP gathers parameters inside of it: shard whole blocks, or give smaller ones"
        elif any(map(to_one_rank, called)):
            self.obstacle = "it sends to a single rank or receives from one, which is not to do the same"
        elif (names or record.groups) and not may_agree:
            self.obstacle = "it has collectives inside, and the ranks make no plan together: group=None"
        elif names and not record.groups:
            self.obstacle = "it has collectives inside, and PyTorch does not tell among which ranks"
        elif record.refusal is not None:
            self.obstacle = record.refusal
        elif len(record.operators) > MOST_OPERATORS:
            self.obstacle = f"it has more than {MOST_OPERATORS} operators to choose from: give smaller blocks"
        elif not block_frontier(record):
            self.obstacle = "values that it makes in several steps come out differently when they are made again"
        self.groups = record.groups if may_recompute and may_agree else ()
        self.are_inputs_known = False
        record.copies_inputs = True
        self.least: BlockPlan | None = None
        if self.obstacle is None:
            least = self._corners()[0].plan
            self.least = replace(least, moved=least.kept)

    @property
    def copies_inputs(self) -> bool:
        """Whether the program is known to write to arguments, of which calls that are computed again hold copies."""
        return self.are_inputs_known and self.least is not None and self.least.copies_inputs

    def note_inputs(self, *, are_written: bool) -> None:
        """Note whether the program writes to the arguments of a block after its forward."""
        self.are_inputs_known, self._record.copies_inputs = True, are_written
        if self.least is not None:
            self.least = replace(self.least, copies_inputs=are_written)

    def refuse(self, why: str) -> None:
        """Note that no block of the kind is to be computed again from now on."""
        self.obstacle, self.least = why, None

    def _corners(self) -> list[Corner]:
        return block_frontier(self._record)

    @property
    def operators(self) -> tuple[Any, ...]:
        """The operators of a call, in order."""
        return tuple(call.operator for call in self._record.operators)

    @property
    def saves(self) -> bool:
        """Whether autograd saves anything in a call, which then has a backward that takes time."""
        return bool(self._record.saved)

    @property
    def saved_bytes(self) -> int:
        """The bytes of the storages that the block has made and autograd saves."""
        return sum(self._record.nbytes[storage] for storage in self._record.saved & self._record.made)

    @property
    def saved_input_bytes(self) -> int:
        """The bytes of the arguments that autograd saves."""
        return sum(self._record.nbytes[storage] for storage in self._record.saved & self._record.inputs)

    @property
    def all_saved_bytes(self) -> int:
        """The bytes of all storages that autograd saves, without parameters and buffers."""
        record = self._record
        return sum(record.nbytes[storage] for storage in record.saved - record.own)

    @property
    def unrepeatable(self) -> tuple[int, tuple[str, ...]]:
        """The bytes that come out differently if the block is computed again, and the operators that make them.

        An operator that leaves memory as it is makes it for code that PyTorch does not see, such as kernels of Triton.
        """
        record = self._record
        nbytes, names = 0, []
        for call in record.operators:
            name = call.operator.__name__.partition(".")[0]
            unseen = call.makes & record.held if name in _LEAVE_MEMORY else frozenset()
            if storages := call.makes if call.differs else unseen:
                nbytes += sum(record.nbytes[storage] for storage in storages)
                names.append(name)
        return nbytes, tuple(dict.fromkeys(names))

    def measured(self, forward_s: float, backward_s: float, host: HostTimes, input_bytes: int) -> MeasuredKind:
        """Return the measured times and sizes of the kind."""
        record = self._record
        return MeasuredKind(
            structure=structure_of(record),
            obstacle=self.obstacle,
            durations_ns=tuple(call.duration_ns for call in record.operators),
            sizes=tuple(record.nbytes[number] for number in sorted(record.nbytes)),
            forward_s=forward_s,
            backward_s=backward_s,
            host=host,
            input_bytes=input_bytes,
        )

    def take(self, known: MeasuredKind) -> None:
        """Take the times and sizes that several ranks have together, and the obstacle of any of them."""
        record, self.obstacle = self._record, known.obstacle
        for call, duration_ns in zip(record.operators, known.durations_ns, strict=True):
            call.duration_ns = duration_ns
        record.nbytes = dict(zip(sorted(record.nbytes), known.sizes, strict=True))

    def set_times(self, seconds: dict[int, float]) -> None:
        """Take the times of the recorded operators, by their numbers; scale those that are not given."""
        calls = self._record.operators
        recorded_ns = sum(calls[number].duration_ns for number in seconds if number < len(calls))
        scale = sum(seconds.values()) * 1e9 / recorded_ns if recorded_ns else 1.0
        for number, call in enumerate(calls):
            known = seconds.get(number)
            call.duration_ns = max(1, round(call.duration_ns * scale if known is None else known * 1e9))

    def recompute_s(self, plan: BlockPlan) -> float:
        """Return how long a recomputation takes that follows ``plan``."""
        return 1e-9 * sum(
            call.duration_ns
            for number, call in enumerate(self._record.operators)
            if number not in plan.kept and number not in plan.skipped
        )

    @property
    def duration_s(self) -> float:
        """How long the operators of a call take."""
        return 1e-9 * sum(call.duration_ns for call in self._record.operators)

    def outputs_and_ways(
        self, input_bytes: int, host: HostTimes, forward_s: float, backward_s: float
    ) -> tuple[tuple[Output, ...], tuple[Way, ...]]:
        """Return the outputs that a block may keep, and the ways to run it, from the least bytes to the least time.

        Parameters
        ----------
        input_bytes : int
            The bytes of the arguments that are its own, and not those of another block as well.
        host : HostTimes
            The time that the host takes for a call that is computed again.
        forward_s, backward_s : float
            The time that the device takes for a call that is not.
        """
        record = self._record
        grouped = group_operators(record)
        groups = [] if grouped is None else grouped
        ready_s, so_far = [], 0
        for call in record.operators:
            so_far += call.duration_ns
            ready_s.append(so_far * 1e-9)
        corners = self._corners() if self.obstacle is None else []
        outputs: list[Output] = []
        plain: list[int] = []  # the outputs that autograd saves
        of_operator: dict[int, int] = {}
        for group in groups:
            calls = [record.operators[number] for number in group.operators]
            ready, may_move = ready_s[group.operators[-1]], not any(communicates(call.operator) for call in calls)
            if any(group.operators[0] in corner.plan.kept for corner in corners):
                of_operator[group.operators[0]] = len(outputs)
                outputs.append(Output(group.sizes, ready, group.operators, may_move))
            if group.is_needed:  # without a recomputation, what autograd does not save is freed
                saved = {storage for call in calls for storage in call.makes} & record.saved
                sizes = tuple(record.nbytes[storage] for storage in sorted(saved))
                if group.operators[0] not in of_operator or sizes != group.sizes:
                    outputs.append(Output(sizes, ready, group.operators, may_move))
                plain.append(len(outputs) - 1)
        rest = self.saved_bytes - sum(outputs[number].nbytes for number in plain)
        if rest > 0:
            plain.append(len(outputs))
            outputs.append(Output((rest,), 0.0))
        ways = [Way(0.0, tuple(plain), min(self.saved_input_bytes, input_bytes))]
        for corner in corners:
            kept = tuple(output for operator, output in of_operator.items() if operator in corner.plan.kept)
            # A block takes as long as the device takes, or as the host takes to enqueue it.
            again_s = max(backward_s + corner.recompute_ns * 1e-9, host.backward_s) - backward_s
            again_s += max(0.0, host.forward_s - forward_s) + _MODES_S * len(record.operators)
            ways.append(Way(again_s, kept, input_bytes, corner.plan))
        return tuple(outputs), tuple(hull(ways, outputs))


def hull(ways: Iterable[Way], outputs: Sequence[Output]) -> list[Way]:
    """Return the corners of the convex hull of bytes and time, from the least bytes to the least time."""

    def nbytes(way: Way) -> int:
        return way.input_bytes + sum(outputs[number].nbytes for number in way.kept)

    corners: list[Way] = []
    # Of ways that are alike, the plain one is best: it has no modes.
    for way in sorted(ways, key=lambda way: (nbytes(way), way.recompute_s, not way.is_plain)):
        if corners and way.recompute_s >= corners[-1].recompute_s:
            continue
        while len(corners) > 1 and not _is_corner(*((nbytes(each), each.recompute_s) for each in (*corners[-2:], way))):
            corners.pop()
        corners.append(way)
    return corners


def _is_corner(left: tuple[int, float], middle: tuple[int, float], right: tuple[int, float]) -> bool:
    return (middle[1] - left[1]) * (right[0] - middle[0]) < (right[1] - middle[1]) * (middle[0] - left[0])


def _elapsed(seconds: float) -> float:
    """Return a time between two moments; 0 if they came the other way round.

    They do if a forward asks for a gradient, and the backward of blocks begins before the forward ends.
    """
    return max(0.0, seconds)


def step_of(measured: Measured, kinds: Sequence[SurveyedKind], **limits: Any) -> Step:
    """Return the step to plan for. ``limits`` are the fields of ``Step`` that a survey does not know."""
    step_kinds = []
    for kind, known in zip(kinds, measured.kinds, strict=True):
        kind.take(known)
        outputs, ways = kind.outputs_and_ways(known.input_bytes, known.host, known.forward_s, known.backward_s)
        forward_s, backward_s = _elapsed(known.forward_s), _elapsed(known.backward_s)
        step_kinds.append(BlockKind(forward_s, backward_s, outputs, ways))
    calls: dict[int, BlockCall] = {}
    behind = measured.loss_bytes
    for number in reversed(backward_order(measured.late, len(measured.calls))):
        kind_number, forward_bytes, backward_bytes = measured.calls[number]
        # If nothing shows when a block's backward begins, it is a part of the backward that comes before it.
        of = step_kinds[kind_number]
        behind = behind if backward_bytes is None else backward_bytes
        own = of.kept_bytes(of.ways[-1]) if backward_bytes is None else 0
        calls[number] = BlockCall(kind_number, forward_bytes, behind + own)
    loss_bytes = measured.loss_bytes
    if measured.late:
        # The calls between the backwards run beside all that the late calls keep, as the first backward ends.
        first = next((number for number in range(len(calls)) if number not in measured.late), None)
        if first is None:
            loss_bytes = max(loss_bytes, measured.between_bytes)
        else:
            backward_bytes = max(calls[first].backward_bytes, measured.between_bytes)
            calls[first] = replace(calls[first], backward_bytes=backward_bytes)
    head_s, loss_s, end_s = map(_elapsed, measured.times_s)
    return Step(
        kinds=tuple(step_kinds),
        calls=tuple(calls[number] for number in range(len(calls))),
        head_s=head_s,
        loss_s=loss_s,
        end_s=end_s,
        loss_bytes=loss_bytes,
        other_bytes=measured.other_bytes,
        fixed=measured.fixed,
        late=measured.late,
        between=measured.between,
        between_bytes=measured.between_bytes,
        between_waits=measured.between_waits,
        **limits,
    )
