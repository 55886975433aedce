"""The steps of a fitted model: it is surveyed, plans are tried, and one is followed and watched."""

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchoffload._fit.machine.agreement import Agreement
from torchoffload._fit.model.clock import FinishedStep, Opener
from torchoffload._fit.model.fitted_model import FittedModel
from torchoffload._fit.model.phase import Climbing, LeastMemory, Removed, Settled, Surveying
from torchoffload._fit.model.sizes import argument_bytes
from torchoffload._fit.model.surveyed_step import SurveyedStep
from torchoffload._fit.plan.climb import FULL_PART, LEAST_SHARE, Climb
from torchoffload._fit.plan.scaling import OtherSizes
from torchoffload._fit.plan.trials import MORE_ROOM, Trial, failure_message
from torchoffload._fit.survey.survey import Survey

__all__ = ["Driver"]

_MOST_OPENERS = 16  # modules for which steps that begin with them are surveyed apart
_MOST_RESTS = 4
_LEAST_BEYOND = 0.01  # of a plan's bytes: a step that takes less than that beyond them is as planned


class Driver(FittedModel):
    """Takes a fitted model from step to step, as the clock tells of them."""

    def call_begins(self, inputs: Any) -> None:
        """Take notice of a call of the model with gradients, and change its plan if it is time to."""
        with self._changing:  # several threads may train one model
            self._call_begins(inputs)

    def _call_begins(self, inputs: Any) -> None:
        size = self.clock.call_begins(argument_bytes(inputs))
        if isinstance(self.state, Surveying):
            tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
            self._allow_communication(self.state.survey, [(tensor.shape, tensor.dtype) for tensor in tensors])
        elif self._is_larger(size) or (self._was_refused and self.agreement is None):
            self._begin_survey()  # beside calls that wait for their backward, or since one had an error in it
        if isinstance(self.state, Surveying):
            self.state.survey.call_begins()
        if not self.clock.has_open_calls:  # calls before a common backward are one step, as in pipelines
            for reset in self._reset_counters:
                reset()
        is_alone = self.clock.is_first_called and not self.clock.has_open_calls
        self._follow(self.clock.opener, self._share_of(size) if is_alone else 1.0)
        self._look_at_calls()

    @property
    def is_opening(self) -> bool:
        """Whether the modules that are entered from now on tell what the step begins with."""
        return not self._openers.is_sure and self.clock.is_without_blocks

    def module_opens(self, module: nn.Module) -> bool:
        """Take notice of a module that is entered before the step's first block. Returns whether to tell of more."""
        with self._changing:
            if module in self.names:
                opener = self._openers.block_begins()
                if isinstance(self.state, Surveying) and opener != self.clock.opener:
                    self.clock.begin_anew(opener)
                return False
            found = self._openers.enters(weakref.ref(module))
            if found is not None and (found != self.clock.opener or self._needs_survey(self.clock.first_size)):
                self.clock.begin_anew(found)
                self._follow(found, 1.0 if self.clock.has_open_calls else self._share_of(self.clock.first_size))
            return self.is_opening

    def call_goes_on(self, inputs: Any) -> None:
        """Take notice of the call of another part of the model, which belongs to the call of the part before."""
        size = argument_bytes(inputs) if self.clock.is_first_called else 0
        self.clock.call_goes_on(size)
        if self.agreement is not None:
            return
        with self._changing:
            # The step may have begun with something small, such as a sample, whose output the program keeps.
            if self.clock.is_first_called and (share := min(1.0, self._share_of(size))) > self._followed_share:
                self._follow(self.clock.opener, share)
            self._look_at_calls()

    def _look_at_calls(self) -> None:
        """Have the blocks keep as little as they can if a module is called more often than in any surveyed step.

        That happens if the program keeps an output with its graph, as a sample: its call is a part of the next step.
        """
        called, known = self.clock.called, self._seen.of(self.clock.opener).parts
        is_known = not known or self.clock.called_count <= known[called]
        if is_known or self._has_more_calls or self.agreement is not None or isinstance(self.state, Surveying):
            return
        own = self._all_surveyed.get(self.clock.opener)
        having = [each for each in self._all_surveyed.values() if called in each.parts]
        if surveyed := own if own in having else next(iter(having), own):
            self._has_more_calls = True
            if not self._seen.may_survey_calls:
                self._warn(
                    f"steps of {self.model_name} call other modules, or call them more often, than the steps that were "
                    "surveyed, again and again. No survey is begun for that any more: in such steps all blocks keep as "
                    "little as they can, so that they take longer. If the loop calls parts of the model one by one, "
                    "call fit for each of these parts instead"
                )
            self._apply(surveyed.least, self._others.get(surveyed.opener), keeps_cache=True)

    def call_raised(self) -> None:
        """Take notice of a call of the model that has raised: programs make another one in its place."""
        self.clock.call_raised()
        if isinstance(self.state, Surveying):
            self.state.survey.call_raised()

    def call_ends(self, output: Any) -> None:
        """Take notice of the model's output."""
        self.clock.call_ends(output)

    def opener_of(self, called: Opener) -> Opener:
        """Return the module that a step begins with, as far as that is known when the loop calls this one."""
        module = None if called is None else called()
        around = self.model if module in self.names else called  # a loop may call the blocks one by one
        return self._openers.call_begins(around) or self._opener or around

    def step_begins(self, size: int) -> None:
        """Take notice of a step that begins with a call of this size."""
        self._has_more_calls = False
        if self._following.gone and self.agreement is None:
            self._take_replaced()
        elif self._needs_survey(size):
            if self._is_new_opener():  # if it comes seldom, the survey waits longer for the next one
                self._openers.known.append(self.clock.opener)
                self._most_waited *= 2
            self._begin_survey()
        self._block_calls.begin_step(looks_at_all=isinstance(self.state, Surveying))
        if isinstance(self.state, Surveying):
            if not self._is_survey_logged:
                self._is_survey_logged = True
                self._log("the survey begins: the first steps run in the least memory and are measured")
            survey = self.state.survey
            self.budget.is_surveying = not survey.is_known
            survey.begin_step(self.clock.opener)
            self._watch(survey, self._windows.get(self.clock.opener, 0))

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
        self._phase_steps += 1
        self.budget.note_step()
        if step.went_without:
            self.note_slow_convolutions()
        called_all = step.block_count >= self._seen.of(step.opener).block_count
        match self.state:
            case Surveying(survey):
                self._end_survey_step(survey, step)
            case Climbing() | Settled() if step.opener in self._others:
                self._end_other_step(self._others[step.opener], step)
            case Climbing(climb):
                self._end_trial_step(climb, step)
            case Settled(trial):
                self._end_settled_step(trial, step)
            case LeastMemory():
                if self._largest(self._differs(step))[0]:
                    self._survey_again(step)
            case Removed():
                pass
        if not called_all:
            self._look_for_blocks(step)

    def _look_for_blocks(self, step: FinishedStep) -> None:
        """See whether the model still has all blocks after a step without calls of some: these may have been replaced.

        A program may put blocks back later, so that they are given up only if a step was lost.
        """
        model = self.model()
        if model is None:
            return
        self._small_steps += 1
        if step.is_lost and self.agreement is None:
            self._following.leave(self._following.missing(model))
        elif self._small_steps.bit_count() == 1:  # more and more seldom
            self._tell_missing()

    def _end_survey_step(self, survey: Survey, step: FinishedStep) -> None:
        """Plan if the survey is done, and else let it go on."""
        if step.is_lost:
            self._end_lost_survey_step(survey)
            return
        self.agreement = Agreement.among(self._options.group, survey.groups, self.agreement)
        is_rest, has_changed = self._largest(step.is_rest, bool(self._following.gone))
        if has_changed:
            self._survey_again(step)
            return
        if is_rest and self._rests < _MOST_RESTS:  # from now on the clock knows where such a step ends
            self._rests += 1
            if step.opener in self._openers.known and step.opener not in self._all_surveyed:
                self._openers.known.remove(step.opener)  # no step begins with it
            return
        if step.opener not in self._openers.known:
            self._openers.known.append(step.opener)
        self._keys.update(survey.called_keys)
        is_known = survey.end_step(is_largest=self._seen.of(step.opener).note_surveyed(step))
        is_unknown, windows = self._largest(not is_known, survey.window_bytes)
        self._windows[step.opener] = int(windows)
        self._waited = self._waited + 1 if step.opener in self._all_surveyed else 0
        if not is_unknown:
            self._note_surveyed(survey, step)
        awaits_others = bool(is_unknown) or self._awaits_others()
        self.budget.note_surveyed_step(is_known=not awaits_others)
        if not self._largest(awaits_others or self.budget.waits_for_others)[0]:
            self._make_plan()

    def _end_lost_survey_step(self, survey: Survey) -> None:
        """Let the survey go on with less after a step that ran out of memory, or end it with an error."""
        if self._largest(not survey.takes_less())[0]:
            survey.stop()
            self._enter(LeastMemory(None, survey))
            self._log("least memory: a step ran out of memory in which the blocks keep as little as they can")
            self.budget.note_surveyed_step(is_known=True)
            self._watch(survey, 0)
            self._tell_unfit(
                f"A step ran out of memory in which the blocks keep as little as they can. {MORE_ROOM}"
                + ("" if self.may_move else " Or let tensors move: move=True.")
            )
            return
        self.notes.append("a step of the survey ran out of memory: it went on with less")
        self._windows.clear()

    def _allow_communication(self, survey: Survey, shapes: Any) -> None:
        """Have blocks that communicate computed again if all ranks know them: with arguments of shapes seen before."""
        is_new = shapes != self._known_shapes or survey.is_hindered
        self._known_shapes = shapes
        survey.allows_communication = self.agreement is not None and not self._largest(is_new)[0]

    def _end_trial_step(self, climb: Climb, step: FinishedStep) -> None:
        trial = climb.current
        assert trial is not None
        if step.is_lost and not self._has_more_calls:  # by a trial, which was our idea: no more steps are to be lost
            climb.note_failure()
            self.notes.append(failure_message(trial))
            self._settle(climb)
            return
        # Other fitted models that share the memory keep more or less while they try plans, too.
        grown_bytes = 0 if self.budget.sharer_count > 1 else self._grown_bytes(step)
        differs, grown_bytes = self._largest(self._differs(step), grown_bytes)
        if differs:
            self._survey_again(step)
        elif self._has_more_calls:  # the step did not follow the plan, and more such steps may come
            self._settle(climb)
        elif grown_bytes and not self._leaves_free(int(grown_bytes)):
            self._plan_beside(int(grown_bytes))  # the next step might run out of memory
        else:
            taken_s, allocated, reserved, ended, grown, has_waited, has_resized_host, share = self._largest(
                self.meter.between_s(step.began, step.ended), step.allocated_bytes, step.reserved_bytes,
                step.ended_reserved_bytes, step.ended_reserved_bytes - step.began_reserved_bytes,
                step.has_waited, step.has_resized_host, min(1.0, self._seen.of(self._opener).share_of(step)),
            )  # fmt: skip
            is_done = climb.note_step(
                taken_s, allocated_bytes=int(allocated), reserved_bytes=int(reserved), ended_bytes=int(ended),
                grown_bytes=int(grown), waits_for_memory=bool(has_waited), resizes_host=bool(has_resized_host),
                share=share,
            )  # fmt: skip
            if is_done and not self._next_trial(climb):
                self._settle(climb)

    def _leaves_free(self, grown_bytes: int) -> bool:
        """Have later plans of a climb leave bytes free that have come meanwhile, if it has begun anew for such before.

        A program may go on to keep more, as samples with their graphs, of which each plan keeps other bytes. Returns
        False if that is not enough: plans are to be made anew.
        """
        match self.state:
            case Climbing(climb) if self._restarts:
                assert climb.current is not None
                return self._fits_beside(climb.current, grown_bytes) and climb.leaves_free(grown_bytes)
        return False

    def _fits_beside(self, trial: Trial, grown_bytes: int) -> bool:
        return max(trial.plan.peak_bytes, trial.allocated_bytes) + grown_bytes <= self.budget.usable_bytes

    def _end_settled_step(self, trial: Trial, step: FinishedStep) -> None:
        """See whether the memory and the calls are as planned, after a step of a settled plan."""
        trial.reserved_bytes = max(trial.reserved_bytes, step.reserved_bytes)
        grown_bytes = 0 if self._surveyed is None or step.is_lost else self._grown_bytes(step)
        is_tight = step.has_waited or step.reserved_bytes > FULL_PART * self.budget.reservable_bytes
        if not is_tight and (self._fits_beside(trial, grown_bytes) or self.budget.sharer_count > 1):
            grown_bytes = 0
        others = self.budget.has_other_sharers and self._surveyed is not None
        is_large = self._awaits_large_step and self._seen.of(self._opener).share_of(step) >= LEAST_SHARE
        is_lost, grown_bytes, differs, others, is_large, more_bytes, allocated_bytes = self._largest(
            step.is_lost, grown_bytes, self._differs(step), others, is_large, self._bytes_beyond_plan(step),
            step.allocated_bytes,
        )  # fmt: skip
        if differs:
            self._survey_again(step)
        elif grown_bytes:
            self._plan_beside(int(grown_bytes))
        elif is_lost and self._followed is not trial:
            self.notes.append("a smaller call took more than its share: from then on all follow the largest one's plan")
            self._enter(Settled(trial, OtherSizes(trial, 0)))
            self._apply(trial)
        elif is_lost:
            self._step_down(trial)
        elif more_bytes:
            self._plan_for_more(int(allocated_bytes), int(more_bytes))
        elif others:
            self._share_anew()
        elif is_large:
            self._climb_again()

    def _end_other_step(self, other: SurveyedStep, step: FinishedStep) -> None:
        """Go on after a step that begins with another module than the one that plans are tried for."""
        grown_bytes = 0 if self.budget.sharer_count > 1 or step.is_lost else self._grown_bytes(step)
        if isinstance(self.state, Settled) and other.peak_bytes + grown_bytes <= self.budget.usable_bytes:
            grown_bytes = 0
        if isinstance(self.state, Climbing) and not step.is_lost:
            other.note_allocated(int(self._largest(step.allocated_bytes)[0]))
        differs, is_lost, grown_bytes, more_bytes, allocated_bytes = self._largest(
            self._differs(step), step.is_lost, grown_bytes, self._bytes_beyond_plan(step), step.allocated_bytes
        )
        if differs:
            self._survey_again(step)
        elif grown_bytes and not self._leaves_free(int(grown_bytes)):
            self._plan_beside(int(grown_bytes))
        elif is_lost:
            name = self._name_of(other.opener) or self.model_name
            self.note(
                f"a step that begins with {name} ran out of memory: its blocks keep as little as they can from now on"
                if other.takes_less()
                else f"a step that begins with {name} ran out of memory, although its blocks keep as little as they "
                f"can. {MORE_ROOM}"
            )
        elif more_bytes and isinstance(self.state, Settled) and other.takes_more(int(allocated_bytes)):
            name = self._name_of(other.opener) or self.model_name
            self._note_more(name, int(allocated_bytes), int(more_bytes))

    def _bytes_beyond_plan(self, step: FinishedStep) -> int:
        """Return how many bytes a step took beyond its plan; 0 unless they were more than plans may take."""
        trial = self._followed
        if trial is None or self._surveyed is None or step.is_lost or self._has_more_calls:
            return 0
        if self.budget.sharer_count > 1:  # it may be theirs
            return 0
        planned_bytes = trial.allocated_bytes or trial.peak_bytes
        beyond_bytes = step.allocated_bytes - planned_bytes
        is_more = beyond_bytes > self.budget.beyond_bytes + _LEAST_BEYOND * planned_bytes
        return beyond_bytes if is_more and step.allocated_bytes > self.budget.allocatable_bytes else 0

    def _grown_bytes(self, step: FinishedStep) -> int:
        return self._growth.bytes_after(step.left_bytes, self.budget.memory_bytes)

    def _survey_again(self, step: FinishedStep) -> None:
        """Begin a survey because of a step, which may have been the largest of several that take turns."""
        if step.is_lost and self._has_more_calls:
            self.note("a step ran out of memory that called a module more often than any that was surveyed")
        if self._following.gone:  # the next steps are of other sizes
            self._take_replaced()
            return
        self._begin_survey(keeps_sizes=self._has_more_calls)
        self._seen.of(step.opener).note_surveyed(step)

    def _differs(self, step: FinishedStep) -> bool:
        """Return whether a step differed from the survey's: larger, of more calls, of other blocks, refused."""
        largest = self._seen.of(step.opener)
        return (
            self._was_refused
            or (self._has_more_calls and self._seen.may_survey_calls)
            or bool(self._following.gone)
            or self._seen.has_new_state
            or step.block_count > largest.block_count > 0
            or self._has_no_plan(step.opener, step.blocks_bytes, largest.blocks_bytes)
        )

    def _is_new_opener(self) -> bool:
        """Return whether a step is certain to begin with a module that none of the surveyed ones begins with."""
        opener = self.clock.opener
        is_planned = opener == self._opener or opener in self._others
        has_plans = self._opener is not None and self.step is not None
        return has_plans and not is_planned and self._openers.is_sure and len(self._openers.known) < _MOST_OPENERS

    def _needs_survey(self, size: int) -> bool:
        """Return whether there is no plan for a step whose first call has this size, if it is certain what it is."""
        if isinstance(self.state, Surveying) or not self._openers.is_sure:
            return False
        opener = self.clock.opener
        return self._is_new_opener() or self._has_no_plan(opener, size, self._seen.of(opener).first_size)

    def _is_larger(self, size: int) -> bool:
        """Return whether the step's first module is called again with more than there is a plan for."""
        opener = self.clock.opener
        is_known = self.clock.is_first_called and self._openers.is_sure
        return is_known and self._has_no_plan(opener, size, self._seen.of(opener).size)

    def _has_no_plan(self, opener: Opener, size: int, largest: int) -> bool:
        """Return whether there is no plan for steps of this size, if the largest one that was surveyed had another."""
        if size <= largest or largest == 0:
            return False
        return not isinstance(self.state, Settled) or self._trial_for(opener, size / largest) is None

    def _trial_for(self, opener: Opener, share: float) -> Trial | None:
        """Return the plan for a step of so many times the size of the largest one; None if there is none."""
        if opener in self._others:
            return self._others[opener].trial_for(share)
        match self.state:
            case Climbing(climb):
                return climb.current
            case Settled(_, calls):
                return calls.trial_for(share)
            case LeastMemory(trial):
                return trial
            case _:
                return None

    def _share_of(self, size: int) -> float:
        """Return the size of a step's first call over that of the largest one."""
        first_size = self._seen.of(self.clock.opener).first_size
        return size / first_size if first_size else 1.0

    def _follow(self, opener: Opener, share: float) -> None:
        """Follow the plan for a step that begins with this module, of so many times the size of the largest one."""
        self._followed_share = share
        if isinstance(self.state, Surveying | Removed) or self._has_more_calls:
            return
        wanted = self._trial_for(opener, share)
        if wanted is not None and wanted is not self._followed:
            self._apply(wanted, self._others.get(opener), keeps_cache=True)
