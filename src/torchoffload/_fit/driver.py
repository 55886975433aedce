"""What a fitted model does from step to step: it is surveyed, plans are tried, and one is followed and watched."""

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchoffload._contexts.options import OffloadOptions
from torchoffload._fit.agreement import Agreement
from torchoffload._fit.budget import Budget
from torchoffload._fit.called_blocks import CalledBlocks
from torchoffload._fit.climb import Climb, Room, allowed_bytes
from torchoffload._fit.clock import Clock, FinishedStep
from torchoffload._fit.following import Following
from torchoffload._fit.kinds import Kind
from torchoffload._fit.link import Link, measure_link
from torchoffload._fit.meter import Meter
from torchoffload._fit.phase import Climbing, LeastMemory, Phase, Removed, Settled, State, Surveying
from torchoffload._fit.plan_file import SavedPlan
from torchoffload._fit.planning import surveyed_step
from torchoffload._fit.replay import Watch
from torchoffload._fit.scaling import OtherSizes, scaled
from torchoffload._fit.sizes import BlockCalls, argument_bytes
from torchoffload._fit.step import Step, StepPlan, least_plan, survey_plan
from torchoffload._fit.survey import Survey
from torchoffload._fit.trials import Trial, failure_message, restricted, unfit_message
from torchoffload._fit.turns import turns_of, weakly, windows_of
from torchoffload._modules.selection import Chosen
from torchoffload._observe.units import human_bytes
from torchoffload._warnings import warn_user

__all__ = ["Driver"]

_MOST_STEPS = 12  # from the first step of a survey until a plan is settled on
_LEAST_TRIAL_STEPS = 4  # however long the survey was: for its own plan, and one more
_GROWN = 0.01  # of the memory: so much more than in the survey is there for good before a step
_DISAGREEMENT = 1.25  # by which what the survey measured and what its plan takes may differ without being told
_MOST_STATE_SURVEYS = 8  # because blocks have changed: there may be a change in each step


