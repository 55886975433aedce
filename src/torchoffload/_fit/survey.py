"""The survey: steps in the least memory, in which blocks are recorded and times and memory are measured."""

import itertools
import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from torchoffload._fit.effects import Containers
from torchoffload._fit.kinds import HostTimes, Kind, kind_of_call
from torchoffload._fit.meter import Meter, unique_bytes
from torchoffload._fit.operators import storages
from torchoffload._fit.record import BlockRecord
from torchoffload._fit.replay import Watch
from torchoffload._fit.step import Call, Step
from torchoffload._fit.step import Kind as StepKind

__all__ = ["Survey", "SurveyedCall"]

_MOST_RECORDING_STEPS = 4
_TIMED_CALLS = 2
_weak: Any = StorageWeakRef  # the class has no annotations


class SurveyedCall(Watch):
    """One call of a block in a surveyed step.

    Attributes
    ----------
    key : tuple
        What tells its kind.
    input_bytes : int
        The bytes of its arguments that no earlier call of the step was given, too.
    forward_bytes, backward_bytes : int
        The most on the device while it runs.
    began, returned, began_again, works_again : moment
        When its forward begins and ends, when its recomputation begins, and when the device has come to that; None
        while that has not happened.
    span_s : float or None
        From ``works_again`` to the next block's recomputation; None while it is not known.
    forward_host_s, again_host_s, backward_host_s : float
        What the host takes to enqueue the forward, the recomputation, and the block's backward.
    """

    def __init__(self, survey: "Survey", module: nn.Module, key: tuple[Any, ...], inputs: Any) -> None:
        kind = survey.kinds.get(key)
        super().__init__(None if kind is None else kind.least)
        self.records = kind is None
        self._module = weakref.ref(module)
        self.key = key
        self.input_bytes = survey.note_inputs(inputs)
        self.forward_bytes = self.backward_bytes = 0
        self.returned: Any = None
        self.began_again: Any = None
        self.works_again: Any = None
        self.span_s: float | None = None
        self.forward_host_s = self.again_host_s = self.backward_host_s = 0.0
        self.moments: dict[int, tuple[Any, Any]] = {}
        self._survey = survey
        self._containers = Containers(module, inputs) if self.records else None
        # The second one, since with the first one's backward that of the model's head ends.
        self.times_operators = not self.records and survey.count_of_kind(key) < _TIMED_CALLS
        self.began = survey.mark(self._note_forward)
        self._host_s = time.perf_counter()

    @property
    def module(self) -> nn.Module:
        """The block."""
        module = self._module()
        assert module is not None
        return module

    def _note_forward(self, peak: int) -> None:
        self.forward_bytes = max(self.forward_bytes, peak)

    def _note_backward(self, peak: int) -> None:
        self.backward_bytes = max(self.backward_bytes, peak)

    def recorded(self, record: BlockRecord) -> None:
        """Note what the call did, for all blocks of the kind."""
        changed = self._containers.changed() if self._containers is not None else None
        self._survey.add_kind(self.key, Kind(record, changed, self._survey.may_recompute))

    def ended(self) -> None:
        """Note the end of forward."""
        self._containers = None
        self.forward_host_s = time.perf_counter() - self._host_s
        # What comes next is this call's, if another one follows; else it is the loss's.
        self.returned = self._survey.mark(self._note_forward)

    def left_plan(self) -> None:
        """Note that the block is not what its kind is."""
        self._survey.differs(self.module)

    def begins_again(self) -> None:
        """Note the beginning of the block's backward."""
        now = time.perf_counter()
        self._survey.backward_is_seen()
        before = self._survey.last_again
        if before is not None:
            before.backward_host_s = now - before._host_s
        self._survey.last_again = self
        self.began_again = self.works_again = self._survey.mark(self._note_backward, begins_backward=True)
        if self.times_operators and self.plan is not None:
            # So that operators follow each other on the device as they do where the host is far ahead.
            self._survey.meter.keep_host_ahead(len(self.plan.operators))
            self.works_again = self._survey.meter.now()
        self._host_s = time.perf_counter()

    def ends_again(self) -> None:
        """Note the end of the recomputation."""
        now = time.perf_counter()
        self.again_host_s = now - self._host_s
        self._host_s = now

    def timed(self, _number: int, run: Callable[[], Any]) -> Any:
        """Run one operator of the recomputation between two moments."""
        begin = self._survey.meter.now()
        output = run()
        self.moments[_number] = (begin, self._survey.meter.now())
        return output


