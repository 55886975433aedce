"""The beginning and the end of each step of a fitted model, and its times and bytes."""

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from torchoffload._devices import Counts, Meter
from torchoffload._fit.model.backwards import Backwards
from torchoffload._fit.model.open_calls import OpenCalls
from torchoffload._observe.stats import stats

__all__ = ["Clock", "FinishedStep", "Opener"]

Opener = weakref.ref[nn.Module] | None  # the module that a step begins with; None if that was not told

_MOST_OPEN_CALLS = 64
_STUCK = 20  # calls, and no backward


@dataclass(frozen=True, kw_only=True)
class FinishedStep:
    """A step that is over.

    Attributes
    ----------
    opener : weakref.ref of nn.Module
        The module that it began with, as ``Openers`` explains it.
    parts : Counter of weakref.ref of nn.Module
        How often the loop called each module in it.
    first_size, size : int
        The bytes of the arguments of its first call, and of the largest one of the module that the loop called first.
    blocks_bytes, block_count : int
        The bytes of the arguments of its calls of blocks before its first backward, and how many calls there were.
    began, ended : moment
        When it began, and when its backward ended; None if that did not happen.
    is_lost : bool
        Whether it ran out of memory, in forward, in backward or behind it, so that the loop has lost it.
    is_rest : bool
        Whether it was the rest of an earlier one: the backward of a call came that was not awaited any more.
    has_waited : bool
        Whether the allocator had to give back cached memory, or an allocation failed that nobody was told of.
    went_without : bool
        Whether an allocation failed that a library did without, as cuDNN does, whose convolutions are slower then.
    has_resized_host : bool
        Whether the process had more or less pinned host memory as its backward ended than as it began, if the clock
        measures steps: to take or give back gibibytes of it takes longer than many a step.
    allocated_bytes : int
        The most that was allocated on the device until the end of backward. If the clock does not measure steps, it is
        known of those alone that took more than what ran since a peak was last taken, and else 0.
    reserved_bytes : int
        The most that was reserved there, at the end of backward or now: the loop may empty the cache in between.
    began_reserved_bytes, ended_reserved_bytes : int
        The bytes that were reserved when it began, and at the end of its backward; 0 if that did not end.
    left_bytes : int
        The bytes that are allocated now, behind the optimizer if it has stepped.
    """

    opener: Opener
    parts: Counter[Opener]
    first_size: int
    size: int
    blocks_bytes: int
    block_count: int
    began: Any
    ended: Any
    is_lost: bool
    is_rest: bool
    has_waited: bool
    went_without: bool
    has_resized_host: bool
    allocated_bytes: int
    reserved_bytes: int
    began_reserved_bytes: int
    ended_reserved_bytes: int
    left_bytes: int


class _Listener(Protocol):
    def opener_of(self, called: Opener) -> Opener: ...
    def step_begins(self, size: int) -> None: ...
    def step_finished(self, step: FinishedStep) -> None: ...
    def backward_began(self) -> None: ...
    def backward_ended(self) -> None: ...
    def note_stuck(self) -> None: ...


@dataclass(kw_only=True)
class _Step:
    """The step that has begun."""

    counts: Counts  # as it began
    first: Opener  # the module that the loop called first
    first_size: int
    parts: Counter[Opener]
    number: int  # of its first call
    is_rest: bool = False
    began: Any = None
    ended_counts: Counts | None = None  # as its latest backward ended
    ended: Any = None
    size: int = 0
    call_count: int = 0
    was_open: bool = False  # a call of it has waited for its backward
    blocks_bytes: int = 0
    block_count: int = 0
    # As the latest call of the model began.
    blocks_bytes_before: int = 0
    block_count_before: int = 0
    allocated_bytes: int = 0
    pinned_bytes: int = 0  # as it began
    has_resized_host: bool = False

    @property
    def ended_reserved_bytes(self) -> int:
        """The bytes that were reserved as its latest backward ended; 0 if none has."""
        return 0 if self.ended_counts is None else self.ended_counts.reserved_bytes

    def has_lost(self, now: Counts) -> bool:
        """Return whether an allocation failed that ended the step.

        PyTorch counts those as well that a library has tried and done without, as cuDNN does: backward ends then.
        """
        before = self.counts if self.ended_counts is None else self.ended_counts
        return now.failures > before.failures


