"""Plans that are tried one after the other, each of which takes more memory than the one before."""

import dataclasses
import math
from collections.abc import Iterable

from torchoffload._fit.plan.beliefs import Beliefs
from torchoffload._fit.plan.scaling import scaled
from torchoffload._fit.plan.step import Step, StepPlan, least_plan, plan_step, plan_steps, survey_plan
from torchoffload._fit.plan.trials import Trial

__all__ = [
    "FULL_PART",
    "LEAST_SHARE",
    "SPARE_BYTES",
    "Climb",
    "Room",
    "allowed_bytes",
    "disagreement",
    "first_plan",
    "next_below",
]

# Memory is reserved in the first one, which took 2 to 7 times as long as the second one on H100s: that one is timed.
_STEPS_OF_PLAN = 2
# If pinned memory is taken or given back in the second one, a later one is timed: on an H200 one that gave back 8 GiB
# took 235 ms longer than others of its plan, and one that gave back 10 GiB took 311 ms longer.
_MOST_STEPS_OF_PLAN = 4
_STEPS_OF_OTHER_SIZES = 12
LEAST_SHARE = 0.5  # of the surveyed step's size: smaller ones are not timed
_CAUTIOUS_SLOWNESS = 1.15  # a plan is tried only if no likely belief predicts more than so many times the survey's own
_LEAST_GAIN = 0.01
_UNKNOWN_GAIN = 0.1
_DISAGREEMENT = 1.25  # the survey's times and its plan's may differ by this factor without a note
# Reserved bytes grow 1.0 to 1.43 times as fast as allocated bytes, as measured on eight models. For this model, only
# the growth between the plans that ran is known, and something is added to it.
_MOST_GROWTH = 1.5
_LEAST_GROWTH = 1.05
_LEAST_LIKELY_GROWTH = 0.9
_SAFE_GROWTH = 0.15
_MUCH_MORE = 1.1  # a plan that failed in one room may be tried in another that has so many times its bytes
_SAFE_PART = 0.04  # reserved bytes differ by this part between plans that are predicted to allocate as much
# If there is no memory for a workspace of a convolution, PyTorch takes another algorithm, and keeps to it until the
# process ends: a generator and its critic took 2,190 ms instead of 225 from then on, on an H200.
_SAFE_PART_WITH_WORKSPACES = 0.1
FULL_PART = 1 - _SAFE_PART  # a memory in which more is reserved counts as full
_AFTER_WAITING = 0.94  # of the bytes of a plan under which the allocator had too little room
# Expandable segments that are given back page by page leave pieces of pages. In full memory Llamas reserved 1.4 to 4.3%
# more than they had allocated on H200s, and 186 MiB, or 6%, were in pieces as a video DiT ran out of memory.
_PIECES_PART = 0.1
_PIECES_BYTES = 256 << 20
SPARE_BYTES = 64 << 20  # a device that has no more than this beside what was given counts as full


