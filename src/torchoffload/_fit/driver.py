"""What a fitted model does from call to call: it is surveyed, plans are tried, and one is followed and watched."""

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchoffload._contexts.options import OffloadOptions
from torchoffload._fit.agreement import Agreement
from torchoffload._fit.allocations import Allocations
from torchoffload._fit.backwards import Backwards
from torchoffload._fit.budget import Budget
from torchoffload._fit.called_blocks import CalledBlocks
from torchoffload._fit.following import Following
from torchoffload._fit.link import Link, measure_link
from torchoffload._fit.meter import Meter
from torchoffload._fit.phase import Excess, Phase
from torchoffload._fit.plan_file import SavedPlan
from torchoffload._fit.planning import surveyed_step
from torchoffload._fit.replay import Watch
from torchoffload._fit.scaling import SmallerCalls
from torchoffload._fit.step import Step, least_plan
from torchoffload._fit.survey import Survey
from torchoffload._fit.trials import Candidates, Trial, failure_message, plans_to_try, restricted, unfit_message
from torchoffload._fit.turns import turns_of, weakly, windows_of
from torchoffload._modules.selection import Chosen
from torchoffload._observe.units import human_bytes
from torchoffload._warnings import warn_user

__all__ = ["Driver"]

_MOST_OPEN_CALLS = 64


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
    phase : Phase
        What it is at.
    step : Step or None
        What the survey showed.
    candidates : Candidates
        The plans that are or were tried.
    called : CalledBlocks
        The blocks that the surveyed step called.
    settled : Trial or None
        The plan that is followed.
    notes : list of str
        What did not go as planned.
    left_plan_count : int
        How many calls of blocks called other operators than planned.
    largest_size : int
        The elements of the arguments of the model's largest call.
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
        self.model_name = type(model).__name__
        self._options = options
        self._set_blocks(model, chosen, may_move=may_move)
        self._group = group
        self.agreement: Agreement | None = None
        self.meter, self.budget = meter, budget
        self.may_recompute, self.may_move = may_recompute, may_move
        self._context_options = OffloadOptions(**options)
        self._raises = raises
        self.phase = Phase.SURVEY
        self._open_calls = 0  # calls of the model since the measured step began
        # Whether a measured step has begun, its backward has ended, and a call of it has waited for its backward.
        self._has_begun = self._has_ended = self._was_open = False
        self.step: Step | None = None
        self.operators: list[tuple[Any, ...]] = []  # of each kind of block, in order
        self.saved_bytes: list[int] = []  # in each call of a block, as the survey has seen it
        self._surveyed: Step | None = None  # before anything was learned from trials
        self._has_learned = False
        self.called = CalledBlocks([], self.names)
        self.settled: Trial | None = None
        self._followed: Trial | None = None
        self._smaller: SmallerCalls | None = None
        self.notes: list[str] = []
        self.left_plan_count = 0
        self.obstacles: dict[int, str] = {}
        self._link: Link | None = None
        self._reset_counters: list[Callable[[], None]] = []
        self._backwards = Backwards(self)
        self._allocations = Allocations(meter)
        self.largest_size, self._size, self._known_shapes = 0, 0, cast(Any, None)
        self._begin_survey()

    def _set_blocks(self, model: nn.Module, chosen: list[Chosen], *, may_move: bool) -> None:
        self._following = Following(model, chosen, may_move=may_move, options=self._options)
        self.names = self._following.names
        self.block_count = len(self.names)

    def take_blocks(self, chosen: list[Chosen]) -> None:
        """Have other blocks from the next step on, and survey them."""
        model = self.model()
        assert model is not None
        self._following.remove()
        self._set_blocks(model, chosen, may_move=self.may_move)
        self._begin_survey()

    def call_begins(self, inputs: Any) -> None:
        """Take notice of a call of the model with gradients, and change its plan if it is time to."""
        self._open_calls += 1
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        size, is_open, self._has_oom, self._reserved_bytes = self._largest(
            sum(tensor.numel() for tensor in tensors),
            self._backwards.has_open_calls,
            self._allocations.have_failed,
            self._allocations.take_reserved(),
        )
        if not is_open:  # calls before a common backward are one step, as in pipelines
            for reset in self._reset_counters:
                reset()
        if self.phase is Phase.SETTLED or self.phase is Phase.LEAST:
            if size > self.largest_size:
                self._begin_survey()
            elif self.phase is Phase.SETTLED:
                self._check()
                self._follow_size(self.largest_size if is_open else int(size))
        has_ended = self._has_ended and (not is_open or self._open_calls > _MOST_OPEN_CALLS)
        if self.phase is Phase.SURVEY:
            ends = self._has_begun and has_ended
            if ends or self._open_calls > _MOST_OPEN_CALLS or (self._was_open and not is_open and not self._has_ended):
                self._has_begun = False  # maybe since no backward comes: begin again
            if ends:
                self._end_survey_step()
            self.largest_size = max(self.largest_size, size)
        if self.phase is Phase.TRIALS and self._has_begun and (has_ended or self._has_oom):
            self._has_begun = False
            self._end_trial_step()
        self._size = max(size, self._size) if self._has_begun else size  # of the largest call of the step
        if self.phase is Phase.SURVEY:
            self._allow_communication([(tensor.shape, tensor.dtype) for tensor in tensors])
        if self.phase in {Phase.SURVEY, Phase.TRIALS} and not self._has_begun:
            self._has_begun, self._has_ended, self._was_open, self._open_calls = True, False, False, 0
            if self.phase is Phase.SURVEY:
                self.budget.is_surveying = not self.survey.is_known
                self.survey.begin_step()
            else:
                self._began, self._retries = self.meter.now(), self.meter.retry_count()

    def _largest(self, *values: float) -> Any:
        """Return for each value the largest one of the ranks that decide together."""
        return values if self.agreement is None else self.agreement.largest(*values)

    def _end_survey_step(self) -> None:
        """Plan if the survey is done, and else let it go on."""
        is_known = self.survey.end_step()
        self.budget.note_surveyed_step(is_known=is_known)
        is_known = is_known and not self.budget.waits_for_others
        self.agreement = Agreement.among(self._group, self.survey.groups, self.agreement)
        is_unknown, last_windows = self._largest(not is_known, self.survey.window_bytes)
        if is_unknown:
            self._watch(int(last_windows))
        else:
            self._make_plan()

    def _allow_communication(self, shapes: Any) -> None:
        """Have blocks that communicate computed again if all ranks know them: with arguments of shapes seen before."""
        is_new = shapes != self._known_shapes or self.survey.is_hindered
        self._known_shapes = shapes
        self.survey.allows_communication = self.agreement is not None and not self._largest(is_new)[0]

    def call_ends(self, output: Any) -> None:
        """Take notice of what the model returned."""
        self._backwards.follow(output)
        self._was_open |= self._backwards.has_open_calls

    def backward_begins(self) -> None:
        """Take notice of a backward, in which this is called."""
        if self.phase is Phase.SURVEY and self._has_begun:
            self.survey.backward_began()

    def backward_ends(self) -> None:
        """Take notice of the end of a backward."""
        self._has_ended = True
        if self.phase is Phase.SURVEY and self._has_begun:
            self.survey.backward_ended()
        elif self.phase is Phase.TRIALS:
            self._ended = self.meter.now()
        self._allocations.note_reserved()

    def _begin_survey(self) -> None:
        self.phase, self._smaller, self._known_shapes = Phase.SURVEY, None, None
        self._has_begun = self._has_ended = False
        self.candidates, self.settled, self.step, self._surveyed = Candidates(), None, None, None
        self.survey = Survey(
            cast(nn.Module, self.model()), self.meter, self.budget, self._backwards.is_seen,
            may_recompute=self.may_recompute, may_agree=self._group is not None,
        )  # fmt: skip
        self.budget.begin_survey()
        self._watch(self.survey.window_bytes)

    def _watch(self, window_bytes: int) -> None:
        """Have the survey watch the blocks."""
        blocks = list(self.names)
        watch = weakly(self.survey.watch, otherwise=Watch(None))
        self._following.follow(dict.fromkeys(blocks, watch), blocks if self.may_move else [], window_bytes)
        if not self.survey.is_timing:  # else the host would have to get memory from the device anew while it is timed
            self.meter.forget_reserved()

    def _make_plan(self) -> None:
        if self.may_move and self._link is None:
            self._link = measure_link(self.meter.device, self._context_options)
        self.step, kinds = surveyed_step(self.survey, self._link, self._context_options, self.agreement)
        self._surveyed, self._has_learned = self.step, False
        self.operators = [kind.operators for kind in kinds]
        self.obstacles = {number: kind.obstacle for number, kind in enumerate(kinds) if kind.obstacle is not None}
        self.called = CalledBlocks(self.survey.called_modules, self.names)
        self.saved_bytes = [kinds[call.kind].all_saved_bytes for call in self.step.calls]
        self.survey.forget_tensors()
        self.choose()

    def replan(self, memory_bytes: int) -> None:
        """Plan for another amount of memory."""
        self.budget.give(memory_bytes)
        self.step, self._has_learned = self._surveyed, False
        if self.step is not None:
            self.choose()

    def choose(self, after: Excess | None = None) -> None:
        """Find plans for what the survey showed, and try them; ``after`` others that took too much."""
        step = cast(Step, self.step)
        self.candidates, self.settled = Candidates(), None
        self.budget.share(self.agreement, self.meter)
        plans = plans_to_try(step, self.budget.room_bytes(step), has_allocator=self.meter.measures_memory)
        if plans and after is Excess.OUT_OF_MEMORY:  # one that runs is known then, whatever the others do
            self.candidates.add(step, least_plan(step))
        for plan in plans:
            self.candidates.add(step, plan)
        if plans:
            self.phase = Phase.TRIALS
            self._next_trial()
        else:
            self._follow_least(step, raises=self._raises and after is None)

    def _follow_least(self, step: Step, *, raises: bool) -> None:
        self.phase = Phase.LEAST
        plan = least_plan(step)
        self.settled = Trial(step, plan)
        self._apply(self.settled)
        message = unfit_message(step, plan, self.budget)
        self.notes.append(message)
        if raises:
            raise RuntimeError(message)
        warn_user(f"torchoffload: {message} It runs in the least memory.")

    def _next_trial(self) -> bool:
        """Try the next plan. Returns whether there is one."""
        trial = self.candidates.take_next()
        if trial is not None:
            self._allocations.forget_failures()
            self._apply(trial)
            self._has_begun = self._has_ended = False
        return trial is not None

    def _end_trial_step(self) -> None:
        trial = self.candidates.current
        assert trial is not None
        trial.reserved_bytes = self._reserved_bytes
        trial.has_failed = self._has_oom or trial.reserved_bytes > self.budget.memory_bytes
        if trial.has_failed:
            self._after_trial()
        elif self._size != self.largest_size:
            if self.candidates.note_other_size():
                self._settle((self.candidates.measured or [trial])[0])
        elif self.candidates.ends_timed_step():
            has_waited = self.meter.retry_count() > self._retries
            taken_s, has_waited = self._largest(self.meter.between_s(self._began, self._ended), has_waited)
            if self.candidates.note_time(taken_s, waits_for_memory=bool(has_waited)):
                self._after_trial()

    def _after_trial(self) -> None:
        if self._has_oom:  # the loop has lost a step by a trial, which was our idea: it is not to lose the next one
            self._after_running_out()
        elif self._next_trial():
            pass
        elif not (measured := self.candidates.measured):
            least_bytes = min(trial.reserved_bytes for trial in self.candidates.trials)
            self._tighten("each plan took more memory than predicted", int(least_bytes))
        elif not self._learns():
            self._settle(measured[0])

    def _after_running_out(self) -> None:
        """Follow a plan that has run, after a step ran out of memory; if none has, try plans that take less."""
        followed, measured = cast(Trial, self._followed), self.candidates.measured
        self.budget.note_failure(followed.peak_bytes)
        self.notes.append(failure_message(followed, self.budget))
        if self.phase is Phase.TRIALS and measured:
            self._settle(measured[0])
        else:
            self.choose(Excess.OUT_OF_MEMORY)

    def _learns(self) -> bool:
        """Learn from the trials. Returns whether another plan is to be tried then."""
        step = cast(Step, self.step)
        self.step = self.candidates.add_better(step, self.budget.room_bytes(step), learns=not self._has_learned)
        self._has_learned |= self.step is not step
        return self._next_trial()

    def _settle(self, trial: Trial) -> None:
        if trial is not self._followed:
            self._apply(trial)
        self.step = cast(Step, self.step).at_pace(self.candidates.take_pace())
        self.settled, self.phase = trial, Phase.SETTLED
        is_plain = not trial.again_count and not trial.plan.moved_bytes
        room_bytes = self.budget.room_bytes(trial.step)
        self._smaller = None if is_plain else SmallerCalls(trial, self.largest_size, room_bytes)
        self._allocations.forget_failures()

    def _check(self) -> None:
        """See whether the memory is what was given, after a step of a settled plan."""
        if not self.meter.measures_memory or self.settled is None:
            return
        reserved = int(self._reserved_bytes)
        self.settled.reserved_bytes = max(self.settled.reserved_bytes, reserved)
        if (self._has_oom or reserved > self.budget.memory_bytes) and self._followed is not self.settled:
            self._smaller = None
            self._allocations.forget_failures()
            self.notes.append("a smaller call took more than its share: from then on all follow the largest one's plan")
            self._apply(self.settled)
        elif self._has_oom:
            self._after_running_out()
        elif reserved > self.budget.memory_bytes:
            self._tighten(f"a step reserved {human_bytes(reserved)}", reserved)

    def _tighten(self, why: str, reserved_bytes: int) -> None:
        """Plan for less memory, after steps that reserved so much. What does not fit then runs in the least memory."""
        self.budget.tighten(reserved_bytes)
        self.notes.append(f"{why}: from then on plans leave {self.budget.margin:.0%} of the memory free")
        if self.budget.is_exhausted:
            self._follow_least(cast(Step, self.step), raises=False)
        else:
            self.choose(Excess.RESERVED)

    def _follow_size(self, size: int) -> None:
        """Follow the plan for a call of this size; the largest call's where other calls wait for their backward."""
        if self._smaller is not None and self.settled is not None:
            wanted = self._smaller.plan_for(size)
            if wanted is not self._followed and self.phase is Phase.SETTLED:
                self._apply(wanted, keeps_cache=True)

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
        self._settle(Trial(saved.step, saved.plan, saved.step_s))

    def count_left(self) -> None:
        """Count a call of a block that called another operator than planned."""
        self.left_plan_count += 1

    def remove(self) -> None:
        """Take everything away."""
        self.phase = Phase.REMOVED
        self.budget.end()
        self._following.remove()
