"""From dry steps to the step that ``fit`` would plan for, and to its plans, by the planner of ``fit``."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from torchoffload._estimate.cards import Card
from torchoffload._estimate.dry_step import Moment, Operator, Trace
from torchoffload._estimate.rates import HOST_S, seconds_of
from torchoffload._fit.block.record import BlockRecord, OperatorCall
from torchoffload._fit.machine.link import LinkRates
from torchoffload._fit.plan.step import BlockCall, BlockKind, Step
from torchoffload._fit.survey.kinds import SurveyedKind
from torchoffload._fit.survey.measured import HostTimes, structure_of

__all__ = ["seconds_of_step", "step_of", "without_recomputation"]

_aten = torch.ops.aten
_LATENCY_S = 1e-5
_LEAST_MOVED_BYTES = 1 << 20  # as OffloadOptions.min_offload_bytes
# A recomputation of these updates no statistics.
_ON_SCRATCH = (_aten.native_batch_norm, _aten._native_batch_norm_legit, _aten.cudnn_batch_norm,
               _aten._batch_norm_with_update)  # fmt: skip


def seconds_of_step(trace: Trace, card: Card) -> float:
    """Return how long a step takes: as long as the device, or as the host takes to launch its operators."""
    return max(sum(seconds_of(each.cost, card) for each in trace.operators), HOST_S * len(trace.operators))


def step_of(plain: Trace, moved: Trace, card: Card, *, other_bytes: int, host_bytes: int) -> Step:
    """Return the step that is planned for.

    Parameters
    ----------
    plain, moved : Trace
        A step with its blocks as they are, and one with each of them in a checkpoint whose inputs move.
    card : Card
        The card.
    other_bytes : int
        The most on the device outside of forward and backward.
    host_bytes : int
        The room in host memory.
    """
    device_s = sum(seconds_of(each.cost, card) for each in plain.operators)
    pace = seconds_of_step(plain, card) / device_s if device_s else 1.0

    def seconds(operator: Operator) -> float:
        return seconds_of(operator.cost, card) * pace

    forward: defaultdict[int, list[Operator]] = defaultdict(list)
    backward_s: defaultdict[int, float] = defaultdict(float)
    outside = [0.0, 0.0, 0.0]
    count, begun = len(plain.calls), set[int]()
    for each in plain.operators:
        if not isinstance(each.call, int):
            outside[_place(each, begun, count)] += seconds(each)
        elif each.is_backward:
            backward_s[each.call] += seconds(each)
            begun.add(-each.call - 1)
        else:
            forward[each.call].append(each)
            begun.add(each.call)
    kinds: list[BlockKind] = []
    numbers: dict[object, int] = {}
    calls: list[BlockCall] = []
    uses = Counter(storage for call in plain.calls for storage in call.inputs)
    for number, (call, least) in enumerate(zip(plain.calls, moved.calls, strict=True)):
        record = _record(forward[number], call, plain, seconds)
        input_bytes = sum(plain.nbytes[each] for each in call.inputs if uses[each] == 1)
        forward_s = sum(map(seconds, forward[number]))
        sizes = tuple(sorted((each, record.nbytes[each]) for each in record.nbytes))
        key = structure_of(record), sizes, input_bytes, round(backward_s[number] * 1e5)
        if key not in numbers:
            numbers[key] = len(kinds)
            survey_kind = SurveyedKind(record, may_recompute=True)
            host = HostTimes(0.0, 0.0)
            outputs, ways = survey_kind.outputs_and_ways(input_bytes, host, forward_s, backward_s[number])
            kinds.append(BlockKind(forward_s, backward_s[number], outputs, ways))
        calls.append(BlockCall(numbers[key], least.forward_bytes, max(least.backward_bytes, moved.loss_bytes)))
    link = LinkRates(card.link_gb_per_s * 1e9, card.link_gb_per_s * 1e9, _LATENCY_S)
    return Step(
        kinds=tuple(kinds),
        calls=tuple(calls),
        head_s=outside[0],
        loss_s=outside[1],
        end_s=outside[2],
        loss_bytes=moved.between_bytes,
        other_bytes=other_bytes,
        least_moved_bytes=_LEAST_MOVED_BYTES,
        tier_bytes=host_bytes,
        out_bytes_per_s=link.out_bytes_per_s,
        in_bytes_per_s=link.in_bytes_per_s,
        latency_s=link.latency_s,
    )


def _place(operator: Operator, begun: set[int], count: int) -> int:
    """Return the part of the step in which an operator outside of blocks counts: before, between or behind them."""
    if not operator.is_backward:
        return 1 if count - 1 in begun else 0
    return 2 if any(each < 0 for each in begun) else 1


def without_recomputation(step: Step) -> Step:
    """Return the same step whose blocks compute nothing again."""
    kinds = (replace(kind, ways=tuple(way for way in kind.ways if way.is_plain)) for kind in step.kinds)
    return replace(step, kinds=tuple(kinds))


def _record(
    operators: Sequence[Operator], call: Moment, trace: Trace, seconds: Callable[[Operator], float]
) -> BlockRecord:
    """Return the record that ``fit`` would make of a block's call. Storages are numbered anew, as they are seen."""
    numbers: dict[int, int] = {}

    def new(storages: frozenset[int] | set[int]) -> frozenset[int]:
        return frozenset(numbers.setdefault(each, len(numbers)) for each in sorted(storages))

    inputs = new(call.inputs)
    made: set[int] = set()
    epochs: Counter[int] = Counter()
    calls = []
    for each in operators:
        if not each.makes and not each.writes:
            continue
        reads, makes, writes = new(each.reads), new(each.makes), new(each.writes)
        is_foreign = bool(writes - made) and each.operator.overloadpacket not in _ON_SCRATCH
        calls.append(
            OperatorCall(
                operator=each.operator,
                duration_ns=max(1, round(seconds(each) * 1e9)),
                reads=frozenset((storage, epochs[storage]) for storage in reads),
                makes=makes,
                writes=writes if is_foreign else writes & made,
                runs_once=is_foreign,
            )
        )
        made |= makes
        for storage in makes | writes:
            epochs[storage] += 1
    saved = new(call.saved)
    old = {number: storage for storage, number in numbers.items()}
    held = {storage for each in calls if each.runs_once for storage in each.makes}
    return BlockRecord(
        operators=calls,
        nbytes={number: trace.nbytes[old[number]] for number in old},
        epochs={number: epochs[number] for number in old},
        inputs=inputs,
        own=frozenset(old) - made - inputs,
        made=made,
        held=frozenset(held),
        saved=saved,
    )