class Driver:
    """One fitted model.

    Parameters
    ----------
    model, chosen : nn.Module, list of Chosen
        The model, and its blocks.
    meter : Meter
        The device's clock and memory.
    budget : Budget
        What plans may take.
    may_recompute, may_move : bool
        What plans may do.
    options : dict
        The options of the contexts that move.
    raises : bool
        Whether a step that does not fit is an error, or else a warning.
    group : ProcessGroup or "auto" or None
        Which ranks make their plans together; "auto": those whose blocks communicate with each other.

    Attributes
    ----------
    model, model_name, block_count : weakref.ref of nn.Module, str, int
        The model, its class, and how many blocks it has.
    state : State
        What it is at.
    step : Step or None
        What the survey showed, with the times that the trials have shown.
    trials : list of Trial
        The plans that are or were tried.
    called : CalledBlocks
        The blocks that the surveyed step called.
    notes : list of str
        What did not go as planned.
    allocator : str
        What was done about the device's allocator, for people.
    left_plan_count : int
        How many calls of blocks called other operators than planned.
    largest_size : int
        The bytes of the arguments of the model's largest call.
    """

    def __init__(
        self,
        model: nn.Module,
        chosen: list[Chosen],
        meter: Meter,
        *,
        budget: Budget,
        may_recompute: bool,
        may_move: bool,
        options: dict[str, Any],
        raises: bool,
        group: Any = "auto",
    ) -> None:
        self.model = weakref.ref(model)
        self._following = Following(model, chosen, may_move=may_move, options=options)
        self.names = self._following.names
        self.model_name, self.block_count = type(model).__name__, len(self.names)
        self._group = group
        self.agreement: Agreement | None = None
        self.meter, self.budget = meter, budget
        self.may_recompute, self.may_move = may_recompute, may_move
        self._context_options = OffloadOptions(**options)
        self._raises = raises
        self.step: Step | None = None
        self.operators: list[tuple[Any, ...]] = []  # of each kind of block, in order
        self._surveyed: Step | None = None  # before anything was learned from trials
        self._own: StepPlan | None = None  # the plan by which the survey ran
        self._survey_reserved_bytes = 0
        self.trials: list[Trial] = []
        self.called = CalledBlocks([], self.names)
        self._followed: Trial | None = None
        self.notes: list[str] = []
        self.allocator = ""
        self.left_plan_count = 0
        self.obstacles: dict[int, str] = {}
        self._link: Link | None = None
        self._reset_counters: list[Callable[[], None]] = []
        self._steps = 0  # since the survey began
        self._base_bytes = 0  # what was allocated before a step, in the survey
        self.largest_size, self._blocks_bytes, self._block_count = 0, 0, 0  # of the largest step
        self._kinds: dict[tuple[Any, ...], Kind] = {}  # of blocks, that were recorded
        self._states: set[Any] = set()  # of blocks, that were surveyed
        self._has_new_state = False
        self._state_surveys = 0  # because of such states
        self._known_shapes: Any = None
        self.clock = Clock(self, meter, self._largest)
        self._block_calls = BlockCalls(weakly(self._block_begins), weakly(self._look_at_state))
        self.state: State = Removed(None)
        try:
            self._block_calls.watch(self.names)
            self._begin_survey()
        except BaseException:  # such as a TorchScript module, which takes no hooks
            self.remove()
            raise

    @property
    def phase(self) -> Phase:
        """What it is at, by its name."""
        return self.state.name

    @property
    def settled(self) -> Trial | None:
        """The plan that is followed for good; None while there is none."""
        match self.state:
            case Settled(trial) | LeastMemory(trial) | Removed(trial):
                return trial
            case _:
                return None

    # ---- what the model and its blocks tell ----

    def call_begins(self, inputs: Any) -> None:
        """Take notice of a call of the model with gradients, and change its plan if it is time to."""
        size = self.clock.call_begins(argument_bytes(inputs))
        if isinstance(self.state, Surveying):
            tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
            self._allow_communication(self.state.survey, [(tensor.shape, tensor.dtype) for tensor in tensors])
        elif self._is_too_large(size):  # a call beside others that wait for their backward
            self._begin_survey()
        if not self.clock.has_open_calls:  # calls before a common backward are one step, as in pipelines
            for reset in self._reset_counters:
                reset()
        self._follow_size(self.largest_size if self.clock.has_open_calls else size)

    def call_ends(self, output: Any) -> None:
        """Take notice of what the model returned."""
        self.clock.call_ends(output)

    def _block_begins(self, nbytes: int) -> None:
        self.clock.block_begins(nbytes)

    def _look_at_state(self, state: Any) -> None:
        if isinstance(self.state, Surveying):
            self._states.add(state)
        elif self._states and state not in self._states:
            self._states.add(state)
            self._has_new_state = self._state_surveys < _MOST_STATE_SURVEYS

    def _largest(self, *values: float) -> Any:
        """Return for each value the largest one of the ranks that decide together."""
        return values if self.agreement is None else self.agreement.largest(*values)

    # ---- what the clock tells ----

    def step_begins(self, size: int) -> None:
        """Take notice of a step that begins with a call of this size."""
        if not isinstance(self.state, Surveying) and self._is_too_large(size):
            self._begin_survey()
        self._block_calls.begin_step(looks_at_all=isinstance(self.state, Surveying))
        if isinstance(self.state, Surveying):
            survey = self.state.survey
            self.budget.is_surveying = not survey.is_known
            survey.begin_step()

    def backward_began(self) -> None:
        """Take notice of a backward, in which this is called."""
        if isinstance(self.state, Surveying):
            self.state.survey.backward_began()

    def backward_ended(self) -> None:
        """Take notice of the end of a backward."""
        if isinstance(self.state, Surveying):
            self.state.survey.backward_ended()

    def step_finished(self, step: FinishedStep) -> None:
        """Go on after a step."""
        self._steps += 1
        match self.state:
            case Surveying(survey):
                self._end_survey_step(survey, step)
            case Climbing(climb):
                self._end_trial_step(climb, step)
            case Settled(trial):
                self._end_settled_step(trial, step)
            case LeastMemory():
                if self._largest(self._differs(step))[0]:
                    self._begin_survey()
            case Removed():
                pass

    # ---- the survey ----

    def _begin_survey(self) -> None:
        """Begin a survey. The kinds of blocks that are known already are not recorded again."""
        survey = Survey(
            cast(nn.Module, self.model()), self.meter, self.budget, self.clock.is_backward_seen,
            may_recompute=self.may_recompute, may_agree=self._group is not None, kinds=self._kinds,
        )  # fmt: skip
        self.state = Surveying(survey)
        self._known_shapes = None
        self.trials, self.step, self._surveyed, self._own = [], None, None, None
        self._followed = None
        self._state_surveys += self._has_new_state
        self._steps = self.largest_size = self._blocks_bytes = self._block_count = 0
        self._survey_reserved_bytes, self._has_new_state = 0, False
        self.clock.measures = False
        self.clock.forget()
        self.budget.begin_survey()
        self._watch(survey, survey.window_bytes)

    def _watch(self, survey: Survey, window_bytes: int) -> None:
        """Have the survey watch the blocks."""
        blocks = list(self.names)
        watch = weakly(survey.watch, otherwise=Watch(None))
        self._following.follow(dict.fromkeys(blocks, watch), blocks if self.may_move else [], window_bytes)
        if not survey.is_timing:  # else the host would have to get memory from the device anew while it is timed
            self.meter.forget_reserved()

    def _end_survey_step(self, survey: Survey, step: FinishedStep) -> None:
        """Plan if the survey is done, and else let it go on."""
        if step.is_lost:
            self._end_lost_survey_step(survey)
            return
        self.largest_size = max(self.largest_size, step.size)
        self._blocks_bytes = max(self._blocks_bytes, step.blocks_bytes)
        self._block_count = max(self._block_count, step.block_count)
        is_largest = step.size >= self.largest_size and step.blocks_bytes >= self._blocks_bytes
        is_known = survey.end_step(is_largest=is_largest)
        self.budget.note_surveyed_step(is_known=is_known)
        is_known = is_known and not self.budget.waits_for_others
        self.agreement = Agreement.among(self._group, survey.groups, self.agreement)
        self._survey_reserved_bytes = step.reserved_bytes
        self._base_bytes = step.base_bytes
        is_unknown, last_windows = self._largest(not is_known, survey.window_bytes)
        if is_unknown:
            self._watch(survey, int(last_windows))
        else:
            self._make_plan(survey, step)

    def _end_lost_survey_step(self, survey: Survey) -> None:
        """Let the survey go on with less after a step that ran out of memory, or end it with an error."""
        if self._largest(not survey.takes_less())[0]:
            survey.give_up()
            self.state = LeastMemory(None, survey)
            self.budget.note_surveyed_step(is_known=True)
            self._watch(survey, 0)
            self._tell_unfit(
                "fit: a step ran out of memory in which the blocks keep as little as they can. Give a smaller batch, "
                f"smaller blocks (blocks=){'' if self.may_move else ', move=True'}, or leave more of the device to "
                "this process."
            )
            return
        self.notes.append("a step of the survey ran out of memory: from then on one kind of block was recorded a step")
        self._watch(survey, 0)

    def _allow_communication(self, survey: Survey, shapes: Any) -> None:
        """Have blocks that communicate computed again if all ranks know them: with arguments of shapes seen before."""
        is_new = shapes != self._known_shapes or survey.is_hindered
        self._known_shapes = shapes
        survey.allows_communication = self.agreement is not None and not self._largest(is_new)[0]

    def _make_plan(self, survey: Survey, last: FinishedStep) -> None:
        """Plan for the largest step of the survey, from what its last one showed."""
        if self.may_move and self._link is None:
            self._link = measure_link(self.meter.device, self._context_options)
        step, kinds = surveyed_step(survey, self._link, self._context_options, self.agreement)
        measured, largest = (
            (last.blocks_bytes, self._blocks_bytes) if last.blocks_bytes else (last.size, self.largest_size)
        )
        if 0 < measured < largest:
            self.notes.append(f"the survey measured a step of {measured / largest:.0%} of the largest one's size")
            step = scaled(step, largest / measured)
            self._survey_reserved_bytes = int(self._survey_reserved_bytes * largest / measured)
        self._surveyed = self.step = step
        self._own = survey_plan(step, survey.window_bytes)
        self.operators = [kind.operators for kind in kinds]
        self.obstacles = {number: kind.obstacle for number, kind in enumerate(kinds) if kind.obstacle is not None}
        self.called = CalledBlocks(survey.called_modules, self.names)
        survey.forget_tensors()
        self.choose()

    # ---- trials ----

    def replan(self, memory_bytes: int) -> None:
        """Plan for another amount of memory."""
        self.budget.give(memory_bytes)
        if self._surveyed is not None:
            self._steps = 0
            self.choose()

    def _room(self, step: Step) -> Room:
        budget = self.budget
        return Room(
            budget.reservable_bytes, budget.room_bytes(step), self.meter.measures_memory, max(1, budget.sharer_count)
        )

    def choose(self, *, raises: bool = True) -> None:
        """Find plans for what the survey showed, and try them. ``raises``: if none fits, and if the user wants it."""
        step = cast(Step, self._surveyed)
        _ = self.called.modules  # which is an error if one of them is gone
        self.budget.share(self.agreement, self.meter)
        room = self._room(step)
        own = self._own_plan(step, room)
        if own is None:
            self._follow_least(step, raises=raises)
            return
        steps = max(_MOST_STEPS - self._steps, _LEAST_TRIAL_STEPS)
        climb = Climb(step, own, room, steps, self.trials, own_reserved_bytes=self._survey_reserved_bytes)
        self.trials = climb.trials
        self.state = Climbing(climb)
        self.clock.measures = True
        if not self._next_trial(climb):
            self._settle(climb)

    def _own_plan(self, step: Step, room: Room) -> StepPlan | None:
        """Return the plan that is tried first; None if none fits.

        It is that of the survey. A survey whose windows are smaller, or whose blocks keep what has room, may fit where
        that does not. What was measured counts more than what is reckoned: steps of the survey did run.
        """
        has_run = room.is_measured and 0 < self._survey_reserved_bytes <= room.reserved_bytes
        plans = [self._own or survey_plan(step), survey_plan(step)]
        for plan in plans:
            if step.peak_bytes(plan) <= room.allocated_bytes:
                return plan
        least = least_plan(step)
        if step.peak_bytes(least) <= room.allocated_bytes:
            return least
        return plans[-1] if has_run else None

    def _follow_least(self, step: Step, *, raises: bool) -> None:
        plan = least_plan(step)
        trial = Trial(step, plan)
        self.state = LeastMemory(trial)
        self._apply(trial)
        self._tell_unfit(unfit_message(step, plan, self.budget), raises=raises)

    def _tell_unfit(self, message: str, *, raises: bool = True) -> None:
        self.notes.append(message)
        if self._raises and raises:
            raise RuntimeError(message)
        warn_user(f"torchoffload: {message} It runs in the least memory.")

    def _next_trial(self, climb: Climb) -> bool:
        """Try the next plan. Returns whether there is one."""
        trial = climb.take_next()
        if trial is not None:
            self._apply(trial)
            self.clock.forget()
        return trial is not None

    def _end_trial_step(self, climb: Climb, step: FinishedStep) -> None:
        trial = climb.current
        assert trial is not None
        if step.is_lost:  # by a trial, which was our idea: the loop is not to lose the next step
            climb.note_failure()
            self.notes.append(failure_message(trial))
            self._settle(climb)
        elif self._largest(self._differs(step))[0]:
            self._begin_survey()
        else:
            taken_s, allocated_bytes, reserved_bytes, has_waited, share = self._largest(
                self.meter.between_s(step.began, step.ended), step.allocated_bytes, step.reserved_bytes,
                step.has_waited, self._share_of(step),
            )  # fmt: skip
            is_done = climb.note_step(
                taken_s, allocated_bytes=int(allocated_bytes), reserved_bytes=int(reserved_bytes),
                waits_for_memory=bool(has_waited), share=share,
            )  # fmt: skip
            if is_done and not self._next_trial(climb):
                self._settle(climb)

    def _share_of(self, step: FinishedStep) -> float:
        """Return the size of a step, of that of the largest one of the survey: by what its blocks were given."""
        if self._blocks_bytes:
            return min(1.0, step.blocks_bytes / self._blocks_bytes)
        return min(1.0, step.size / self.largest_size) if self.largest_size else 1.0

    def _settle(self, climb: Climb) -> None:
        """Follow the best plan of a climb; the one of the least memory if even the survey's own has failed."""
        step = self.step = climb.step
        trial = climb.best
        plan_bytes = allowed_bytes(climb.room, climb.trials)
        if trial is None:
            trial = Trial(step, least_plan(step))
            plan_bytes = trial.peak_bytes
        self._tell_disagreement(climb)
        trial = trial.with_times(step)
        self._follow_settled(trial, max(plan_bytes, trial.peak_bytes))

    def _tell_disagreement(self, climb: Climb) -> None:
        taken = climb.disagreement
        if taken is not None and not 1 / _DISAGREEMENT <= taken <= _DISAGREEMENT:
            self.notes.append(
                f"the survey's own plan took {taken:.2f} times what its measured times say: what was planned then goes "
                "by what steps took under the plans that were tried"
            )

    def _follow_settled(self, trial: Trial, plan_bytes: int) -> None:
        if self._followed is None or trial.plan.calls != self._followed.plan.calls:
            self._apply(trial)
        self._followed = trial
        self.clock.measures = False
        self.state = Settled(trial, OtherSizes(trial, plan_bytes))

    # ---- a plan that is followed ----

    def _end_settled_step(self, trial: Trial, step: FinishedStep) -> None:
        """See whether the memory and the calls are what was planned for, after a step of a settled plan."""
        trial.reserved_bytes = max(trial.reserved_bytes, step.reserved_bytes)
        grown = step.base_bytes - self._base_bytes
        is_tight = step.has_waited or step.reserved_bytes > self.budget.memory_bytes
        has_grown = is_tight and grown > _GROWN * self.budget.memory_bytes and self._surveyed is not None
        is_lost, has_grown, differs = self._largest(step.is_lost, has_grown, self._differs(step))
        if differs:
            self._begin_survey()
        elif has_grown:
            self._plan_beside(int(self._largest(grown)[0]))
        elif is_lost and self._followed is not trial:
            self.notes.append("a smaller call took more than its share: from then on all follow the largest one's plan")
            self.state = Settled(trial, OtherSizes(trial, 0))
            self._apply(trial)
        elif is_lost:
            self._step_down(trial)

    def _plan_beside(self, nbytes: int) -> None:
        """Plan anew beside more that is there for good than in the survey, as an optimizer's state that came later."""
        self.notes.append(f"{human_bytes(nbytes)} more were allocated before a step than in the survey: planned anew")
        self._base_bytes += nbytes
        self._surveyed = cast(Step, self._surveyed).with_more(nbytes)
        self._survey_reserved_bytes += nbytes
        self._own = None
        self.trials = []
        self._steps = 0
        self.choose(raises=False)

    def _step_down(self, trial: Trial) -> None:
        """Follow a plan that takes less, after a step ran out of memory under one that had settled: without trials."""
        self.notes.append(failure_message(trial))
        step = trial.step
        for each in self.trials:
            each.has_failed |= each.peak_bytes >= trial.peak_bytes
        left = [each for each in self.trials if each.step_s is not None and not each.has_failed]
        if left:
            below = min(left, key=lambda each: each.step_s or 0.0).with_times(step)
        elif (least := Trial(step, least_plan(step))).peak_bytes < trial.peak_bytes:
            below = least
        else:
            self.state = LeastMemory(trial)
            self._tell_unfit(
                f"fit: {failure_message(trial)}, and no plan takes less. Give a smaller batch, smaller blocks, or "
                "leave more of the device to this process."
            )
            return
        self._follow_settled(below, below.peak_bytes)

    def _differs(self, step: FinishedStep) -> bool:
        """Return whether a step was not what the survey has seen: larger, of more calls, or of other blocks."""
        return (
            self._has_new_state
            or step.block_count > self._block_count > 0
            or self._is_too_large(step.blocks_bytes, of=self._blocks_bytes)
        )

    def _is_too_large(self, size: int, of: int | None = None) -> bool:
        """Return whether there is no plan for steps of this size."""
        largest = self.largest_size if of is None else of
        if size <= largest or largest == 0:
            return False
        match self.state:
            case Settled(_, calls):
                return calls.trial_for(size / largest) is None
            case _:
                return True

    def _follow_size(self, size: int) -> None:
        """Follow the plan for a call of this size; the largest call's where other calls wait for their backward."""
        match self.state:
            case Settled(_, calls) if self.largest_size:
                wanted = calls.trial_for(size / self.largest_size)
                if wanted is not None and wanted is not self._followed:
                    self._apply(wanted, keeps_cache=True)
            case _:
                pass

    def _apply(self, trial: Trial, *, keeps_cache: bool = False) -> None:
        self._followed = trial
        watches, moving = turns_of(trial, self.called.modules, weakly(self.count_left))
        self._reset_counters = [turns.reset for turns in watches.values()]
        if self.agreement is not None:
            self.agreement.check_same(repr(trial.does))
        self._following.follow(watches, moving, trial.plan.window_bytes, windows_of(trial, self.called.modules))
        if not keeps_cache:
            self.meter.forget_reserved()

    def follow_saved(self, saved: SavedPlan) -> None:
        """Follow a plan that was read from a file, without a survey; make another one if other things are asked."""
        self.called = CalledBlocks(saved.modules(self.names), self.names)
        if saved.is_of_several:  # which these ranks are not known to be: they make a plan together
            self.notes.append("the plan of the file was made by several ranks together, and so it is made anew")
            return
        self.step = self._surveyed = restricted(saved.step, may_recompute=self.may_recompute, may_move=self.may_move)
        self.largest_size = saved.largest_size
        self.operators = [tuple(operators) for operators in saved.operators]
        if self.step != saved.step or self.budget.memory_bytes != saved.memory_bytes:
            self.choose()
            return
        trial = Trial(saved.step, saved.plan, saved.step_s)
        self.trials = [trial]
        self._follow_settled(trial, self.budget.room_bytes(trial.step))

    def count_left(self) -> None:
        """Count a call of a block that called another operator than planned."""
        self.left_plan_count += 1

    def remove(self) -> None:
        """Take everything away."""
        self.state = Removed(self.settled)
        self.budget.end()
        self._block_calls.remove()
        self._following.remove()