@dataclasses.dataclass(frozen=True)
class Room:
    """The memory that plans may take.

    Attributes
    ----------
    reserved_bytes : int
        The most bytes that may be reserved on the device.
    allocated_bytes : int
        The most bytes that may be allocated there, as predicted.
    is_measured : bool
        Whether the device can tell how many bytes are reserved.
    sharers : int
        How many models climb in the same memory.
    stuck_bytes : int or None
        If the device has no more than the room, and the allocator gives pages back as the device runs out of them: the
        bytes that it cannot give back, though nothing is in them. Else None.
    has_workspaces : bool
        Whether the blocks have operators that become many times slower if there is no memory for their workspace.
    some_take_more : bool
        Whether only some steps take the bytes that are predicted: those in which plans are tried may take fewer.
    """

    reserved_bytes: int
    allocated_bytes: int
    is_measured: bool
    sharers: int = 1
    stuck_bytes: int | None = None
    has_workspaces: bool = False
    some_take_more: bool = False

    def spare_bytes(self, needed_bytes: int) -> int:
        """Return how many bytes to leave free beside those that a plan that was tried needs."""
        return int((_SAFE_PART_WITH_WORKSPACES if self.has_workspaces else _SAFE_PART) * needed_bytes)

    def holds(self, trial: Trial) -> bool:
        """Return whether a plan that was tried keeps within the room, as far as that is measured."""
        if not self.is_measured:
            return not trial.has_failed and trial.peak_bytes <= self.allocated_bytes
        has_kept = trial.reserved_bytes <= self.reserved_bytes + SPARE_BYTES
        return not trial.has_failed and has_kept and self.needed_bytes(trial) <= self.reserved_bytes

    def is_to_try_anew(self, trial: Trial) -> bool:
        """Return whether it is not known, and possible, that a plan keeps within the room that was tried in another.

        It may have reserved more because there was more, its bytes may not be known, as after it was read from a file,
        or it has failed where there was much less.
        """
        if trial.has_failed:
            return 0 < trial.room_bytes * _MUCH_MORE < self.reserved_bytes
        if not self.is_measured:
            return False
        return not trial.allocated_bytes or (not self.holds(trial) and self.needed_bytes(trial) <= self.reserved_bytes)

    def is_near(self, trial: Trial) -> bool:
        """Return whether a plan was tried in about as much room as this."""
        return trial.room_bytes <= self.reserved_bytes * _MUCH_MORE

    def needed_bytes(self, trial: Trial) -> int:
        """Return how many reserved bytes a plan that was tried needs at most; 0 if they are not known.

        It ran with the bytes that it has reserved. If the allocator gives pages back, fewer bytes may do: an allocator
        that has room reserves more than it has to.
        """
        if not trial.allocated_bytes:
            return trial.reserved_bytes
        estimate = self._estimated_bytes(max(trial.allocated_bytes, trial.step.other_bytes))
        return trial.reserved_bytes if estimate is None else min(trial.reserved_bytes, estimate)

    def needed_for_backward(self, trial: Trial) -> int:
        """Return how many reserved bytes a plan that was tried needs at most until the end of backward.

        An optimizer may need more, and leave it to the next forward and backward.
        """
        estimate = self._estimated_bytes(trial.allocated_bytes)
        return trial.backward_reserved_bytes if estimate is None else min(trial.backward_reserved_bytes, estimate)

    def _estimated_bytes(self, allocated_bytes: int) -> int | None:
        """Return how many reserved bytes are enough for those that are allocated; None if there is no estimate."""
        if self.stuck_bytes is None or not allocated_bytes:
            return None
        return allocated_bytes + self.stuck_bytes + int(_PIECES_PART * allocated_bytes) + _PIECES_BYTES

    def has_pages_for(self, trial: Trial) -> bool:
        """Return whether the room is known to hold plans that allocate about as much as one that was tried."""
        estimate = self._estimated_bytes(trial.allocated_bytes)
        return estimate is not None and estimate <= self.reserved_bytes

    def has_to_spare(self, peak_bytes: int) -> bool:
        """Return whether a plan that is predicted to allocate so much leaves a little for pieces and workspaces."""
        spare_bytes = int(_PIECES_PART * peak_bytes) + (self.spare_bytes(peak_bytes) if self.has_workspaces else 0)
        return not self.is_measured or peak_bytes + spare_bytes <= self.reserved_bytes

    def is_ample_for(self, trial: Trial) -> bool:
        """Return whether the next step of a plan runs as well, although the allocator gave pages back in the last."""
        needed_bytes = self.needed_bytes(trial)
        return self.stuck_bytes is not None and needed_bytes + self.spare_bytes(needed_bytes) <= self.reserved_bytes


