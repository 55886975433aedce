"""The survey: steps in the least memory, in which blocks are recorded and times and memory are measured."""

import itertools
import statistics
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from torchoffload._devices import Meter
from torchoffload._fit.block.graph import BlockPlan
from torchoffload._fit.block.record import BlockRecord
from torchoffload._fit.block.replay import Watch
from torchoffload._fit.machine.operators import gradients, storages, tensors, unique_bytes
from torchoffload._fit.plan.budget import Budget
from torchoffload._fit.survey.kinds import SurveyedKind, kind_of_call
from torchoffload._fit.survey.measured import HostTimes, Measured, MeasuredKind

__all__ = ["Survey"]

_MOST_RECORDING_STEPS = 4
_MOST_SMALLER_STEPS = 4
_MOST_TRIES_TO_VERIFY = 2
_LATER_CALLS, _RETAINED = "later calls", "a retained graph"
_weak: Any = StorageWeakRef  # the class has no annotations

TIMED_CALLS = 2  # of each kind; two, since the first one's backward ends together with that of the model's head


class _Call(Watch):
    """One call of a block in a step that is surveyed, and when a backward comes to it.

    Attributes
    ----------
    backwards_before : int or None
        How many backwards of the step had ended as the first one came to the call; None while none has come.
    is_retained : bool
        Whether one has come to it that retains its graph (``retain_graph=True``).
    """

    def __init__(self, survey: "Survey", module: nn.Module, plan: BlockPlan | None) -> None:
        super().__init__(plan)
        self._survey = survey
        self._module = weakref.ref(module)
        self.backwards_before: int | None = None
        self.is_retained = False

    def ended(self, output: Any) -> None:
        """Note the end of forward."""
        for tensor in tree_leaves(output):
            # A leaf, such as a parameter, would collect a hook in each call.
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(self._gradient_comes)  # type: ignore[no-untyped-call]

    def _gradient_comes(self, _gradient: torch.Tensor) -> None:
        if self._survey.backward_is_seen():
            self.backward_comes()

    def backward_comes(self) -> None:
        """Take notice of a backward of the step that comes to the call."""
        if self.backwards_before is None:
            self.backwards_before = self._survey.backward_count
        self.is_retained |= torch._C._autograd._get_current_graph_task_keep_graph()


class SurveyedCall(_Call):
    """One call of a block before the first backward of a surveyed step.

    Attributes
    ----------
    key : tuple
        The value by which its kind is known.
    input_bytes : int
        The bytes of its arguments that no earlier call of the step was given, too.
    forward_bytes, backward_bytes : int
        The most on the device while it runs.
    began, returned, began_again, computed_again : moment
        When its forward begins and ends, and when its recomputation begins and ends; None while that has not happened.
    backward_s : float or None
        From ``computed_again`` to the next block's recomputation; None while it is not known.
    forward_host_s, again_host_s, backward_host_s : float
        The time that the host takes to enqueue the forward, the recomputation, and the block's backward.
    """

    def __init__(self, survey: "Survey", module: nn.Module, key: tuple[Any, ...], inputs: Any) -> None:
        super().__init__(survey, module, survey.least_plan(key))
        self.records = survey.may_record(key)
        self.key = key
        self.input_bytes = survey.note_inputs(inputs, are_copied=survey.copies_inputs(key))
        self.forward_bytes = self.backward_bytes = 0
        self.returned: Any = None
        self.began_again: Any = None
        self.computed_again: Any = None
        self.backward_s: float | None = None
        self.forward_host_s = self.again_host_s = self.backward_host_s = 0.0
        self.moments: dict[int, tuple[Any, Any]] = {}
        self._is_in_forward = False  # while it is computed again
        self.times_operators = survey.is_timing and not self.records and survey.count_of_kind(key) < TIMED_CALLS
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

    def recorded(self, record: BlockRecord) -> bool:
        """Note the record of the call, for all blocks of the kind."""
        if record.had_no_room and self._survey.records_again(self.key):
            return False
        self._survey.add_kind(self.key, SurveyedKind(record, self._survey.may_recompute, self._survey.may_agree))
        return self._survey.least_plan(self.key) is not None

    def ended(self, output: Any) -> None:
        """Note the end of forward."""
        super().ended(output)
        self.forward_host_s = time.perf_counter() - self._host_s
        # The peak from here on belongs to this call if another one follows; else it belongs to the loss.
        self.returned = self._survey.mark(self._note_forward)

    def left_plan(self) -> None:
        """Note that the block differs from its kind."""
        self._survey.differs(self.module)

    def begins_again(self) -> None:
        """Note the beginning of the block's backward."""
        now = time.perf_counter()
        self._is_in_forward = not self._survey.backward_is_seen()
        if self._is_in_forward:  # a gradient inside of a call of the model is a part of that call
            return
        before = self._survey.last_again
        if before is not None:
            before.backward_host_s = now - before._host_s
        self._survey.last_again = self
        self.backward_comes()
        self.began_again = self._survey.mark(self._note_backward, begins_backward=True)
        if self.times_operators and self.plan is not None:
            # So that operators follow each other on the device as they do while the host is far ahead.
            self._survey.meter.keep_host_ahead(len(self.plan.operators))
        self._host_s = time.perf_counter()

    def backward_comes(self) -> None:
        """Take notice of a backward of the step that comes to the call."""
        super().backward_comes()
        self._survey.note_waiting_calls()

    def ends_again(self) -> None:
        """Note the end of the recomputation."""
        if self._is_in_forward:
            return
        self.computed_again = self._survey.meter.now()
        now = time.perf_counter()
        self.again_host_s = now - self._host_s
        self._host_s = now

    def now(self) -> Any:
        """Return this moment on the device."""
        return self._survey.meter.now()

    def timed(self, moments: dict[int, tuple[Any, Any]]) -> None:
        """Note when the operators of the replay began and ended."""
        self.moments = moments

    def inputs_were_written(self) -> None:
        """Note that the kind needs copies of its arguments."""
        self._survey.inputs_were_written(self.key)

    def refused(self, message: str) -> None:
        """Note that the kind cannot be computed again."""
        self._survey.refuse(self.key, message)


