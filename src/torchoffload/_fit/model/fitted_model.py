"""A fitted model: the phase that it is at, and the work of going from one phase to the next."""

import abc
import dataclasses
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchoffload._devices import Meter
from torchoffload._fit.block.following import Following
from torchoffload._fit.block.replay import Watch
from torchoffload._fit.choosing.called_blocks import CalledBlocks
from torchoffload._fit.choosing.named_blocks import blocks_in_place
from torchoffload._fit.machine.agreement import Agreement
from torchoffload._fit.machine.allocator import stuck_bytes
from torchoffload._fit.machine.link import LinkRates, measure_link
from torchoffload._fit.machine.operators import gradients
from torchoffload._fit.model.clock import Clock, FinishedStep, Opener
from torchoffload._fit.model.growth import Growth
from torchoffload._fit.model.openers import Openers
from torchoffload._fit.model.options import FitOptions
from torchoffload._fit.model.phase import Climbing, LeastMemory, Phase, Removed, Settled, State, Surveying
from torchoffload._fit.model.plan_file import SavedPlan
from torchoffload._fit.model.progress import Progress, log_phase, predicted
from torchoffload._fit.model.seen import Seen
from torchoffload._fit.model.sizes import BlockCalls, is_watched
from torchoffload._fit.model.snapshot import Snapshot
from torchoffload._fit.model.surveyed_step import SurveyedStep
from torchoffload._fit.model.turns import (
    FoundTurns,
    Turns,
    has_rest,
    least_turns,
    numbers_of_calls,
    turns_of,
    weakly,
    windows_of,
)
from torchoffload._fit.model.unseen import Unseen, shown, unseen_blocks
from torchoffload._fit.plan.budget import Budget
from torchoffload._fit.plan.climb import (
    SPARE_BYTES,
    Climb,
    Room,
    allowed_bytes,
    disagreement,
    first_plan,
    next_below,
)
from torchoffload._fit.plan.scaling import OtherSizes, scaled
from torchoffload._fit.plan.step import BlockCall, Step, StepPlan, least_plan, survey_plan
from torchoffload._fit.plan.trials import (
    MORE_ROOM,
    Trial,
    does_not_fit,
    failure_message,
    restricted,
    unfit_message,
)
from torchoffload._fit.survey.kinds import SurveyedKind, kind_of_call
from torchoffload._fit.survey.planning import surveyed_step
from torchoffload._fit.survey.survey import Survey
from torchoffload._modules.selection import Chosen
from torchoffload._observe.units import human_bytes
from torchoffload._pytorch.operator_mode import obstacle
from torchoffload._warnings import warn_user

__all__ = ["FittedModel"]

_MANY_REPLACEMENTS = 8
_MOST_STEPS = 12  # from the first step of a survey until a plan is settled on
_MUCH = 0.1  # of what a block saves: so much that cannot be computed again is told
_MORE_PATIENCE = 8  # so many times as many small steps in a row end a climb that follows one that they have ended
_MOST_WAITED_STEPS = 8  # of others: a critic may take five for each one of its generator
_MOST_RESTARTS = 2  # of a climb: from then on it tries the survey's own plan and one more
_STEPS_OF_TWO_PLANS = 4
_LEAST_TRIAL_STEPS = 8  # however long the survey was: up to four for its own plan, and some for others