class Clock:
    """Emits the steps of a model: a call with gradients, or several before a common backward, and that backward.

    A gradient that is asked for inside of a call, as in the forward of a block, is a part of the call and no backward
    of the step. But a model that returns nothing that has a backward may have the step's own in its forward.

    Parameters
    ----------
    listener : object
        It is told of steps and backwards. It holds the clock.
    meter : Meter
        The device's clock and memory.
    agree : callable
        Returns for each value the largest one of the ranks that decide together.

    Attributes
    ----------
    open_calls : OpenCalls
        The calls of the model that are running. Whoever sees them begin and end tells it.
    """

    def __init__(self, listener: _Listener, meter: Meter, agree: Callable[..., Any]) -> None:
        self._listener = listener
        self._meter = meter
        self._agree = agree
        self._backwards = Backwards(self)
        self.open_calls = OpenCalls()
        self._step: _Step | None = None
        self.measures = False  # whether moments and peaks are wanted, which takes a little time
        self.has_open_calls = False  # of any rank, at the latest call
        self._is_in_call = False  # or a call has raised
        self._follows_blocks = False  # since the model returns nothing that has a backward
        self._open_blocks = 0  # calls of blocks in the present call that have not ended
        self._had_inner_backward = False  # in the present call
        self._unanswered = 0  # calls since a backward was seen
        self._was_called = False
        self._called: Opener = None  # the latest call's module
        self.opener: Opener = None  # of the latest step

    @property
    def is_first_called(self) -> bool:
        """Whether the latest call is one of the module that the loop called first in the step."""
        return self._step is not None and self._called == self._step.first

    @property
    def is_without_blocks(self) -> bool:
        """Whether a step has begun, and none of its blocks yet."""
        return self._step is not None and self._step.block_count == 0

    @property
    def block_count(self) -> int:
        """How many calls of blocks the step had."""
        return 0 if self._step is None else self._step.block_count

    @property
    def called(self) -> Opener:
        """The module of the latest call."""
        return self._called

    @property
    def called_count(self) -> int:
        """How often the step has called it."""
        return 0 if self._step is None else self._step.parts[self._called]

    @property
    def is_backward_seen(self) -> Callable[[], bool]:
        """The function to call in a backward when a block is computed again. It returns whether that is the step's."""
        return self._backwards.is_seen

    @property
    def has_been_called(self) -> bool:
        """Whether a call with gradients was seen."""
        return self._was_called

    @property
    def is_between_steps(self) -> bool:
        """Whether no step has begun, or a backward of the latest one is over."""
        return self._step is None or self._step.ended_counts is not None

    @property
    def has_lost_step(self) -> bool:
        """Whether the step that has begun ran out of memory, on this rank."""
        return self._step is not None and self._step.has_lost(self._meter.counts())

    def forget(self) -> None:
        """Begin a step with the next call."""
        self._step = None

    def note_call(self, module: nn.Module, arguments: Any) -> None:
        """Take notice of a call of the model or of a part of it, before call_begins() or call_goes_on()."""
        self._called = weakref.ref(module)
        self._backwards.call_begins(module, arguments)

    def call_begins(self, size: int) -> int:
        """Take notice of a call of the model. Returns its size, or that of the largest one of any rank."""
        counts = self._meter.counts()
        self._unanswered += 1
        self._was_called = True
        if self._unanswered == _STUCK:
            self._listener.note_stuck()
        step = self._step
        lost = step is not None and step.has_lost(counts)
        reserved_bytes = max(counts.reserved_bytes, 0 if step is None else step.ended_reserved_bytes)
        agreed = self._agree(size, self._backwards.has_open_calls, lost, reserved_bytes)
        size, is_open, is_lost, reserved_bytes = map(int, agreed)
        self.has_open_calls = bool(is_open)
        if step is not None:
            step.call_count += 1
            is_full = step.call_count > _MOST_OPEN_CALLS
            is_over = step.ended_counts is not None and (not self.has_open_calls or is_full)
            if is_over or is_lost:
                self._step = None
                self._listener.step_finished(self._finished(step, counts, bool(is_lost), reserved_bytes))
            elif is_full or (step.was_open and not self.has_open_calls and step.ended_counts is None):
                self._step = None  # maybe since no backward comes: begin again
        step = self._step or self._begin_step(size, self._listener.opener_of(self._called))
        self._note_part(size)
        step.blocks_bytes_before, step.block_count_before = step.blocks_bytes, step.block_count
        self._enter()
        return size

    def _enter(self) -> None:
        self._is_in_call = True
        self._open_blocks, self._had_inner_backward = 0, False

    @property
    def first_size(self) -> int:
        """The bytes of the arguments of the first call of the step."""
        return 0 if self._step is None else self._step.first_size

    def begin_anew(self, opener: Opener) -> None:
        """Begin the step anew, which turned out to begin with this module: none of its blocks was called yet."""
        size, self._step = self.first_size, None
        self._begin_step(size, opener)
        self._note_part(size)

    def _begin_step(self, size: int, opener: Opener) -> _Step:
        self.opener = opener
        self._listener.step_begins(size)
        self._step = step = _Step(
            counts=self._meter.counts(), first=self._called, first_size=size, parts=Counter(),
            number=self._backwards.count,
        )  # fmt: skip
        if self.measures:
            self._meter.take_peak()
            step.pinned_bytes = stats().pinned_bytes
            step.began = self._meter.now()
        return step

    def call_goes_on(self, size: int) -> None:
        """Take notice of the call of another part of the model, which belongs to the call of the part before."""
        self._enter()
        self._note_part(size)

    def _note_part(self, size: int) -> None:
        if self._step is not None:
            self._step.parts[self._called] += 1
            if self.is_first_called:
                self._step.size = max(self._step.size, size)

    def _finished(self, step: _Step, counts: Counts, is_lost: bool, reserved_bytes: int) -> FinishedStep:
        ended = step.ended_counts
        return FinishedStep(
            opener=self.opener,
            parts=step.parts,
            first_size=step.first_size,
            size=step.size,
            blocks_bytes=step.blocks_bytes,
            block_count=step.block_count,
            began=step.began,
            ended=step.ended,
            is_lost=is_lost,
            is_rest=step.is_rest,
            has_waited=(ended or counts).waits > step.counts.waits,
            went_without=ended is not None and ended.failures > step.counts.failures,
            has_resized_host=step.has_resized_host,
            allocated_bytes=step.allocated_bytes,
            reserved_bytes=reserved_bytes,
            began_reserved_bytes=step.counts.reserved_bytes,
            ended_reserved_bytes=step.ended_reserved_bytes,
            left_bytes=counts.allocated_bytes,
        )

    def block_begins(self, nbytes: int) -> None:
        """Take notice of a call of a block, which is given so many bytes."""
        if self._step is not None and self._is_in_call:  # blocks may be called by themselves as well
            if self._step.ended_counts is None:
                self._step.blocks_bytes += nbytes
            self._step.block_count += 1
            self._open_blocks += 1

    def follow_block(self, output: Any) -> None:
        """Take notice of the end of a block's call, and of its output if the model's has no backward."""
        self._open_blocks = max(0, self._open_blocks - 1)
        if self._follows_blocks and self._is_in_call:
            self._backwards.follow(output)

    def call_raised(self) -> None:
        """Take notice of a call that has raised: its blocks are not a part of the step."""
        step = self._step
        if step is not None:
            step.blocks_bytes, step.block_count = step.blocks_bytes_before, step.block_count_before
            step.parts[self._called] -= 1

    def call_ends(self, output: Any) -> None:
        """Take notice of the model's output."""
        self._is_in_call = False
        self._follows_blocks = not self._backwards.follow(output)
        if self._step is not None:
            self._step.was_open |= self._backwards.has_open_calls
        if self._had_inner_backward and self._follows_blocks:
            self.backward_ends()

    def is_inner_backward(self) -> bool:
        """Return whether a backward, in which this is called, is that of a gradient inside of a call."""
        may_be_of_step = self._follows_blocks and not self._open_blocks
        if not self._is_in_call or may_be_of_step or not self.open_calls.have_backward():
            return False
        self._unanswered = 0
        self._had_inner_backward = True
        return True

    def backward_begins(self) -> None:
        """Take notice of a backward, in which this is called."""
        if self._step is not None:
            self._listener.backward_began()

    def backward_ends(self) -> None:
        """Take notice of the end of a backward."""
        self._unanswered = 0
        late_number, self._backwards.late_number = self._backwards.late_number, 0
        step = self._step
        if step is None:
            return
        step.is_rest |= 0 < late_number < step.number
        self._listener.backward_ended()
        if self.measures:
            step.ended = self._meter.now()
            step.allocated_bytes = max(step.allocated_bytes, self._meter.take_peak())
            step.has_resized_host = stats().pinned_bytes != step.pinned_bytes
        step.ended_counts = self._meter.counts()
        if not self.measures and step.ended_counts.peak_bytes > step.counts.peak_bytes:
            step.allocated_bytes = step.ended_counts.peak_bytes