class _LaterCall(_Call):
    """One call of a block behind the first backward of a surveyed step."""

    @property
    def module(self) -> nn.Module | None:
        """The block; None if it does not exist any more."""
        return self._module()

    def begins_again(self) -> None:
        """Note the beginning of the block's backward."""
        if self._survey.backward_is_seen():
            self.backward_comes()


class _LeastMemory(NamedTuple):
    """The most bytes of a step in which nothing was on its way: in calls, at the loss, elsewhere, between backwards."""

    calls: list[tuple[tuple[Any, ...], int, int]]  # the key, and the most in forward and in backward
    loss_bytes: int
    other_bytes: int
    between_bytes: int

    @classmethod
    def of(cls, calls: list[SurveyedCall], loss_bytes: int, other_bytes: int, between_bytes: int) -> "_LeastMemory":
        in_calls = [(each.key, each.forward_bytes, each.backward_bytes) for each in calls]
        return cls(in_calls, loss_bytes, other_bytes, between_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most of the whole step."""
        return max(self.other_bytes, self.until_backward_bytes)

    @property
    def until_backward_bytes(self) -> int:
        """The most of it until the end of its last backward."""
        in_calls = (max(forward, backward) for _, forward, backward in self.calls)
        return max(self.loss_bytes, self.between_bytes, *in_calls)

    def for_calls(self, calls: list[SurveyedCall]) -> dict[int, tuple[int, int]]:
        """Return the bytes of each call, by its identity; of a later step's calls if they are others than here."""
        if [each.key for each in calls] == [key for key, _, _ in self.calls]:
            pairs = zip(calls, self.calls, strict=True)
            return {id(call): (forward, backward) for call, (_, forward, backward) in pairs}
        return {id(call): (call.forward_bytes, call.backward_bytes) for call in calls}


class Survey:
    """Watches steps in the least memory until each block is known, and then returns the measured step.

    Parameters
    ----------
    model : nn.Module
        The model.
    meter : Meter
        The device's clock and memory.
    budget : Budget
        The memory that the process may take.
    backward_is_seen : callable
        Called in a backward when a block is computed again. Returns whether it is a backward of the step.
    refuse : callable
        Called in a backward with a kind's key and a message if a block cannot be computed again.
    may_recompute, may_agree : bool
        Whether blocks may be computed again, and whether those may that communicate with other ranks.
    kinds : dict of tuple to SurveyedKind, optional
        The kinds of blocks that are known already. Those that are found are added.

    Attributes
    ----------
    allows_communication : bool
        Whether blocks that communicate are computed again now. All ranks have to do the same.
    kinds : dict of tuple to SurveyedKind
        Each kind of block that is known, by its key.
    calls : list of SurveyedCall
        The calls of the step, in the order of forward.
    is_known : bool
        Whether the latest step has shown all there is to know of such steps.
    """

    def __init__(
        self,
        model: nn.Module,
        meter: Meter,
        budget: Budget,
        backward_is_seen: Callable[[], bool],
        refuse: Callable[[tuple[Any, ...], str], None],
        *,
        may_recompute: bool,
        may_agree: bool,
        kinds: dict[tuple[Any, ...], SurveyedKind] | None = None,
    ) -> None:
        self.backward_is_seen, self.refuse = backward_is_seen, refuse
        self.meter, self._budget = meter, budget
        self.may_recompute, self.may_agree = may_recompute, may_agree
        self.allows_communication = False
        self.kinds: dict[tuple[Any, ...], SurveyedKind] = {} if kinds is None else kinds
        self.calls: list[SurveyedCall] = []
        self.last_again: SurveyedCall | None = None
        self.is_known = False
        self._model = weakref.ref(model)
        self._different: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # blocks that are no kind with others
        self._were_lazy: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # blocks that were called with lazy parameters
        self._recording_steps = 0
        self._tries_to_verify: Counter[tuple[Any, ...]] = Counter()
        self._has_stopped = self._has_no_windows = False
        # By the module that a step begins with: there are as many sorts of steps as there are such modules.
        self._opener: Any = None  # of the latest step
        self._smaller_steps: Counter[Any] = Counter()  # that were not counted since a larger one had been seen
        self._leasts: dict[Any, _LeastMemory] = {}
        self._shown: defaultdict[Any, set[str]] = defaultdict(set)  # by opener: all that _shows told of such steps
        self._retained_bytes: Counter[Any] = Counter()  # the most of such steps that retain a graph
        self._retains: defaultdict[Any, set[bool]] = defaultdict(set)  # whether such steps do
        self._input_bytes: dict[Any, int] = {}  # the most of a call of the latest such step
        self._sink: Callable[[int], None] = self._note_other
        self._clear()

    def _clear(self) -> None:
        self.calls = []
        self._earlier_calls = 0  # of blocks, as the latest call of the model began
        self.last_again = None
        self._new_kinds = False
        self._had_no_room: set[tuple[Any, ...]] = set()  # kinds of which this step could not verify a call
        self._inputs: dict[int, Any] = {}
        self._loss_bytes = 0
        self._began: Any = None
        self._began_bytes = 0  # on the device, without gradients
        self._has_backward_begun = False
        self._backward_ends: list[Any] = []
        self._between: list[list[_LaterCall]] = []  # the calls behind each backward
        self._between_bytes = 0
        self._between_waits = False
        self._is_between = False  # a backward has ended, and since then none of a surveyed call has begun

    @property
    def backward_count(self) -> int:
        """How many backwards of the step have ended."""
        return len(self._backward_ends)

    @property
    def _ended(self) -> Any:
        """When the latest backward ended; None if none has."""
        return self._backward_ends[-1] if self._backward_ends else None

    # Calls of blocks.

    def watch(self, module: nn.Module, inputs: Any) -> Watch:
        """Return how a call of a block is to be watched, and the plan that it is to follow."""
        if self._began is None:
            return Watch(None)  # the model itself was not called
        if module not in self._were_lazy and any(map(is_lazy, _state(module))):
            self._were_lazy.add(module)
            return Watch(None)  # its lazy parameters may get their values in this call
        key = kind_of_call(module, inputs)
        if module in self._different:
            key = (*key, id(module))
        # Calls behind the first backward, as in pipelines, run in the least memory all the same.
        if self._ended is not None or self._has_stopped:
            later = _LaterCall(self, module, self.least_plan(key))
            if self._between:
                self._between[-1].append(later)
            return later
        call = SurveyedCall(self, module, key, inputs)
        self.calls.append(call)
        return call

    def least_plan(self, key: tuple[Any, ...]) -> BlockPlan | None:
        """Return how a block of the kind runs in the least memory, as far as that is known and may be."""
        kind = self.kinds.get(key)
        return None if kind is None or not self._may_compute_again(kind) else kind.least

    def call_begins(self) -> None:
        """Take notice of a call of the model."""
        self._earlier_calls = len(self.calls)

    def call_raised(self) -> None:
        """Forget the blocks of a call of the model that has raised. Kinds that they have shown stay known."""
        del self.calls[self._earlier_calls :]

    def note_waiting_calls(self) -> None:
        """Note whether later calls wait for their backward, as one comes to a call before the first backward."""
        if not self._between_waits:
            self._between_waits = any(each.backwards_before is None for calls in self._between for each in calls)

    def mark(self, sink: Callable[[int], None], *, begins_backward: bool = False) -> Any:
        """Return this moment; hand the peak until now to the present sink, and the next one to ``sink``."""
        peak = self.meter.take_peak()
        if begins_backward and not self._has_backward_begun:
            self._has_backward_begun = True
            self._note_loss(peak)
        elif self._is_between:  # also a backward of none but later calls, as of a critic that is updated several times
            self._between_bytes = max(self._between_bytes, peak)
        else:
            self._sink(peak)
        self._sink = sink
        self._is_between = False
        return self.meter.now()

    def _note_loss(self, peak: int) -> None:
        self._loss_bytes = max(self._loss_bytes, peak)

    def _note_other(self, peak: int) -> None:
        self._other_bytes = peak

    def copies_inputs(self, key: tuple[Any, ...]) -> bool:
        """Return whether blocks of the kind are known to need copies of their arguments."""
        kind = self.kinds.get(key)
        return kind is not None and kind.copies_inputs

    def inputs_were_written(self, key: tuple[Any, ...]) -> None:
        """Note that the program writes to the arguments of blocks of the kind after their forward."""
        kind = self.kinds.get(key)
        if kind is not None and not kind.are_inputs_known:
            kind.note_inputs(are_written=True)

    def note_inputs(self, inputs: Any, *, are_copied: bool) -> int:
        """Return the bytes of arguments that no earlier call of this step was given; of all, if calls copy them."""
        nbytes = 0
        for storage in storages(inputs):
            known = self._inputs.get(storage._cdata)
            if are_copied or known is None or known.expired():
                self._inputs[storage._cdata] = _weak(storage)
                nbytes += storage.nbytes()
        return nbytes

    @property
    def is_timing(self) -> bool:
        """Whether the step measures times. The steps before it measure the least memory."""
        return self._opener in self._leasts or not self.meter.measures_memory

    @property
    def window_bytes(self) -> int:
        """The windows of the next such step: none while memory is measured, and else two blocks' inputs.

        So the next block's input comes while a block's backward runs, and the backward's time is not that of the copy.
        If there is no room for two, it is one.
        """
        if not self.is_timing or self._has_no_windows:
            return 0
        input_bytes, least = self._input_bytes.get(self._opener, 0), self._leasts.get(self._opener)
        has_room = least is None or least.peak_bytes + 2 * input_bytes <= self._budget.usable_bytes
        return 2 * input_bytes if has_room else input_bytes

    def _may_compute_again(self, kind: SurveyedKind) -> bool:
        return self.allows_communication or not kind.groups

    @property
    def groups(self) -> list[Any]:
        """The groups of ranks in which blocks communicate, in the order in which they were seen."""
        return list(dict.fromkeys(group for kind in self.kinds.values() for group in kind.groups))

    @property
    def is_hindered(self) -> bool:
        """Whether a block that communicates cannot be computed again here."""
        return any(kind.groups and kind.obstacle is not None for kind in self.kinds.values())

    def count_of_kind(self, key: tuple[Any, ...]) -> int:
        """Return how many calls of the kind this step had so far."""
        return sum(call.key == key for call in self.calls)

    def may_record(self, key: tuple[Any, ...]) -> bool:
        """Return whether a call of the kind is recorded: the first one, unless this step had no room for that."""
        return key not in self.kinds and key not in self._had_no_room

    def records_again(self, key: tuple[Any, ...]) -> bool:
        """Note that there was no room to verify a call. Returns whether the next step tries again."""
        self._tries_to_verify[key] += 1
        may_try = self._tries_to_verify[key] < _MOST_TRIES_TO_VERIFY
        if may_try:
            self._had_no_room.add(key)
            self._new_kinds = True
        return may_try

    def add_kind(self, key: tuple[Any, ...], kind: SurveyedKind) -> None:
        """Note a kind of block."""
        self.kinds[key] = kind
        self._new_kinds = True

    def differs(self, module: nn.Module) -> None:
        """Note that a block differs from others of its kind: it is recorded by itself in the next step."""
        if module not in self._different and self._recording_steps < _MOST_RECORDING_STEPS:
            self._different.add(module)
            self._new_kinds = True

    # Steps.

    def begin_step(self, opener: Any = None) -> None:
        """Begin a step. ``opener``: the module that it begins with; another one is another sort of steps."""
        self._clear()
        self._opener = opener
        self._other_bytes = 0
        self._began_bytes = self.meter.counts().allocated_bytes - unique_bytes(gradients(self._model()))
        self._began = self.mark(self._note_other)

    def backward_began(self) -> None:
        """Note that a backward of the step begins."""
        if not self._has_backward_begun:
            self.mark(self._note_loss, begins_backward=True)

    def backward_ended(self) -> None:
        """Take notice of the end of a backward. Calls behind the first one are not surveyed."""
        self._backward_ends.append(self.mark(self._note_other))
        self._between.append([])
        self._is_between = True

    def takes_less(self) -> bool:
        """Take notice of a step that ran out of memory. Returns whether the next one can take less."""
        could_take_less = self._new_kinds or self.window_bytes > 0  # a kind that was recorded is not recorded again
        self._has_no_windows = True
        self._leasts.clear()
        return could_take_less

    @property
    def began_bytes(self) -> int:
        """The bytes on the device as the latest step began, without gradients."""
        return self._began_bytes

    def stop(self) -> None:
        """Record and measure nothing any more."""
        self._has_stopped = True

    def end_step(self, *, is_largest: bool = True) -> bool:
        """Return whether the step shows all there is to know of such steps. Called when the next one is about to begin.

        ``is_largest``: whether no such step before it was larger. The plan is made for the largest one.
        """
        self._sink(self.meter.take_peak())  # the optimizer's
        self.is_known = False
        if self._ended is None:
            return False
        self._end_copies()
        self._input_bytes[self._opener] = max((call.input_bytes for call in self.calls), default=0)
        shown = self._shows
        new = shown - self._shown[self._opener]
        self._shown[self._opener] |= new
        self._retains[self._opener].add(_RETAINED in shown)
        if _RETAINED in shown:
            most_bytes = max(self._retained_bytes[self._opener], self._least_memory().until_backward_bytes)
            self._retained_bytes[self._opener] = most_bytes
        is_new = self._new_kinds or not self.calls
        if is_new and self._recording_steps < _MOST_RECORDING_STEPS:
            self._recording_steps += 1
            self._leasts.pop(self._opener, None)
            return False
        if new and self._leasts.pop(self._opener, None) is not None:  # its bytes are those of a step without it
            return False
        is_largest = is_largest and shown == self._shown[self._opener]
        if not is_largest and self._smaller_steps[self._opener] < _MOST_SMALLER_STEPS:
            self._smaller_steps[self._opener] += 1
            return False
        if len(self.called_keys) < len(self._known_calls()):  # the loop has replaced a block since
            return False
        if not self.is_timing:
            self._leasts[self._opener] = self._least_memory()
            return False
        self.is_known = True
        return True

    @property
    def _shows(self) -> set[str]:
        """What the step had of the things that only some steps of a loop may have."""
        later = {_LATER_CALLS} if any(self._between) else set()
        return later | ({_RETAINED} if any(call.is_retained for call in self.calls) else set())

    @property
    def some_retain(self) -> bool:
        """Whether some steps that begin as the latest one did have retained a graph, and others have not."""
        return len(self._retains[self._opener]) > 1

    def _least_memory(self) -> _LeastMemory:
        return _LeastMemory.of(self.calls, self._loss_bytes, self._other_bytes, self._between_bytes)

    def _end_copies(self) -> None:
        """Have no arguments copied any more of kinds whose backward has shown that nobody writes to them."""
        for key in {call.key for call in self.calls if call.began_again is not None}:
            kind = self.kinds.get(key)
            if kind is not None and not kind.are_inputs_known:
                kind.note_inputs(are_written=False)

    @property
    def called_modules(self) -> list[nn.Module]:
        """The block of each call that ``measured`` tells of."""
        return [call.module for call in self._known_calls()]

    @property
    def called_keys(self) -> list[tuple[nn.Module, tuple[Any, ...]]]:
        """The block of each call of the latest step, and the key of its kind; without blocks that are gone."""
        found = [(call._module(), call.key) for call in self._known_calls()]
        return [(block, key) for block, key in found if block is not None]

    @property
    def saves(self) -> list[tuple[nn.Module, int]]:
        """The block of each call of the latest step and the bytes that it saved; nothing before that step has ended.

        Blocks are left out that turned out to be of another kind than they seemed, or that do not exist any more.
        """
        calls = [] if self._ended is None else self._known_calls()
        found = [(call._module(), self.kinds[call.key].all_saved_bytes) for call in calls]
        return [(block, nbytes) for block, nbytes in found if block is not None and block not in self._different]

    def _known_calls(self) -> list[SurveyedCall]:
        return [call for call in self.calls if call.returned is not None and call.key in self.kinds]

    def measured(self) -> tuple[Measured, list[tuple[Any, ...]]]:
        """Return the measured step, and the keys of its kinds by their numbers."""
        calls = self._known_calls()
        keys = list(dict.fromkeys(call.key for call in calls))
        between = self.meter.between_s
        again = [call for call in calls if call.computed_again is not None]
        again.sort(key=lambda call: between(self._began, call.began_again))
        ends_s = [between(self._began, each) for each in self._backward_ends]
        for call, following in itertools.zip_longest(again, again[1:]):
            # A backward of the step may end behind the call, and others begin later.
            computed_s = between(self._began, call.computed_again)
            until = [each for each in ends_s if each >= computed_s]
            if following is not None:
                until.append(between(self._began, following.began_again))
            call.backward_s = min(until, default=computed_s) - computed_s
        kinds = [self._kind(key, [call for call in calls if call.key == key]) for key in keys]
        numbers = {key: number for number, key in enumerate(keys)}
        returned_s = between(self._began, calls[-1].returned) if calls else 0.0
        end_s = between(self._began, self._ended)
        if again:
            loss_s = between(calls[-1].returned, again[0].began_again)
            rest_s = max(0.0, (again[-1].backward_s or 0.0) - kinds[numbers[again[-1].key]].backward_s)
        else:
            loss_s = max(0.0, end_s - returned_s - sum(kinds[numbers[call.key]].backward_s for call in calls))
            rest_s = 0.0
        least = self._leasts.get(self._opener) or self._least_memory()
        late = self._late(calls)
        of_calls = tuple(self._calls(calls, numbers, least))
        loss_bytes = least.loss_bytes if self.meter.measures_memory else self._reckoned_bytes()
        if _RETAINED in self._shown[self._opener]:  # each backward has all kept values, as the loss has
            retained_bytes = 0 if _RETAINED in self._shows else self._retained_bytes[self._opener]
            loss_bytes = max(loss_bytes, retained_bytes, *(backward_bytes or 0 for _, _, backward_bytes in of_calls))
        measured = Measured(
            kinds=tuple(kinds),
            calls=of_calls,
            times_s=(between(self._began, calls[0].began) if calls else end_s, loss_s, rest_s),
            loss_bytes=loss_bytes,
            other_bytes=max(least.other_bytes, self._other_bytes, 0 if late else least.between_bytes),
            fixed=self._fixed(),
            late=late,
            between=self._calls_between(calls) if late else (),
            between_bytes=least.between_bytes,
            between_waits=self._between_waits and bool(late),
        )
        return measured, keys

    def _calls_between(self, calls: list[SurveyedCall]) -> tuple[tuple[int, ...], ...]:
        """Return for each call behind each backward the number of the call of its block that it repeats."""
        numbers: defaultdict[nn.Module, list[int]] = defaultdict(list)
        for number, call in enumerate(calls):
            numbers[call.module].append(number)
        counts: Counter[nn.Module] = Counter()
        between: list[tuple[int, ...]] = []
        for later in self._between:
            repeated = []
            for each in later:
                block = each.module
                if block is not None and (known := numbers.get(block)):
                    repeated.append(known[counts[block] % len(known)])
                    counts[block] += 1
            if repeated:
                between.append(tuple(repeated))
        return tuple(between)

    def _late(self, calls: list[SurveyedCall]) -> tuple[int, ...]:
        """Return the numbers of the calls whose backward begins behind the step's first backward.

        If a graph is retained, all calls are late: the values that they keep are there until the last backward.
        """
        if _RETAINED in self._shown[self._opener]:
            return tuple(range(len(calls)))
        return tuple(number for number, call in enumerate(calls) if call.backwards_before)

    def _kind(self, key: tuple[Any, ...], calls: list[SurveyedCall]) -> MeasuredKind:
        kind, between = self.kinds[key], self.meter.between_s
        timed = [call for call in calls if call.moments]
        for call in timed[-1:]:
            kind.set_times({number: between(*moments) for number, moments in call.moments.items()})
        forward_s = statistics.median(between(call.began, call.returned) for call in calls)
        if kind.obstacle is None and self.meter.measures_memory:  # of the device alone, since the host is ahead
            forward_s = min(forward_s, kind.duration_s)
        # The arguments of the first call may include some that all calls share, or that another block was given before.
        input_bytes = max(call.input_bytes for call in calls[1:] or calls)
        backward_s = self._backward_s(timed[-1:], calls)
        if backward_s is None:
            backward_s = 2 * forward_s if kind.saves else 0.0
        return kind.measured(forward_s, backward_s, self._host_s(calls), input_bytes)

    def _backward_s(self, timed: list[SurveyedCall], calls: list[SurveyedCall]) -> float | None:
        """Return how long the device takes for a backward; None if none was seen.

        A device that waits for the host takes longer. So the least time of two kinds of calls is right: in those whose
        operators are timed the host is kept ahead, and in the others the device is not interrupted.
        """
        others = [call for call in calls if not call.moments]
        seen = [[call.backward_s for call in group if call.backward_s is not None] for group in (timed, others)]
        return min((statistics.median(each) for each in seen if each), default=None)

    def _host_s(self, calls: list[SurveyedCall]) -> HostTimes:
        """Return the host's time for a call of these that is computed again; 0 if the host itself computes."""
        again = [call for call in calls[TIMED_CALLS:] or calls if call.again_host_s > 0]
        if not again or self.meter.device.type == "cpu":
            return HostTimes(0.0, 0.0)
        # The least: once as much is enqueued as the device takes, the host waits for the device.
        return HostTimes(
            min(call.forward_host_s for call in again),
            min(call.again_host_s + call.backward_host_s for call in again),
        )

    def _calls(
        self, calls: list[SurveyedCall], numbers: dict[tuple[Any, ...], int], least: "_LeastMemory"
    ) -> Iterator[tuple[int, int, int | None]]:
        measured = least.for_calls(self.calls)
        for call in calls:
            number = numbers[call.key]
            if self.meter.measures_memory:
                forward_bytes, backward_bytes = measured[id(call)]
                yield number, forward_bytes, None if call.began_again is None else backward_bytes
            else:
                base = self._reckoned_bytes()
                yield number, base, base + self.kinds[call.key].saved_bytes + call.input_bytes

    def _fixed(self) -> dict[str, int]:
        model = self._model()
        assert model is not None
        weights = unique_bytes([*model.parameters(), *model.buffers()])
        trained = [each for each in model.parameters() if each.requires_grad and not is_lazy(each)]
        gradients = sum(each.numel() * each.element_size() for each in tensors(trained))  # of a DTensor, the shard
        others = self._began_bytes - weights
        return {"weights": weights, "gradients": gradients, "other tensors, as the optimizer's": max(0, others)}

    def _reckoned_bytes(self) -> int:
        return sum(self._fixed().values())

    def leave_out_open_calls(self) -> None:
        """Leave out the calls that have not returned, as those of other threads: they may return at any moment."""
        self.calls = self._known_calls()

    def forget_tensors(self) -> None:
        """Forget the calls, and with them all that they hold."""
        self._clear()


def _state(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()