class FittedModel(abc.ABC):
    """One fitted model: its phase, and the work of going from one to the next.

    Parameters
    ----------
    model, chosen : nn.Module, list of Chosen
        The model, and its blocks.
    meter : Meter
        The device's clock and memory.
    budget : Budget
        The memory that plans may take.
    options : FitOptions
        The actions that plans may use, the options of the contexts that move, and the result of a step that does not
        fit.

    Attributes
    ----------
    model, model_name, block_count : weakref.ref of nn.Module, str, int
        The model, its class, and how many blocks it has.
    state : State
        Its phase.
    step : Step or None
        The surveyed step, with the times that the trials have shown.
    trials : list of Trial
        The plans that are or were tried.
    called : CalledBlocks
        The blocks that the surveyed step called.
    is_surveyed : bool
        Whether a survey was done. If so, ``saves`` tells of all calls of the surveyed step.
    notes : list of str
        The events that did not go as planned.
    allocator : str
        The settings of the device's allocator, for people.
    left_plan_count : int
        How many calls of blocks called other operators than planned.
    """

    def __init__(
        self,
        model: nn.Module,
        chosen: list[Chosen],
        meter: Meter,
        budget: Budget,
        options: FitOptions,
    ) -> None:
        self._changing = threading.RLock()  # held as a call of the model begins, which may end a phase
        self.model = weakref.ref(model)
        self.model_name = type(model).__name__
        self._options = options
        self._following = self._followed_by(model, chosen)
        self.block_count = len(self.names)
        self.agreement: Agreement | None = None
        self.meter, self.budget = meter, budget
        self.step: Step | None = None
        self.operators: list[tuple[Any, ...]] = []  # of each kind of block, in order
        self._was_refused = False  # a block could not be computed again, and the plan is still followed
        self.is_surveyed = False
        self._saved_bytes: list[int] = []  # by each call of the surveyed step
        self._opener: Opener = None  # of the steps that plans are tried for
        self._openers = Openers()
        self._most_waited = _MOST_WAITED_STEPS
        self._rests = 0  # steps of a survey that were the rest of an earlier one
        self._waited = 0  # steps of a survey that were known, while others were waited for
        self._all_surveyed: dict[Opener, SurveyedStep] = {}  # by this survey
        self._others: dict[Opener, SurveyedStep] = {}  # those of them that no plans are tried for
        self._has_more_calls = False  # the step has called a module more often than any that was surveyed
        self._followed_share = 1.0  # of the largest step's size, for which the plan was chosen
        self._windows: dict[Opener, int] = {}  # of the next step of a survey, in bytes
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
        self._link: LinkRates | None = None
        self._reset_counters: list[Callable[[], None]] = []
        self._was_unfit_told = False  # since a plan was settled on
        self._steps = 0  # since the survey began
        self._phase_steps = 0  # that are over, of the present phase
        self._is_survey_logged = False
        reference = self.model
        self._growth = Growth(lambda: gradients(reference()))
        self._elsewhere: list[Trial] = []  # plans that have failed in other amounts of memory
        self._patience = 1  # how many times as many small steps as usual do not end a climb
        self._awaits_large_step = False
        self._restarts = 0  # of this climb, since bytes had come
        self._gone: dict[str, None] = {}  # the names of blocks that have ceased to exist
        self._replacements = 0  # surveys in a row that began for it before a plan had settled
        self._small_steps = 0  # in which fewer blocks were called than in the largest one
        self._seen = Seen()
        self._unseen: Unseen | None = None  # what to tell of blocks whose calls were not seen
        self._told_unseen = ""  # the note of it
        self._warned_unseen: set[str] = set()  # the causes that were warned of
        self._kinds: dict[tuple[Any, ...], SurveyedKind] = {}  # of blocks, that were recorded
        # The kind of each block that a step of a survey has called, by its latest such call.
        self._keys: weakref.WeakKeyDictionary[nn.Module, tuple[Any, ...]] = weakref.WeakKeyDictionary()
        self._known_shapes: Any = None
        self.clock = Clock(self, meter, self._largest)
        self._block_calls = BlockCalls(
            weakly(self._block_begins), weakly(self._look_at_state), weakly(self.clock.follow_block),
            lambda: reference() is not None,
        )  # fmt: skip
        self.state: State = Removed(None)
        try:
            self._block_calls.watch(self.names)
            self._begin_survey()
        except BaseException:  # such as a TorchScript module, which takes no hooks
            self.remove()
            raise

    def _followed_by(self, model: nn.Module, chosen: list[Chosen]) -> Following:
        return Following(model, chosen, may_move=self.may_move, options=self._options.moving)

    @property
    def may_recompute(self) -> bool:
        """Whether plans may have blocks computed again."""
        return self._options.recompute

    @property
    def may_move(self) -> bool:
        """Whether plans may move anything."""
        return self._options.move

    @property
    def is_lenient(self) -> bool:
        """Whether a step that does not fit is a warning and no error."""
        return self._options.on_unfit == "warn"

    def take_blocks(self, chosen: list[Chosen]) -> None:
        """Have other blocks from the next step on, as far as that is possible, and survey them."""
        model = self.model()
        assert model is not None
        if self._following.gone:
            self._note_gone()
        possible = []
        for each in chosen:
            if isinstance(each.module, torch.jit.ScriptModule):
                self.note(f"{each.name} is left alone, since a TorchScript module takes no hooks")
            elif each.module not in self.names and is_watched(each.module):
                self.note(f"{each.name} is left alone, since it is a block of another model that is fitted")
            else:
                possible.append(each)
        self._openers.take_blocks()
        self._block_calls.remove()
        self._following.remove()
        self._following = self._followed_by(model, possible)
        self.block_count = len(self.names)
        self._block_calls.watch(self.names)
        self._begin_survey()

    @property
    def lacks_blocks(self) -> bool:
        """Whether blocks do not exist any more, and others may be taken before the next call."""
        return bool(self._following.gone) and self.agreement is None and self.clock.is_between_steps

    def _take_replaced(self) -> None:
        """Have the modules that came in the places of blocks be blocks from the next step on."""
        model, following = cast(nn.Module, self.model()), self._following
        self.take_blocks(blocks_in_place(model, self.names, following.all_names, following.was_in_model))

    def _note_gone(self) -> None:
        """Note that the model has lost blocks, and warn if that happens again and again before a plan has settled."""
        begun = "blocks were replaced or deleted"
        self._gone |= dict.fromkeys(self._following.gone)
        self._replacements = 0 if isinstance(self.state, Settled) else self._replacements + 1
        self.notes = [each for each in self.notes if not each.startswith(begun)]
        self.notes.append(f"{begun} ({shown([*self._gone])}): a survey of the blocks that the model has now was begun")
        if self._replacements >= _MANY_REPLACEMENTS:
            self._warn(
                f"blocks of {self.model_name} are replaced again and again. Each time, a survey begins anew, in which "
                "they keep as little as they can, so that steps take longer. Change the parameters of blocks instead, "
                "or remove() what fit returned"
            )

    def _tell_missing(self) -> None:
        """Tell, once, of blocks that exist, and that the model does not have any more."""
        missing = self._following.missing(cast(nn.Module, self.model()))
        begun = "the model does not have some of its blocks any more"
        if missing and not any(each.startswith(begun) for each in self.notes):
            self._warn(
                f"{begun} ({shown([self.names[each] for each in missing])}), though they still exist. Modules that are "
                "in their places are left alone: call fit again"
            )

    @abc.abstractmethod
    def opener_of(self, called: Opener) -> Opener:
        """Return the module that a step begins with, if it begins with a call of this one."""

    @abc.abstractmethod
    def step_begins(self, size: int) -> None:
        """Take notice of a step that begins with a call of this size."""

    @abc.abstractmethod
    def step_finished(self, step: FinishedStep) -> None:
        """Go on after a step."""

    @abc.abstractmethod
    def backward_began(self) -> None:
        """Take notice of a backward, in which this is called."""

    @abc.abstractmethod
    def backward_ended(self) -> None:
        """Take notice of the end of a backward."""

    @property
    def names(self) -> Mapping[nn.Module, str]:
        """The names of the blocks."""
        return self._following.names

    @property
    def phase(self) -> Phase:
        """The name of its phase."""
        return self.state.name

    @property
    def why_over(self) -> str | None:
        """Why there will be no more steps of the model; None if some may come."""
        if self.phase is Phase.REMOVED:
            return "this fit was removed"
        return "the model does not exist any more" if self.model() is None else None

    def snapshot(self) -> Snapshot:
        """Return the state of this moment, for the user."""
        budget = self.budget
        return Snapshot(
            model_name=self.model_name,
            block_count=self.block_count,
            phase=self.phase,
            why_over=self.why_over,
            has_been_called=self.clock.has_been_called,
            memory_bytes=budget.memory_bytes,
            device_bytes=budget.device_bytes,
            room_bytes=0 if self.step is None else budget.room_bytes(self.step),
            sharer_count=budget.sharer_count,
            allocator=self.allocator,
            largest_size=self.largest_size,
            step=None if self.step is None else self.step.with_more(self._growth.grown_bytes),
            settled=self.settled,
            trials=tuple(self.trials),
            blocks=self._following.all_names,
            opener=self._name_of(self._opener),
            others=tuple((self._name_of(each.opener), each.trial) for each in self._others.values()),
            names=tuple(self.called.names),
            operators=tuple(self.operators),
            obstacles=dict(self.obstacles),
            is_of_several=self.agreement is not None,
            left_plan_count=self.left_plan_count,
            notes=tuple(self.notes),
        )

    def _name_of(self, opener: Opener) -> str:
        """Return the name of a part of the model; nothing for the model itself."""
        model, module = self.model(), None if opener is None else opener()
        return "" if model is None else next((name for name, each in model.named_modules() if each is module), "")

    def progress(self) -> Progress:
        """Return its present work, in few words."""
        trial = None if self.step is None else self._followed
        planned = None if trial is None else trial.plan.calls
        return Progress(
            model_name=self.model_name,
            block_count=self.block_count,
            names=tuple(self.names.values()),
            phase=self.phase,
            phase_step=self._phase_steps + 1,
            recomputed_count=None if trial is None else trial.again_count,
            moved_count=None if planned is None else sum(bool(each.moves or each.moved) for each in planned),
        )

    def _enter(self, state: State) -> None:
        """Go on to another phase, or to the same one anew."""
        self.state = state
        self._phase_steps = 0

    def _log(self, text: str) -> None:
        log_phase(self.progress(), text)

    def _log_settled(self, trial: Trial) -> None:
        after = f" after {self._steps} steps" if self._steps else ""
        measured = "" if trial.step_s is None else f", measured {trial.step_s * 1e3:.1f} ms"
        self._log(f"settled{after}: {predicted(trial)}{measured}; {self.progress().does}")

    @property
    def largest_size(self) -> int:
        """The most bytes that the arguments of a step's first call had."""
        return self._seen.of(self._opener).first_size

    @property
    def settled(self) -> Trial | None:
        """The plan that is followed for good; None while there is none."""
        match self.state:
            case Settled(trial) | LeastMemory(trial) | Removed(trial):
                return trial
            case _:
                return None

    def _block_begins(self, nbytes: int) -> None:
        self.clock.block_begins(nbytes)

    def _look_at_state(self, state: Any) -> None:
        self._seen.note_state(state, is_surveying=isinstance(self.state, Surveying))

    def _largest(self, *values: float) -> Any:
        """Return for each value the largest one of the ranks that decide together."""
        return values if self.agreement is None else self.agreement.largest(*values)

    def _begin_survey(self, *, keeps_sizes: bool = False) -> None:
        """Begin a survey. The kinds of blocks that are known already are not recorded again.

        ``keeps_sizes``: as in ``Seen.begin_survey``.
        """
        survey = Survey(
            cast(nn.Module, self.model()), self.meter, self.budget, self.clock.is_backward_seen, weakly(self.refuse),
            may_recompute=self.may_recompute, may_agree=self._options.group is not None, kinds=self._kinds,
        )  # fmt: skip
        self._enter(Surveying(survey))
        self._is_survey_logged = False
        self._was_refused = False
        self._known_shapes = None
        self.trials, self._elsewhere, self.step, self._surveyed, self._own = [], [], None, None, None
        self._patience, self._awaits_large_step = 1, False
        self._restarts = 0
        self._followed = None
        self._all_surveyed, self._others, self._windows = {}, {}, {}
        self._waited = self._rests = 0
        self._seen.begin_survey(keeps_sizes=keeps_sizes)
        self._steps = self._survey_reserved_bytes = 0
        self.clock.measures = False
        self.clock.forget()
        self.budget.begin_survey()
        self._watch(survey, survey.window_bytes)

    def _watch(self, survey: Survey, window_bytes: int) -> None:
        """Have the survey watch the blocks."""
        blocks = list(self.names)
        watch = weakly(survey.watch, otherwise=Watch(None))
        moving = {block: [True] for block in blocks} if self.may_move else {}
        self._following.follow(dict.fromkeys(blocks, watch), moving, window_bytes)
        if not survey.is_timing:  # else the host would have to get memory from the device anew while it is timed
            self.meter.forget_reserved()

    def _note_surveyed(self, survey: Survey, last: FinishedStep) -> None:
        """Keep what the survey's last step has shown, for the largest step that begins with the same module."""
        if self.may_move and self._link is None:
            self._link = measure_link(self.meter.device, self._options.moving)
        survey.leave_out_open_calls()
        step, keys = surveyed_step(survey, self._link, self._options.moving, self.agreement)
        reserved_bytes = last.reserved_bytes
        if 0 < (share := self._seen.of(last.opener).share_of(last)) < 1:
            self.notes.append(f"the survey measured a step of {share:.0%} of the largest one's size")
            step = scaled(step, 1 / share)
            reserved_bytes = int(reserved_bytes / share)
        kinds = [self._kinds[key] for key in keys]
        called = list(zip(survey.called_modules, step.calls, strict=True))
        for name in dict.fromkeys(type(block).__name__ for block, call in called if kinds[call.kind].copies_inputs):
            self.note(
                f"the program writes to arguments of a {name} after its forward, as x += block(x) does: a call that is "
                "computed again holds a copy of them"
            )
        self._tell_unrepeatable(called, kinds)
        self._all_surveyed[last.opener] = SurveyedStep(
            opener=last.opener, parts=last.parts, step=step, keys=keys,
            called=CalledBlocks(survey.called_modules, self.names),
            saved_bytes=[kinds[call.kind].all_saved_bytes for call in step.calls],
            window_bytes=survey.window_bytes, reserved_bytes=reserved_bytes, began_bytes=survey.began_bytes,
            some_retain=survey.some_retain,
        )  # fmt: skip
        survey.forget_tensors()

    def _awaits_others(self) -> bool:
        """Return whether the survey goes on for steps that begin with another module and were not measured yet.

        Modules with which no step has begun for long are forgotten.
        """
        alive = [each for each in self._openers.known if each is None or each() is not None]
        is_over = self._waited >= self._most_waited
        self._openers.known = [each for each in alive if each in self._all_surveyed or not is_over]
        return len(self._openers.known) > len(self._all_surveyed)

    def _make_plan(self) -> None:
        """Plan for the steps of the survey."""
        all_surveyed = list(self._all_surveyed.values())
        saved_bytes = self._largest(*(sum(each.saved_bytes) for each in all_surveyed))
        largest = all_surveyed[saved_bytes.index(max(saved_bytes))]
        self._opener = largest.opener
        self._others = {each.opener: each for each in all_surveyed if each is not largest}
        kinds = [self._kinds[key] for key in largest.keys]
        self.operators = [kind.operators for kind in kinds]
        self.obstacles = {number: kind.obstacle for number, kind in enumerate(kinds) if kind.obstacle is not None}
        self.called, self._saved_bytes = largest.called, largest.saved_bytes
        self._unseen = unseen_blocks(self.names, self._keys)
        if self.may_recompute and (why := obstacle()) is not None:
            self.note(f"PyTorch shows the operators of blocks by way of Python, so that each takes longer: {why}")
        self.is_surveyed = True
        self._growth.begin(max(each.began_bytes for each in all_surveyed))
        step, self._survey_reserved_bytes = largest.step, largest.reserved_bytes
        left_bytes = self.meter.counts().allocated_bytes
        if grown := int(self._largest(self._growth.bytes_after(left_bytes, self.budget.memory_bytes))[0]):
            # The optimizer has stepped for the first time. Its own peak was measured with these bytes.
            step = dataclasses.replace(step.with_more(grown), other_bytes=step.other_bytes)
            self._survey_reserved_bytes += grown
            self._growth.take(grown)
            for other in self._others.values():
                other.take_more(grown)
        self._surveyed = self.step = step
        self._own = survey_plan(step, largest.window_bytes)
        self.choose()

    @property
    def saves(self) -> list[tuple[nn.Module, int]]:
        """The blocks that the surveyed step called, or the latest step of the survey, and the bytes each call saved."""
        match self.state:
            case Surveying(survey) if not self.is_surveyed:
                return survey.saves
            case _:
                both = zip(self.called.modules, self._saved_bytes, strict=True)
                return [(block, nbytes) for block, nbytes in both if block is not None]

    def _tell_unrepeatable(self, called: list[tuple[nn.Module, BlockCall]], kinds: list[SurveyedKind]) -> None:
        """Note the blocks that make much that would come out differently if they were computed again."""
        told = set()
        for block, call in called:
            kind, name = kinds[call.kind], type(block).__name__
            nbytes, operators = kind.unrepeatable
            if kind.obstacle is None and nbytes > _MUCH * kind.all_saved_bytes and name not in told:
                told.add(name)
                self.note(
                    f"{human_bytes(nbytes)} of each {name} stay or move, since they would come out differently if they "
                    f"were computed again: what {' and '.join(operators)} made. If kernels that PyTorch does not see "
                    "write them, as Triton's in a custom Function, register these by torch.library.triton_op or "
                    "custom_op: then they are computed again as well"
                )

    def _tell_unseen(self) -> None:
        """Note the blocks that fit has no plan for, and warn of each cause once.

        That is done once a plan has settled, since networks that are trained in turns may be called until then.
        """
        self._note_unseen()
        unseen = self._unseen
        if unseen is not None and unseen.is_worth_a_warning and unseen.cause not in self._warned_unseen:
            self._warned_unseen.add(unseen.cause)
            warn_user(f"torchoffload: {unseen.text}")

    def _note_unseen(self) -> None:
        """Have the report tell of the blocks that fit has no plan for now, and not of those that it had none for."""
        self.notes = [each for each in self.notes if each != self._told_unseen]
        self._told_unseen = "" if self._unseen is None else self._unseen.text
        if self._unseen is not None:
            self.notes.append(self._unseen.text)

    def note(self, text: str) -> None:
        """Have the report tell of an event, once."""
        if text not in self.notes:
            self.notes.append(text)

    def _warn(self, text: str) -> None:
        """Warn of an event, once, and have the report tell of it."""
        if text not in self.notes:
            self.notes.append(text)
            warn_user(f"torchoffload: {text}.")

    def note_stuck(self) -> None:
        """Warn, once, that steps begin and do not end."""
        text = (
            f"the backward of none of the last calls of {self.model_name} was seen, so that fit does nothing. It sees "
            "a backward through tensors that the model returns, and through its blocks"
        )
        self._warn(text)

    def note_slow_convolutions(self) -> None:
        """Warn, once, if an allocation failed that cuDNN may have done without, at the cost of time."""
        text = (
            "an allocation failed in a step that went on. If it was the workspace of a convolution, PyTorch has taken "
            "an algorithm of cuDNN that needs less, and keeps to it until the process ends: such convolutions may be "
            "many times slower. Begin anew with less memory= or a smaller batch, or give the model the memory format "
            "channels_last, in which cuDNN needs less"
        )
        if self._has_workspaces:
            self._warn(text)

    @property
    def _has_workspaces(self) -> bool:
        """Whether blocks have convolutions of cuDNN."""
        others = [self._kinds[key].operators for each in self._others.values() for key in each.keys]
        convolves = any("convolution" in str(operator) for kind in (*self.operators, *others) for operator in kind)
        return convolves and self.meter.device.type == "cuda" and torch.backends.cudnn.enabled

    def replan(self, memory_bytes: int) -> None:
        """Plan for another amount of memory."""
        self.budget.give(memory_bytes)
        self._was_unfit_told = False
        if self._surveyed is None:
            return
        gone, grown = self._largest(bool(self._following.gone), self._growth.bytes_beside(memory_bytes))
        if gone:  # the next step begins a survey, whose plans are for this amount
            return
        if grown:
            self._count_beside(int(grown))
        self._steps = 0
        self.choose()

    def _room(self, step: Step) -> Room:
        budget = self.budget
        has_more = budget.device_bytes > budget.memory_bytes + SPARE_BYTES
        stuck = None if has_more else stuck_bytes(self.meter.device)
        surveyed = self._all_surveyed.get(self._opener)  # none if the plan was read from a file
        some_retain = surveyed is not None and surveyed.some_retain
        is_unknown, most_stuck, some_retain = self._largest(stuck is None, stuck or 0, some_retain)
        return Room(
            budget.reservable_bytes - budget.beyond_bytes, budget.room_bytes(step), self.meter.measures_memory,
            max(1, budget.sharer_count), None if is_unknown else int(most_stuck), self._has_workspaces,
            bool(some_retain),
        )  # fmt: skip

    def choose(self, *, raises: bool = True) -> None:
        """Find plans for the surveyed step, and try them. ``raises``: if none fits, and if the user wants it."""
        for other in self._others.values():
            other.takes_less()
        step = cast(Step, self._surveyed)
        self.budget.share(self.agreement, self.meter)
        for name in self.budget.left_over:
            self.note(
                f"{name}, which was fitted before, takes no more steps: this plan has its share of the memory. If it "
                "is left over, as from a cell of a notebook that ran before, remove() what fit returned for it"
            )
        room = self._room(step)
        # Ranks that decide together try the same plans, and each has counted its own reserved bytes.
        self._survey_reserved_bytes = int(self._largest(self._survey_reserved_bytes)[0])
        ran_bytes = self._survey_reserved_bytes
        known = [*self._elsewhere, *self.trials]
        own = first_plan(step, room, self._own, ran_bytes=ran_bytes, known=known)
        if own is None:
            self._follow_least(step, raises=raises)
            return
        least_steps = _LEAST_TRIAL_STEPS if self._restarts < _MOST_RESTARTS else _STEPS_OF_TWO_PLANS
        steps = max(_MOST_STEPS - self._steps, least_steps)
        climb = Climb(
            step, own, room, steps, known, own_reserved_bytes=ran_bytes if own is self._own else 0,
            patience=self._patience,
        )  # fmt: skip
        self.trials = climb.trials
        self._elsewhere = [each for each in climb.elsewhere if each.has_failed]
        self._enter(Climbing(climb))
        self.clock.measures = True
        if self._next_trial(climb):
            first = predicted(cast(Trial, climb.current))
            self._log(f"trials begin: plans are tried, for two steps each. The first one: {first}")
        else:
            self._settle(climb)

    def _follow_least(self, step: Step, *, raises: bool) -> None:
        plan = least_plan(step)
        trial = Trial(step, plan)
        self._tell_unseen()
        self._enter(LeastMemory(trial))
        self._apply(trial)
        self._log(f"least memory: no plan fits. The one of the least memory: {predicted(trial)}")
        self._tell_unfit(unfit_message(step, plan, self.budget), raises=raises)

    def _tell_unfit(self, message: str, *, raises: bool = True) -> None:
        """Tell, once until a plan is settled on, that there is too little memory. ``raises``: as in ``choose``."""
        self.note(message)
        if self._was_unfit_told:
            return
        self._was_unfit_told = True
        if raises and not self.is_lenient:
            raise does_not_fit(message, self.meter.device)
        warn_user(f"torchoffload: fit: {message} It runs in the least memory.")

    def _next_trial(self, climb: Climb) -> bool:
        """Try the next plan. Returns whether there is one."""
        trial = climb.take_next()
        if trial is not None:
            self._apply(trial)
            self.clock.forget()
        return trial is not None

    def _settle(self, climb: Climb) -> None:
        """Follow the best plan of a climb; the one of the least memory if even the survey's own has failed."""
        step = self.step = climb.step
        trial = climb.best or Trial(step, least_plan(step))
        # Plans for calls of other sizes are not tried: they go by the reserved bytes, and not by an estimate.
        room = dataclasses.replace(climb.room, stuck_bytes=None)
        plan_bytes = allowed_bytes(room, climb.trials) if climb.best is not None else 0
        told = disagreement(climb)
        self.notes += [each for each in told if each not in self.notes]
        self._awaits_large_step = climb.met_small_steps
        if climb.met_small_steps:
            self.note(
                "many steps in a row had less than half of the surveyed step's size: plans are tried again once a step "
                "has more"
            )
        plan_bytes = max(plan_bytes, trial.plan.peak_bytes)
        more_bytes = trial.allocated_bytes - trial.plan.peak_bytes if trial.allocated_bytes else 0
        for other in self._others.values():
            other.take_plan(plan_bytes + more_bytes)
        self._follow_settled(trial.with_times(step), plan_bytes)

    def _follow_settled(self, trial: Trial, plan_bytes: int) -> None:
        self._tell_unseen()
        if self._followed is None or trial.plan.calls != self._followed.plan.calls:
            self._apply(trial)
        self._followed = trial
        self._restarts = 0
        self._was_unfit_told = False
        self.clock.measures = False
        self.meter.take_peak()  # steps that take more are noticed from here on
        self._enter(Settled(trial, OtherSizes(trial, plan_bytes)))
        self._log_settled(trial)

    def _plan_beside(self, nbytes: int) -> None:
        """Plan anew beside bytes that have come since the survey for good, as the state of an optimizer may."""
        self._count_beside(nbytes)
        if isinstance(self.state, Climbing):
            self._restarts += 1
        else:
            self._steps = 0
        self.choose(raises=False)

    def _count_beside(self, nbytes: int) -> None:
        """Have the next plans leave so many bytes more to others. The bytes of former trials tell nothing any more."""
        self.notes.append(f"{human_bytes(nbytes)} more were allocated before a step than in the survey: planned anew")
        self._growth.take(nbytes)
        self._surveyed = cast(Step, self._surveyed).with_more(nbytes)
        for other in self._others.values():
            other.take_more(nbytes)
        self._survey_reserved_bytes += nbytes
        self._own = None
        self.trials, self._elsewhere = [], []

    def _plan_for_more(self, allocated_bytes: int, nbytes: int) -> None:
        """Plan anew after a step of a settled plan that took so many bytes more than planned, and than there may be.

        Under a plan that keeps less it may take fewer: the plan of the least memory is followed before it is told that
        nothing fits.
        """
        self._note_more(self.model_name, allocated_bytes, nbytes)
        step, budget = cast(Step, self._surveyed), self.budget
        most_bytes = max(0, budget.allocatable_bytes - step.peak_bytes(least_plan(step)))
        budget.beyond_bytes = min(nbytes, most_bytes) if budget.beyond_bytes < most_bytes else nbytes
        self._steps = 0
        self.choose(raises=False)

    def _note_more(self, name: str, allocated_bytes: int, nbytes: int) -> None:
        self.notes.append(
            f"a step of {name} took {human_bytes(allocated_bytes)}, {human_bytes(nbytes)} more than planned, as one "
            "does that retains its graph (retain_graph, create_graph) if the survey saw none: planned anew for these"
        )

    def _climb_again(self) -> None:
        """Try plans again, since a large step came after so many small ones that the climb had ended."""
        self._patience = _MORE_PATIENCE
        self._steps = 0
        self.choose(raises=False)

    def _share_anew(self) -> None:
        """Plan anew, since other models than before share the memory with this one."""
        self._steps = 0
        self.choose(raises=False)

    def _step_down(self, trial: Trial) -> None:
        """Follow a plan that takes less, after a step ran out of memory under one that had settled: without trials."""
        self.notes.append(failure_message(trial))
        below = next_below(self.trials, trial, self.budget.reservable_bytes)
        if below is not None:
            self._follow_settled(below, below.plan.peak_bytes)
            return
        self._enter(LeastMemory(trial))
        self._log("least memory: a step ran out of memory, and no plan takes less")
        self._tell_unfit(f"{failure_message(trial)}, and no plan takes less. {MORE_ROOM}")

    def _apply(self, trial: Trial, other: SurveyedStep | None = None, *, keeps_cache: bool = False) -> None:
        """Follow a plan. ``other``: the step that it is for, if that is not the one that plans are tried for."""
        self._followed = trial
        surveyed = other or self._all_surveyed.get(self._opener)  # none if the plan was read from a file
        called = self.called if other is None else other.called
        refuse = partial(weakly(self._refuse_planned), [] if surveyed is None else surveyed.keys)
        planned, moving = turns_of(trial, called.modules, weakly(self.count_left), refuse)
        watches: dict[nn.Module, Turns | FoundTurns] = {**planned}
        if not trial.is_plain:
            self._add_uncalled(watches, moving)
        self._reset_counters = [*(turns.reset for turns in watches.values()), self._following.reset_turns]
        if self.agreement is not None:
            self.agreement.check_same(repr(trial.does))
        windows = windows_of(trial, called.modules)
        self._following.follow(watches, moving, trial.plan.window_bytes, windows, repeats=not has_rest(trial))
        if self.clock.block_count:  # the plan changes within a step, and is for the calls that are to come
            blocks = called.modules
            in_order = [blocks[number] for number in numbers_of_calls(trial.step)]
            begun = Counter(each for each in in_order[: self.clock.block_count] if each is not None)
            for block, turns in watches.items():
                turns.reset(begun[block])
            self._following.reset_turns(begun)
        if not keeps_cache:
            self.meter.forget_reserved()

    def _add_uncalled(self, watches: dict[nn.Module, Turns | FoundTurns], moving: dict[nn.Module, list[bool]]) -> None:
        """Have blocks keep as little as they can that the step does not call: another one may, as with LayerDrop."""
        for block in self.names:
            if block in moving:
                continue
            if block not in self._keys:
                watches[block] = FoundTurns(weakly(self._find_turns))
            elif turns := self._least_turns(self._keys[block]):
                watches[block] = turns
            if self.may_move:
                moving[block] = [True]

    def _least_turns(self, key: tuple[Any, ...]) -> Turns | None:
        """Return the turns by which blocks of a kind keep as little as they can; None if none is computed again."""
        kind = self._kinds.get(key)
        if kind is None or kind.least is None or kind.groups:
            return None
        return least_turns(kind.least, weakly(self.count_left), partial(weakly(self.refuse), key))

    def _find_turns(self, module: nn.Module, inputs: Any) -> Turns | None:
        """Return the turns of a block whose first call comes behind the survey; None if its kind is not known.

        A survey begins then, as for a block in a new state.
        """
        if any(map(is_lazy, module.parameters())):
            return None
        key = kind_of_call(module, inputs)
        if key not in self._kinds:
            self._seen.note_new_state()
            return None
        self._keys[module] = key
        self._unseen = unseen_blocks(self.names, self._keys)
        self._note_unseen()
        return self._least_turns(key)

    def follow_saved(self, saved: SavedPlan) -> None:
        """Follow a plan that was read from a file, without a survey; make another one if the options now differ."""
        if saved.is_of_several:  # these ranks may not be the same ones: they make a plan together
            self.notes.append("the plan of the file was made by several ranks together, and so it is made anew")
            return
        self.called = CalledBlocks(saved.modules(self.names), self.names)
        self.step = self._surveyed = restricted(saved.step, may_recompute=self.may_recompute, may_move=self.may_move)
        fixed = saved.step.fixed
        self._growth.begin(sum(fixed.values()) - fixed.get("gradients", 0))
        self._opener = weakref.ref(saved.opening_module(cast(nn.Module, self.model())))
        self._openers.known = [self._opener]
        self._seen.set_size(self._opener, saved.largest_size)
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

    def refuse(self, key: tuple[Any, ...], message: str) -> None:
        """Have no block of a kind computed again from the next step on, since one could not be in its backward.

        Other kinds that differ from it by their arguments alone are not computed again either.
        """
        self._was_refused = True
        for other, kind in self._kinds.items():
            if other[0] == key[0]:
                kind.refuse(message)
        self.note(message)
        self.clock.forget()  # the step's backward has ended by an error

    def _refuse_planned(self, keys: list[tuple[Any, ...]], kind: int, message: str) -> None:
        self.refuse(keys[kind] if keys else (None,), message)

    def remove(self) -> None:
        """Take everything away."""
        self._enter(Removed(self.settled))
        self.budget.end()
        self._block_calls.remove()
        self._following.remove()
