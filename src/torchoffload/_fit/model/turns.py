"""The plan that each call of a block follows."""

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from torchoffload._fit.block.following import BlockWindows
from torchoffload._fit.block.graph import BlockPlan
from torchoffload._fit.block.replay import Watch
from torchoffload._fit.plan.step import CallPlan, Step
from torchoffload._fit.plan.trials import Trial

__all__ = ["FoundTurns", "Turns", "least_turns", "turns_of", "weakly", "windows_of"]


class _Followed(Watch):
    """One call of a block that follows a plan.

    Parameters
    ----------
    plan : BlockPlan or None
        The plan; None if nothing is computed again.
    tell : callable
        Called if forward calls another operator than planned.
    refuse : callable
        Called with a message if the call cannot be computed again in its backward.
    """

    def __init__(self, plan: BlockPlan | None, tell: Callable[[], None], refuse: Callable[[str], None]) -> None:
        super().__init__(plan)
        self._tell, self._refuse = tell, refuse

    def left_plan(self) -> None:
        """Tell that forward called another operator than planned."""
        self._tell()

    def refused(self, message: str) -> None:
        """Tell that the call cannot be computed again."""
        self._refuse(message)


class Turns:
    """The plan of each call of one block, in the order of the calls of one step."""

    def __init__(self, followed: list[_Followed]) -> None:
        self._followed = followed
        self._next = 0

    def reset(self, called: int = 0) -> None:
        """Begin with the first call again: a step begins. ``called``: the calls of the block that it had already."""
        self._next = called

    def __call__(self, _module: nn.Module, _inputs: Any) -> Watch:
        turn = self._followed[self._next % len(self._followed)]
        self._next += 1
        return turn


class FoundTurns:
    """The calls of a block of which no survey has seen one. The plan that they follow is found as one is called.

    Parameters
    ----------
    find : callable
        Called with the module and its arguments, until it has found a plan. It returns the turns to follow, or None.
    """

    def __init__(self, find: Callable[[nn.Module, Any], Turns | None]) -> None:
        self._find = find
        self._found: Turns | None = None

    def reset(self, called: int = 0) -> None:
        """Begin a step: all calls are alike."""

    def __call__(self, module: nn.Module, inputs: Any) -> Watch:
        if self._found is None:
            self._found = self._find(module, inputs)
        return Watch(None) if self._found is None else self._found(module, inputs)


def least_turns(plan: BlockPlan, tell: Callable[[], None], refuse: Callable[[str], None]) -> Turns:
    """Return the turns of a block that follows the same plan in each call; ``tell``, ``refuse``: as in ``turns_of``."""
    return Turns([_Followed(plan, tell, refuse)])


def _calls_of(trial: Trial) -> list[tuple[int, CallPlan]]:
    """Return the number of each planned call and its plan, and then those of the calls between the step's backwards.

    These repeat earlier ones. If that might take more than the plan is predicted to, they keep the least they can.
    """
    step, plan = trial.step, trial.plan
    may_repeat = step.room_between(plan) >= 0
    between = [(number, plan.calls[number] if may_repeat else _least(step, number)) for number in step.between]
    return [*enumerate(plan.calls), *between]


def _least(step: Step, number: int) -> CallPlan:
    """Return the plan of a call that keeps as little as it can, in windows of 0 bytes."""
    kind = step.kinds[step.calls[number].kind]
    way = kind.ways[0]
    moved = tuple(each for each in way.kept if step.may_move and kind.outputs[each].may_move)
    return CallPlan(0, moved, step.may_move and (bool(moved) or way.input_bytes > 0))


def turns_of(
    trial: Trial, modules: Iterable[nn.Module | None], tell: Callable[[], None], refuse: Callable[[int, str], None]
) -> tuple[dict[nn.Module, Turns], dict[nn.Module, list[bool]]]:
    """Return the turns of each block that computes something again, and of each block, which of its calls move.

    Parameters
    ----------
    trial : Trial
        The plan.
    modules : iterable of nn.Module
        The block of each call of the step; None for those that do not exist any more.
    tell : callable
        Called if a block calls another operator than planned.
    refuse : callable
        Called with the number of a kind and a message if a block cannot be computed again in its backward.
    """
    followed: defaultdict[nn.Module, list[_Followed]] = defaultdict(list)
    moving: defaultdict[nn.Module, list[bool]] = defaultdict(list)
    blocks = list(modules)
    for number, planned in _calls_of(trial):
        call, block = trial.step.calls[number], blocks[number]
        if block is None:
            continue
        kind = trial.step.kinds[call.kind]
        plan = kind.ways[planned.way].plan_with(kind.outputs, planned.moved)
        followed[block].append(_Followed(plan, tell, partial(refuse, call.kind)))
        moving[block].append(planned.moves)
    turns = {module: Turns(each) for module, each in followed.items() if any(one.plan is not None for one in each)}
    return turns, dict(moving)


def windows_of(trial: Trial, modules: Iterable[nn.Module | None]) -> dict[nn.Module, list[BlockWindows]]:
    """Return the windows of each call of each block; ``trial``, ``modules``: as in ``turns_of``.

    If a step has several backwards, nothing that a later one needs comes ahead in the first one: calls between them, as
    of a critic that judges anew, have forwards of their own, in which it would take memory that no plan counts. Those
    calls have the windows of the calls that they repeat, but no larger than ``Step.room_between``: the gradients of the
    first backward are on the device then. Behind the last of them the offload window has 0 bytes, since a backward may
    begin there.
    """
    windows: defaultdict[nn.Module, list[BlockWindows]] = defaultdict(list)
    calls, step, blocks = trial.plan.calls, trial.step, list(modules)
    before_bytes = 0  # that calls before this one, but behind the last late one, move
    of_calls: list[BlockWindows] = []
    for number, call in enumerate(calls):
        after_bytes = calls[number + 1].offload_bytes if number + 1 < len(calls) else trial.plan.loss_window_bytes
        reload_bytes = call.reload_bytes
        if number in step.late:
            before_bytes = 0
        elif step.late:
            reload_bytes = min(reload_bytes, before_bytes)
            before_bytes += step.kinds[step.calls[number].kind].moved_bytes(call)
        of_calls.append(BlockWindows(call.offload_bytes, after_bytes, reload_bytes))
    room = max(0, step.room_between(trial.plan))
    for number, following in itertools.zip_longest(step.between, step.between[1:]):
        then = BlockWindows(*(min(room, nbytes) for nbytes in of_calls[number]))
        of_calls.append(then if following == number + 1 else then._replace(after_bytes=0))
    for (number, _), each in zip(_calls_of(trial), of_calls, strict=True):
        if (block := blocks[number]) is not None:
            windows[block].append(each)
    return dict(windows)


def weakly(method: Callable[..., Any], otherwise: Any = None) -> Callable[..., Any]:
    """Return a function that calls a method and does not hold its object; it returns ``otherwise`` once that is gone.

    An object that the hooks of a model hold must not hold the model, since the tables of hooks hold it until then.
    """
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        found = reference()
        return otherwise if found is None else found(*arguments)

    return call
