"""The plan that each call of a block follows."""

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import nn

from torchoffload._fit.block.following import BlockWindows
from torchoffload._fit.block.graph import BlockPlan
from torchoffload._fit.block.replay import Watch
from torchoffload._fit.plan.step import CallPlan, Step
from torchoffload._fit.plan.trials import Trial

__all__ = ["FoundTurns", "Turns", "has_rest", "least_turns", "numbers_of_calls", "turns_of", "weakly", "windows_of"]


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
    keeps_for_later : bool
        As in ``Watch``.
    """

    def __init__(
        self, plan: BlockPlan | None, tell: Callable[[], None], refuse: Callable[[str], None],
        *, keeps_for_later: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(plan)
        self._tell, self._refuse = tell, refuse
        self.keeps_for_later = keeps_for_later

    def left_plan(self) -> None:
        """Tell that forward called another operator than planned."""
        self._tell()

    def refused(self, message: str) -> None:
        """Tell that the call cannot be computed again."""
        self._refuse(message)


class Turns:
    """The plan of each call of one block, in the order of the calls of one step.

    ``repeats``: whether calls behind the last one begin with the first plan again. Else they follow the last one.
    """

    def __init__(self, followed: list[_Followed], *, repeats: bool = True) -> None:
        self._followed = followed
        self._repeats = repeats
        self._next = 0

    def reset(self, called: int = 0) -> None:
        """Begin with the first call again: a step begins. ``called``: the calls of the block that it had already."""
        self._next = called

    def __call__(self, _module: nn.Module, _inputs: Any) -> Watch:
        count = len(self._followed)
        turn = self._followed[self._next % count if self._repeats else min(self._next, count - 1)]
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


def numbers_of_calls(step: Step) -> list[int]:
    """Return the numbers of the calls before the first backward, and behind them those that later calls repeat."""
    return [*range(len(step.calls)), *itertools.chain.from_iterable(step.between)]


def _calls_of(trial: Trial) -> list[tuple[int, CallPlan]]:
    """Return the number of each planned call and its plan, and then those of the calls between the step's backwards.

    These repeat earlier ones. If that might take more than the plan is predicted to, they keep the least they can.
    """
    step, plan = trial.step, trial.plan
    may_repeat = step.room_between(plan) >= 0
    between = numbers_of_calls(step)[len(plan.calls) :]
    return [
        *enumerate(plan.calls),
        *((number, plan.calls[number] if may_repeat else _least(step, number)) for number in between),
    ]


def _least(step: Step, number: int) -> CallPlan:
    """Return the plan of a call that keeps as little as it can, in windows of 0 bytes."""
    kind = step.kinds[step.calls[number].kind]
    way = kind.ways[0]
    moved = tuple(each for each in way.kept if step.may_move and kind.outputs[each].may_move)
    return CallPlan(0, moved, step.may_move and (bool(moved) or way.input_bytes > 0))


def has_rest(trial: Trial) -> bool:
    """Return whether blocks have one more plan, for calls that no surveyed step had: to keep as little as they can.

    Such calls wait for their backward beside others that the plan does not count, as in a step of more micro-batches.
    """
    return bool(trial.step.late) and not trial.is_plain


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
    first = {block: number for number, block in reversed(list(enumerate(blocks)))} if has_rest(trial) else {}
    rest = [(number, _least(trial.step, number)) for number in first.values()]
    for number, planned in [*_calls_of(trial), *rest]:
        call, block = trial.step.calls[number], blocks[number]
        if block is None:
            continue
        kind = trial.step.kinds[call.kind]
        plan = kind.ways[planned.way].plan_with(kind.outputs, planned.moved)
        keeps = trial.step.is_retained
        followed[block].append(_Followed(plan, tell, partial(refuse, call.kind), keeps_for_later=keeps))
        moving[block].append(planned.moves)
    turns = {
        module: Turns(each, repeats=not has_rest(trial))
        for module, each in followed.items()
        if any(one.plan is not None for one in each)
    }
    return turns, dict(moving)


def windows_of(trial: Trial, modules: Iterable[nn.Module | None]) -> dict[nn.Module, list[BlockWindows]]:
    """Return the windows of each call of each block; ``trial``, ``modules``: as in ``turns_of``.

    If a step has several backwards, nothing that a later one needs comes ahead in the first one: calls between them, as
    of a critic that judges anew, have forwards of their own, in which it would take memory that no plan counts. Those
    calls have the windows of the calls that they repeat, but no larger than ``Step.room_between``: the gradients of the
    first backward are on the device then. Behind the last call before each backward the offload window has 0 bytes.
    """
    windows: defaultdict[nn.Module, list[BlockWindows]] = defaultdict(list)
    step, blocks = trial.step, list(modules)
    of_calls = _windows_before_backward(trial)
    room = max(0, step.room_between(trial.plan))
    for together in step.between:
        for number, following in itertools.zip_longest(together, together[1:]):
            then = BlockWindows(*(min(room, nbytes) for nbytes in of_calls[number]))
            of_calls.append(then if following == number + 1 else then._replace(after_bytes=0))
    for (number, _), each in zip(_calls_of(trial), of_calls, strict=True):
        if (block := blocks[number]) is not None:
            windows[block].append(each)
    if has_rest(trial):
        for of_block in windows.values():
            of_block.append(BlockWindows(0, 0, 0))
    return dict(windows)


def _windows_before_backward(trial: Trial) -> list[BlockWindows]:
    """Return the windows of the calls before the first backward.

    The core plans for calls in the reversed order of their backwards (``Step.as_one_backward``). If forward calls them
    in another order, a late call's forward runs beside calls that the core counts behind it, and the copies that are
    on their way at the loss may be those of late calls, whose sources no call of the first backward lets go.
    """
    step, plan = trial.step, trial.plan
    stays_bytes = 0
    offload_bytes = []
    for number, (call, planned) in enumerate(zip(step.calls, plan.calls, strict=True)):
        stays_bytes += step.stays_bytes(plan, number)
        room = plan.peak_bytes - call.forward_bytes - stays_bytes
        offload_bytes.append(min(planned.offload_bytes, max(0, room)) if step.late else planned.offload_bytes)
    reload_bytes = []
    before_bytes = 0  # that calls before this one, but behind the last late one, move
    for number, planned in enumerate(plan.calls):
        if number in step.late:
            reload_bytes.append(planned.reload_bytes)
            before_bytes = 0
        elif step.late:
            reload_bytes.append(min(planned.reload_bytes, before_bytes))
            before_bytes += step.kinds[step.calls[number].kind].moved_bytes(planned)
        else:
            reload_bytes.append(planned.reload_bytes)
    is_in_order = step.backward_order == list(range(len(step.calls)))
    loss_bytes = plan.loss_window_bytes if is_in_order else min(plan.loss_window_bytes, before_bytes)
    if step.is_retained:  # each backward holds the sources of copies at the loss beside its reloads
        loss_bytes = min(loss_bytes, max(0, step.room_ahead(plan)) // 2)
    rooms = [max(0, room) for room in _rooms_of_late(trial, loss_bytes)]
    for number in step.late:
        reload_bytes[number] = min([reload_bytes[number], *rooms])
    return list(map(BlockWindows, offload_bytes, [*offload_bytes[1:], loss_bytes], reload_bytes))


def _rooms_of_late(trial: Trial, loss_window_bytes: int) -> Iterator[int]:
    """Yield how many bytes are left for the reload windows of late calls where their records come ahead early.

    As a forward ends, the records come ahead that the next backward asks for. They are those of a late call if the
    calls of the first backward move nothing, and between the backwards if calls there still wait for theirs. If a graph
    is retained, each backward has as much room as the loss.
    """
    step, plan = trial.step, trial.plan
    if step.between_waits:
        room = step.room_between(plan)
        yield room if room >= 0 else step.room_beside_late(plan)  # as in _calls_of
    if not any(planned.moves for number, planned in enumerate(plan.calls) if number not in step.late):
        yield step.room_ahead(plan) - loss_window_bytes


def weakly(method: Callable[..., Any], otherwise: Any = None) -> Callable[..., Any]:
    """Return a function that calls a method and does not hold its object; it returns ``otherwise`` once that is gone.

    An object that the hooks of a model hold must not hold the model, since the tables of hooks hold it until then.
    """
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        found = reference()
        return otherwise if found is None else found(*arguments)

    return call