class Survey:
    """Watches steps in the least memory until each block is known, and then says what a step takes.

    Parameters
    ----------
    model : nn.Module
        The model.
    meter : Meter
        The device's clock and memory.
    backward_is_seen : callable
        Called in a backward, where a block is computed again.
    may_recompute : bool
        Whether blocks may be computed again.

    Attributes
    ----------
    kinds : dict of tuple to Kind
        What is known of each kind of block.
    calls : list of SurveyedCall
        The calls of the step, in the order of forward.
    """

    def __init__(
        self, model: nn.Module, meter: Meter, backward_is_seen: Callable[[], None], *, may_recompute: bool
    ) -> None:
        self.backward_is_seen = backward_is_seen
        self.meter = meter
        self.may_recompute = may_recompute
        self.kinds: dict[tuple[Any, ...], Kind] = {}
        self.calls: list[SurveyedCall] = []
        self.last_again: SurveyedCall | None = None
        self._model = weakref.ref(model)
        self._different: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # blocks that are no kind with others
        self._recording_steps = 0
        self._sink: Callable[[int], None] = self._note_other
        self._clear()

    def _clear(self) -> None:
        self.calls = []
        self.last_again = None
        self._new_kinds = False
        self._inputs: dict[int, Any] = {}
        self._loss_bytes = 0
        self._began: Any = None
        self._has_backward_begun = False
        self._ended: Any = None

    # What calls of blocks tell.

    def watch(self, module: nn.Module, inputs: Any) -> Watch:
        """Return what a call of a block is to do."""
        has_no_values = any(map(is_lazy, _state(module)))
        if self._began is None or self._ended is not None or has_no_values:
            return Watch(None)  # the model itself was not called, or its parameters do not exist yet
        key = kind_of_call(module, inputs)
        if module in self._different:
            key = (*key, id(module))
        call = SurveyedCall(self, module, key, inputs)
        self.calls.append(call)
        return call

    def mark(self, sink: Callable[[int], None], *, begins_backward: bool = False) -> Any:
        """Return this moment, hand the peak until now to whom it belongs, and the next one to ``sink``."""
        peak = self.meter.take_peak()
        if begins_backward and not self._has_backward_begun:
            self._has_backward_begun = True
            self._note_loss(peak)
        else:
            self._sink(peak)
        self._sink = sink
        return self.meter.now()

    def _note_loss(self, peak: int) -> None:
        self._loss_bytes = max(self._loss_bytes, peak)

    def _note_other(self, peak: int) -> None:
        self._other_bytes = peak

    def note_inputs(self, inputs: Any) -> int:
        """Return the bytes of arguments that no earlier call of this step was given."""
        nbytes = 0
        for storage in storages(inputs):
            known = self._inputs.get(storage._cdata)
            if known is None or known.expired():
                self._inputs[storage._cdata] = _weak(storage)
                nbytes += storage.nbytes()
        return nbytes

    @property
    def largest_input_bytes(self) -> int:
        """The bytes of the arguments of the call that has the largest ones."""
        return max((call.input_bytes for call in self.calls), default=0)

    def count_of_kind(self, key: tuple[Any, ...]) -> int:
        """Return how many calls of the kind this step had so far."""
        return sum(call.key == key for call in self.calls)

    def add_kind(self, key: tuple[Any, ...], kind: Kind) -> None:
        """Note what a kind of block does."""
        self.kinds[key] = kind
        self._new_kinds = True

    def differs(self, module: nn.Module) -> None:
        """Note that a block does not what others of its kind do: it is recorded by itself in the next step."""
        if module not in self._different and self._recording_steps < _MOST_RECORDING_STEPS:
            self._different.add(module)
            self._new_kinds = True

    # What the step tells.

    def begin_step(self) -> None:
        """Begin a step."""
        self._clear()
        self._other_bytes = 0
        self._began = self.mark(self._note_other)

    def backward_began(self) -> None:
        """Note that a backward of the step begins."""
        if not self._has_backward_begun:
            self.mark(self._note_loss, begins_backward=True)

    def backward_ended(self) -> None:
        """End the step: a backward has ended."""
        self._ended = self.mark(self._note_other)

    def end_step(self) -> bool:
        """Return whether the step shows all there is to know. Called when the next step is about to begin."""
        self._sink(self.meter.take_peak())  # the optimizer's
        if self._ended is None:
            return False
        if (self._new_kinds or not self.calls) and self._recording_steps < _MOST_RECORDING_STEPS:
            self._recording_steps += 1
            return False
        return True

    def step(self, **limits: Any) -> tuple[Step, list[tuple[Any, ...]]]:
        """Return what the step takes, and the keys of its kinds by their numbers.

        Parameters
        ----------
        **limits
            The fields of ``Step`` that are no matter of the survey.
        """
        calls = [call for call in self.calls if call.returned is not None and call.key in self.kinds]
        keys = list(dict.fromkeys(call.key for call in calls))
        between = self.meter.between_s
        again = [call for call in calls if call.began_again is not None]
        again.sort(key=lambda call: between(self._began, call.began_again))
        for call, following in itertools.pairwise(again):
            call.span_s = between(call.works_again, following.began_again)
        if again:
            again[-1].span_s = between(again[-1].works_again, self._ended)
        kinds = [self._kind(key, [call for call in calls if call.key == key]) for key in keys]
        numbers = {key: number for number, key in enumerate(keys)}
        returned_s = between(self._began, calls[-1].returned) if calls else 0.0
        end_s = between(self._began, self._ended)
        if again:
            loss_s = between(calls[-1].returned, again[0].began_again)
            last = kinds[numbers[again[-1].key]]
            rest_s = max(0.0, (again[-1].span_s or 0.0) - last.backward_s - self._least_s(again[-1].key))
        else:
            loss_s = max(0.0, end_s - returned_s - sum(kinds[numbers[call.key]].backward_s for call in calls))
            rest_s = 0.0
        step = Step(
            kinds=tuple(kinds),
            calls=tuple(self._calls(calls, numbers, kinds)),
            head_s=between(self._began, calls[0].began) if calls else end_s,
            loss_s=loss_s,
            end_s=rest_s,
            loss_bytes=self._loss_bytes if self.meter.measures_memory else self._reckoned_bytes(),
            other_bytes=self._other_bytes,
            fixed=self._fixed(),
            **limits,
        )
        return step, keys

    def _least_s(self, key: tuple[Any, ...]) -> float:
        kind = self.kinds[key]
        return 0.0 if kind.least is None else kind.recompute_s(kind.least)

    def _kind(self, key: tuple[Any, ...], calls: list[SurveyedCall]) -> StepKind:
        kind, between = self.kinds[key], self.meter.between_s
        timed = [call for call in calls if call.moments]
        for call in timed[-1:]:
            kind.set_times({number: between(*moments) for number, moments in call.moments.items()})
        forward_s = statistics.median(between(call.began, call.returned) for call in calls)
        if timed and self.meter.measures_memory:  # of the device alone, where the host is ahead
            forward_s = min(forward_s, kind.duration_s)
        backward_s = 2 * forward_s
        spans = [call.span_s for call in timed[-1:] or calls if call.span_s is not None]
        if spans:
            backward_s = max(statistics.median(spans) - self._least_s(key), 0.5 * forward_s)
        # The first call is given what all share, too.
        input_bytes = min(call.input_bytes for call in calls)
        outputs, ways = kind.outputs_and_ways(input_bytes, self._host_s(calls), forward_s, backward_s)
        return StepKind(forward_s, backward_s, outputs, ways)

    def _host_s(self, calls: list[SurveyedCall]) -> HostTimes:
        """Return what the host takes for a call of these that is computed again; 0 where it is what computes."""
        again = [call for call in calls[_TIMED_CALLS:] or calls if call.again_host_s > 0]
        if not again or self.meter.device.type == "cpu":
            return HostTimes(0.0, 0.0)
        return HostTimes(
            statistics.median(call.forward_host_s for call in again),
            statistics.median(call.again_host_s + call.backward_host_s for call in again),
        )

    def _calls(
        self, calls: list[SurveyedCall], numbers: dict[tuple[Any, ...], int], kinds: list[StepKind]
    ) -> list[Call]:
        found: list[Call] = []
        behind = self._loss_bytes
        for call in reversed(calls):
            number = numbers[call.key]
            kept = kinds[number].kept_bytes(kinds[number].ways[-1])
            if not self.meter.measures_memory:
                base = self._reckoned_bytes()
                found.append(Call(number, base, base + self.kinds[call.key].saved_bytes + call.input_bytes))
                continue
            # Where nothing shows when a block's backward begins, it is a part of what comes before it.
            is_known = call.began_again is not None
            behind = call.backward_bytes if is_known else behind
            found.append(Call(number, call.forward_bytes, behind + (0 if is_known else kept)))
        return found[::-1]

    def _fixed(self) -> dict[str, int]:
        model = self._model()
        assert model is not None
        weights = unique_bytes([*model.parameters(), *model.buffers()])
        gradients = sum(each.numel() * each.element_size() for each in model.parameters() if each.requires_grad)
        return {"weights": weights, "gradients": gradients}

    def _reckoned_bytes(self) -> int:
        return sum(self._fixed().values())

    def forget_tensors(self) -> None:
        """Forget the calls, and with them all that they hold."""
        self._clear()


def _state(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()