def allowed_bytes(room: Room, tried: Iterable[Trial]) -> int:
    """Return how many bytes the next plan may be predicted to allocate until the end of backward.

    The allocated and the reserved bytes are known for the plans that ran. Those of the next plan are predicted no
    better than theirs were. And reserved bytes grow with allocated bytes. So the next plan may take more than the
    largest of these, but so little more that it fits even if it grows as fast as was ever seen. If the allocator gives
    pages back, it may take as many bytes as the largest one took, even if that one has reserved the whole room: a
    faster plan may be predicted to allocate no more.
    """
    tried = [each for each in tried if each.has_failed or each.allocated_bytes or not room.is_measured]
    ran = sorted((each for each in tried if room.holds(each)), key=_taken_bytes)
    at_ease = [each for each in ran if not each.waits_for_memory] or ran[:1]
    if not at_ease:
        return 0
    most, last = room.allocated_bytes, at_ease[-1]
    if room.is_measured:
        needed_bytes = room.needed_for_backward(last)
        left = room.reserved_bytes - needed_bytes - room.spare_bytes(needed_bytes)
        most = min(most, _taken_bytes(last) + int(left / room.sharers / _growth(room, at_ease)))
        most -= max(_taken_bytes(each) - each.plan.peak_bytes for each in at_ease)
        if room.has_pages_for(last):
            most = max(most, min(room.allocated_bytes, last.plan.peak_bytes, _taken_bytes(last)))
        if room.some_take_more:
            most = min(most, room.allocated_bytes)
    for each in tried:
        if not room.holds(each) and each.plan.peak_bytes > last.plan.peak_bytes:
            most = min(most, (each.plan.peak_bytes + last.plan.peak_bytes) // 2)
        elif each.waits_for_memory and each is not last:
            most = min(most, max(last.plan.peak_bytes, int(each.plan.peak_bytes * _AFTER_WAITING)))
    return most


def _taken_bytes(trial: Trial) -> int:
    """Return the bytes that a plan allocates until the end of backward, as measured, or else as predicted."""
    return trial.allocated_bytes or trial.plan.peak_bytes


def _growth(room: Room, ran: list[Trial]) -> float:
    """Return how fast reserved bytes may grow with allocated bytes, by the plans that ran, the smallest first."""
    first, last = ran[0], ran[-1]
    allocated = _taken_bytes(last) - _taken_bytes(first)
    if allocated <= 0.02 * _taken_bytes(last):
        return _MOST_GROWTH
    if room.needed_for_backward(last) < last.backward_reserved_bytes:  # it is an estimate, and so would the growth be
        return _MOST_GROWTH
    seen = (last.backward_reserved_bytes - first.backward_reserved_bytes) / allocated
    if seen < _LEAST_LIKELY_GROWTH:  # more than the plan's own was counted for the first one
        return _MOST_GROWTH
    return min(max(seen + _SAFE_GROWTH, _LEAST_GROWTH), _MOST_GROWTH)


def first_plan(
    step: Step, room: Room, own: StepPlan | None, *, ran_bytes: int, known: Iterable[Trial] = ()
) -> StepPlan | None:
    """Return the plan that is tried first; None if none fits.

    It is the survey's own if a trial has shown that it fits, or if it is predicted to fit with some bytes to spare.
    Else another plan may fit: it has smaller windows, or keeps the outputs that there is room for. Measured bytes count
    more than predicted ones: steps of the survey did run.

    Parameters
    ----------
    step : Step
        The surveyed step.
    room : Room
        The memory that plans may take.
    own : StepPlan or None
        The plan by which the survey ran.
    ran_bytes : int
        The bytes that were reserved for that; 0 if they are not known.
    known : iterable of Trial
        Plans of the same step that were tried before.
    """
    if own is not None:
        does = Trial(step, own).does
        tried = [each for each in known if each.step_s is not None or each.has_failed]
        held = [room.holds(each) for each in tried if each.does == does and not room.is_to_try_anew(each)]
        if held and all(held):
            return own
        if held:
            own = None
    least_windows = survey_plan(step)
    if own is not None and step.peak_bytes(own) <= room.allocated_bytes:
        saved_bytes = step.peak_bytes(own) - step.peak_bytes(least_windows)
        # Beside large weights the windows are a small part of the peak, and may yet take the room of a workspace.
        saves_little = saved_bytes <= (0 if room.has_workspaces else _SAFE_PART * step.peak_bytes(own))
        if room.has_to_spare(step.peak_bytes(own)) or saves_little:
            return own
    if step.peak_bytes(least_windows) <= room.allocated_bytes:
        return least_windows
    if room.is_measured and 0 < ran_bytes <= room.reserved_bytes:
        return least_windows
    least = least_plan(step)
    return least if step.peak_bytes(least) <= room.allocated_bytes else None


def next_below(trials: Iterable[Trial], failed: Trial, room_bytes: int) -> Trial | None:
    """Return the plan to follow once one has failed that had run before: one that takes less; None if none does.

    Parameters
    ----------
    trials : iterable of Trial
        The plans that were tried: those that take as much are marked as failed.
    failed : Trial
        The plan that has failed.
    room_bytes : int
        The most bytes that might be reserved as it failed.
    """
    ran = []
    for each in trials:
        if each.plan.peak_bytes >= failed.plan.peak_bytes:
            each.has_failed, each.room_bytes = True, max(each.room_bytes, room_bytes)
        if each.step_s is not None and not each.has_failed:
            ran.append(each)
    if ran:
        return min(ran, key=lambda each: each.step_s or 0.0).with_times(failed.step)
    least = Trial(failed.step, least_plan(failed.step))
    return least if least.plan.peak_bytes < failed.plan.peak_bytes else None


def disagreement(climb: "Climb") -> list[str]:
    """Return a note if the times that the survey measured differ from the time that its own plan took."""
    taken = climb.disagreement
    if taken is None or 1 / _DISAGREEMENT <= taken <= _DISAGREEMENT:
        return []
    return [
        f"the survey's own plan took {taken:.2f} times what its measured times say: what was planned then goes by what "
        "steps took under the plans that were tried"
    ]


class Climb:
    """The trials of plans for one surveyed step.

    The first plan is what ``first_plan`` returns, in most cases the survey's own, which is known to run; no plan
    that is slower than it is ever settled on. Each later one takes as much memory as ``allowed_bytes`` says, and it is
    the fastest by the times of the plans before it.

    Parameters
    ----------
    step : Step
        The surveyed step.
    own : StepPlan
        The plan by which the survey ran.
    room : Room
        The memory that plans may take.
    steps : int
        How many steps may be taken.
    known : sequence of Trial
        Plans of the same step that were tried before.
    own_reserved_bytes : int
        The bytes that the survey's steps have reserved.
    patience : int
        How many times as many small steps in a row as usual do not end it.

    Attributes
    ----------
    trials : list of Trial
        The plans that were tried.
    elsewhere : list of Trial
        Known plans that tell nothing of the bytes in this room.
    current : Trial or None
        The one that is tried now.
    met_small_steps : bool
        Whether it has ended since many steps in a row were too small to tell anything.
    """

    def __init__(
        self, step: Step, own: StepPlan, room: Room, steps: int, known: Iterable[Trial] = (),
        own_reserved_bytes: int = 0, patience: int = 1,
    ) -> None:  # fmt: skip
        self.room = self._whole_room = room
        self._most_others = patience * _STEPS_OF_OTHER_SIZES
        # A plan that reserved more where there was more is to be tried anew in this room. Its time tells nonetheless.
        here: list[Trial] = []
        self.trials: list[Trial] = []
        self.elsewhere: list[Trial] = []
        for each in known:
            (self.elsewhere if room.is_to_try_anew(each) else here).append(each)
        failed = [each.does for each in here if each.has_failed]
        for each in here:  # a plan that failed in this memory may have run where there was more
            (self.trials if each.has_failed or each.does not in failed else self.elsewhere).append(each)
        self.current: Trial | None = None
        self._surveyed = step
        self._beliefs = Beliefs(step)
        # If the survey has reserved more than the room has, its reserved bytes tell nothing about this room.
        is_of_this_room = own_reserved_bytes <= room.reserved_bytes
        own_trial = Trial(step, own, reserved_bytes=own_reserved_bytes if is_of_this_room else 0)
        self._own = next((each for each in self.trials if each.does == own_trial.does), own_trial)
        self._steps = steps
        self._taken = self._others = 0  # steps of the current plan, and small steps in a row
        self.met_small_steps = False
        self._learn()

    @property
    def own(self) -> Trial:
        """The survey's own plan."""
        return self._own

    @property
    def best(self) -> Trial | None:
        """The fastest of the plans that ran and kept to the room; the survey's own if none did; None if it failed."""
        timed = [each for each in self.trials if each.step_s is not None and self.room.holds(each)]
        if timed:
            return min(timed, key=lambda each: each.step_s or 0.0)
        return None if self._own.has_failed else self._own

    @property
    def step(self) -> Step:
        """The surveyed step, with the times that explain those of the plans that were tried."""
        return self._beliefs.best.of(self._surveyed)

    @property
    def disagreement(self) -> float | None:
        """The time of the survey's own plan, over its time as predicted from the survey; None if it was not timed."""
        predicted_s = self._own.plan.timed_as(self._surveyed).step_s
        return None if self._own.step_s is None or predicted_s <= 0 else self._own.step_s / predicted_s

    def take_next(self) -> Trial | None:
        """Go on to the next plan; None if there is none that is worth a trial."""
        self._taken = self._others = 0
        self.current = self._next()
        if self.current is not None:
            self.current.room_bytes = self.room.reserved_bytes
            if self.current not in self.trials:
                self.trials.append(self.current)
        return self.current

    def _next(self) -> Trial | None:
        own_s = self._own.step_s
        if self.met_small_steps:
            return None
        if own_s is None:
            return None if self._own.has_failed else self._own
        if self._steps < _STEPS_OF_PLAN or any(each.has_failed and self.room.is_near(each) for each in self.trials):
            return None
        ran = [each for each in self.trials if each.step_s and self.room.holds(each)]
        fastest = min(ran, key=lambda each: each.step_s or 0.0, default=self._own)
        memory_bytes = allowed_bytes(self.room, self.trials)
        trial = self._worth_trying(memory_bytes, fastest)
        if trial is None and self.room.stuck_bytes is not None:
            # If the allocator gives pages back, large pieces matter less: the time for them may be saved.
            trial = self._worth_trying(memory_bytes, fastest, leaves_room=False)
        return trial

    def _worth_trying(self, memory_bytes: int, fastest: Trial, *, leaves_room: bool = True) -> Trial | None:
        """Return a plan that may be faster than the fastest one that ran; None if there is none."""
        step, own_s = self.step, self._own.step_s or 0.0
        fastest_s = fastest.step_s or own_s
        done = [each.does for each in self.trials if each.step_s is not None or each.has_failed]
        found: list[tuple[float, float, Trial]] = []  # with its time by the best belief, and its least likely time
        for plan in self._plans(step, memory_bytes, leaves_room=leaves_room):
            least_s, best_s, most_s = self._beliefs.predicted_s(plan, (fastest.plan, fastest_s))
            trial = Trial(step, plan)
            if most_s <= _CAUTIOUS_SLOWNESS * own_s and trial.does not in done:
                found.append((best_s, least_s, trial))
        if not found:
            return None
        best_s, _, trial = min(found, key=lambda each: each[0])
        wanted_s = fastest_s * (1 - _LEAST_GAIN)
        believed_s = wanted_s * fastest.plan.timed_as(step).step_s / max(fastest_s, 1e-12)  # for the best belief
        if best_s <= wanted_s or self._would_gain(step, believed_s, memory_bytes):
            return trial
        # The likely beliefs may explain the steps so far in several ways. One of them may say that there is much to
        # gain.
        _, least_s, trial = min(found, key=lambda each: each[1])
        return trial if least_s <= fastest_s * (1 - _UNKNOWN_GAIN) else None

    def _plans(self, step: Step, memory_bytes: int, *, leaves_room: bool) -> list[StepPlan]:
        """Return plans that are best in a memory: by the best belief, by the slowest likely link, and without moves."""
        steps = [step]
        if step.may_move:
            if self.room.is_measured and leaves_room:
                # Large pieces that the allocator can join are worth a little time.
                steps[0] = dataclasses.replace(step, leaves_room=True)
            slowest = min(belief.rate for belief in self._beliefs.likely)
            steps.append(step.with_times(rate=slowest / self._beliefs.best.rate))
            steps.append(dataclasses.replace(step, may_move=False))
        return [plan.timed_as(step) for plan in plan_steps([each.of_blocks for each in steps], memory_bytes)]

    def _would_gain(self, step: Step, wanted_s: float, memory_bytes: int) -> bool:
        """Return whether a plan in more memory would be faster: the next plan is then a part of the way to it."""
        if memory_bytes >= self.room.allocated_bytes:
            return False
        plan = plan_step(step.of_blocks, self.room.allocated_bytes)
        return plan is not None and plan.step_s <= wanted_s

    def note_step(
        self, step_s: float, *, allocated_bytes: int, reserved_bytes: int, ended_bytes: int, grown_bytes: int,
        waits_for_memory: bool, resizes_host: bool = False, share: float = 1.0,
    ) -> bool:  # fmt: skip
        """Note a step of the current plan. Returns whether that was its last one.

        Parameters
        ----------
        step_s : float
            The time of the step.
        allocated_bytes : int
            The most that was allocated until the end of backward.
        reserved_bytes, ended_bytes, grown_bytes : int
            The most bytes that were reserved, the bytes that were reserved as backward ended, and how many more these
            were than the bytes reserved as the step began.
        waits_for_memory : bool
            Whether the allocator had to give back the memory that it caches.
        resizes_host : bool
            Whether pinned host memory was taken or given back in the step: its time says little about the plan.
        share : float
            The size of the step, as a part of the surveyed step's. Time and bytes are scaled up to the surveyed step.
        """
        trial = self.current
        assert trial is not None
        if share < LEAST_SHARE:  # it says too little
            self._others += 1
            trial.reserved_bytes = max(trial.reserved_bytes, reserved_bytes)
            self.met_small_steps = self._others > self._most_others
            return self.met_small_steps
        self._others = 0
        if share < 1:
            fixed = sum(self._surveyed.fixed.values())
            allocated_bytes, reserved_bytes, ended_bytes = (
                int(fixed + max(0, each - fixed) / share) if each else 0
                for each in (allocated_bytes, reserved_bytes, ended_bytes)
            )
            grown_bytes = int(grown_bytes / share)
            less_s = trial.plan.timed_as(scaled(trial.step, share)).step_s
            step_s *= trial.plan.step_s / less_s if less_s > 0 else 1.0
        self._steps -= 1
        self._taken += 1
        # Bytes that it allocates beyond those of its first step may lie in memory that an optimizer has reserved.
        hidden_bytes = int(_MOST_GROWTH * max(0, allocated_bytes - trial.allocated_bytes))
        trial.allocated_bytes = max(trial.allocated_bytes, allocated_bytes)
        trial.reserved_bytes = max(trial.reserved_bytes, reserved_bytes)
        # The cache was emptied before the first step. Later ones begin with the bytes that an optimizer has reserved.
        more_bytes = max(0, grown_bytes, hidden_bytes)
        backward_bytes = ended_bytes if self._taken == 1 else trial.backward_reserved_bytes + more_bytes
        trial.backward_reserved_bytes = min(backward_bytes, trial.reserved_bytes)
        # The next step of a plan that waits for memory may run out of it. The survey's own plan is known to run.
        is_at_risk = waits_for_memory and trial is not self._own and not self.room.is_ample_for(trial)
        least_steps = _MOST_STEPS_OF_PLAN if resizes_host and self._steps > 0 else _STEPS_OF_PLAN
        if self._taken < least_steps and not is_at_risk:
            return False
        trial.waits_for_memory = waits_for_memory
        trial.step_s = step_s if trial.step_s is None else min(trial.step_s, step_s)
        self._learn()
        return True

    def leaves_free(self, nbytes: int) -> bool:
        """Leave so many allocated bytes of the room free from now on, which something beside the step has come to hold.

        Plans that ran since then are counted with these bytes as well, so that they have a little less than there is.
        Returns False, and changes nothing, if the current plan and the survey's own may not run beside them.
        """
        ran = [each for each in self.trials if each.allocated_bytes and each.reserved_bytes]
        growth = max((each.reserved_bytes / each.allocated_bytes for each in ran), default=_MOST_GROWTH)
        whole = self._whole_room
        room = dataclasses.replace(
            whole, reserved_bytes=whole.reserved_bytes - int(max(1.0, growth) * nbytes),
            allocated_bytes=whole.allocated_bytes - nbytes,
        )  # fmt: skip
        for each in (self._own, self.current):
            if each is not None and room.needed_bytes(each) > FULL_PART * room.reserved_bytes:
                return False
        self.room = room
        return True

    def note_failure(self) -> None:
        """Note that a step of the current plan ran out of memory."""
        assert self.current is not None
        self.current.has_failed = True

    def _learn(self) -> None:
        ran = [*self.elsewhere, *self.trials]
        timed = [each for each in ran if each.step_s is not None and 0 < each.step_s < math.inf]
        telling = [each for each in timed if not each.waits_for_memory] or timed
        if telling:
            self._beliefs.learn([(each.plan, each.step_s or 0.0) for each in telling])
