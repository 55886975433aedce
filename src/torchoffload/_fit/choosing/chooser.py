"""When the blocks of a model are chosen, and from which numbers.

The blocks have to be known before the first step, which would not fit otherwise, but the saved bytes of a call are
known only after it. So a dry run counts them before the first call. It is right for nearly all models, costs a second
or less, and takes no memory. If it fails, or if the survey shows that calls save other bytes, a scouting call counts
them: a real one, in which all saved tensors move. If that is impossible, since nothing may move, or since ranks plan
together and must not choose from numbers of their own, the innermost repeated modules are the blocks: they need little
memory in any case.
"""

import enum
import weakref
import zlib
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchoffload._contexts.options import OffloadOptions
from torchoffload._fit.choosing.call_tree import CallTree, ModuleCall
from torchoffload._fit.choosing.choice import SHARE_THAT_STAYS, choose_blocks
from torchoffload._fit.choosing.named_blocks import blocks_of, computing
from torchoffload._fit.choosing.scouting import Scouting
from torchoffload._fit.choosing.structure import find_blocks, innermost_blocks
from torchoffload._fit.machine.agreement import Agreement
from torchoffload._modules.selection import Chosen
from torchoffload._pytorch import hook_stack
from torchoffload._pytorch.compiled_calls import has_compiled

__all__ = ["Chooser"]

_MOST_DIFFERENCE = 0.1
"""By how much of its bytes a dry run may be wrong before a scouting call is made."""

_MOST_TRIES = 4


class _Fitted(Protocol):
    """The part of a model's driver that is used here."""

    notes: list[str]
    is_surveyed: bool

    @property
    def saves(self) -> list[tuple[nn.Module, int]]: ...

    agreement: Agreement | None

    @property
    def names(self) -> Mapping[nn.Module, str]: ...

    def note(self, text: str) -> None: ...

    def take_blocks(self, chosen: list[Chosen]) -> None: ...


class _State(enum.Enum):
    NEW = enum.auto()
    """The model was not called yet."""
    PREDICTED = enum.auto()
    """A dry run has told, and the survey is to show whether it is right."""
    SCOUTING = enum.auto()
    """The next call, or the one under way, is a scouting call."""
    KNOWN = enum.auto()


def _why_no_hooks() -> str | None:
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return "hooks on saved tensors are disabled"
    return None if hook_stack.top_pack_hook() is None else "others have hooks on what it saves"


class Chooser:
    """Chooses the blocks of one model.

    Parameters
    ----------
    model : nn.Module
        The model. It is held weakly.
    may_move, may_scout : bool
        Whether anything may move, and whether a call may be a scouting call.
    options : OffloadOptions
        The options of the contexts that move.
    """

    def __init__(self, model: nn.Module, *, may_move: bool, may_scout: bool, options: OffloadOptions) -> None:
        self._model = weakref.ref(model)
        self._may_scout, self._options = may_scout, options
        self._share_that_stays = SHARE_THAT_STAYS if may_move else 1.0
        self._state = _State.NEW
        self._scouting: Scouting | None = None
        self._has_agreed = False
        self._has_waited = False  # for a call in which lazy parameters got their values
        self._tries = 0
        self._names: tuple[str, ...] = ()
        self._predicted: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()

    def first_blocks(self) -> list[Chosen]:
        """Return the blocks of a model that was not called yet."""
        model = self._model()
        assert model is not None
        return self._take(blocks_of(model, innermost_blocks(model)))

    def _take(self, chosen: list[Chosen]) -> list[Chosen]:
        self._names = tuple(each.name for each in chosen)
        return chosen

    def begin_anew(self) -> None:
        """Choose again at the next call: blocks do not exist any more."""
        self._state, self._names, self._has_waited = _State.NEW, (), False

    def takes_call(self, driver: _Fitted, called: nn.Module, args: Any, kwargs: Any, frame: FrameType) -> bool:
        """Choose before a call of the model with gradients, if it is time to.

        Parameters
        ----------
        driver : Driver
            The driver, which takes the chosen blocks.
        called : nn.Module
            The module that is called: the model, or one inside of it.
        args, kwargs : tuple, dict
            The arguments of the call.
        frame : FrameType
            The Python frame that runs as long as the call does.

        Returns
        -------
        bool
            Whether the call is a scouting call, in which blocks do nothing. ``has_taken_call`` is to be called at its
            end.
        """
        model = self._model()
        if model is None or self._state is _State.KNOWN:
            return False
        if self._state is _State.NEW and called is not model and called in driver.names:
            # The loop calls the blocks one by one, and the saved bytes of one tell nothing of the others.
            self._state = _State.KNOWN
            driver.note("blocks are chosen by the structure of the model, since they are called one by one")
            if not self._names:
                driver.take_blocks(self.first_blocks())
        elif self._state is _State.NEW and self._waits_for_values(model, driver):
            return False
        elif self._state is _State.NEW:
            self._predict(model, driver, called, args, kwargs)
        elif self._state is _State.PREDICTED:
            self._check(driver)
        if self._state is _State.SCOUTING and (why := _why_no_hooks()) is not None:
            self._state = _State.KNOWN
            driver.notes.append(f"blocks are chosen by the structure of the model: {why}")
        if self._state is not _State.SCOUTING:
            return False
        self._scouting = Scouting(called, (args, kwargs), self._options, frame)
        return True

    def _waits_for_values(self, model: nn.Module, driver: _Fitted) -> bool:
        """Return whether to choose at the next call only, since lazy parameters get their values in this one.

        A parameter that no call gives values is waited for once. Ranks that plan together do not wait, since they agree
        on their blocks at the first call.
        """
        is_first, self._has_waited = not self._has_waited, True
        return is_first and driver.agreement is None and any(map(is_lazy, (*model.parameters(), *model.buffers())))

    def has_taken_call(self, driver: _Fitted, *, has_returned: bool) -> bool:
        """Return whether the call of the model that ends was a scouting call; if so, choose by its saved bytes.

        If forward has raised, the next call is another scouting call. There are not more than a few.
        """
        scouting, self._scouting = self._scouting, None
        model = self._model()
        if scouting is None or model is None:
            return False
        tree = scouting.end()
        self._tries += 1
        if not has_returned and self._tries < _MOST_TRIES:
            return True
        self._state = _State.KNOWN
        chosen = self._chosen(model, tree)
        if tuple(each.name for each in chosen) != self._names:
            driver.take_blocks(self._take(chosen))
        return True

    def agree(self, driver: _Fitted) -> None:
        """Take blocks that the structure gives, if ranks that plan together have chosen different ones."""
        model = self._model()
        if driver.agreement is None or self._has_agreed or model is None:
            return
        self._has_agreed = True
        number = zlib.crc32(repr(self._names).encode())
        largest, smallest = driver.agreement.largest(number, -number)
        if largest != -smallest:
            driver.notes.append("the ranks have chosen different blocks by their bytes: they take the repeated modules")
            self._state = _State.KNOWN
            driver.take_blocks(self.first_blocks())

    def _predict(self, model: nn.Module, driver: _Fitted, called: nn.Module, args: Any, kwargs: Any) -> None:
        from torchoffload._fit.choosing.dry_run import DryRunError, dry_run

        self._state = _State.PREDICTED
        try:
            tree = dry_run(computing(called), args, kwargs)
        except DryRunError as error:
            self._state = _State.SCOUTING if self._may_scout else _State.KNOWN
            then = "by a first step in which all moves" if self._may_scout else "by the structure of the model"
            reason = str(error).splitlines()[0]
            driver.note(f"blocks were chosen {then}, since a dry run of the model failed: {reason}")
            return
        chosen = self._chosen(model, tree)
        if tuple(each.name for each in chosen) != self._names:
            driver.take_blocks(self._take(chosen))
        self._predicted = _most_saved(tree, {each.module for each in chosen})

    def _chosen(self, model: nn.Module, tree: CallTree) -> list[Chosen]:
        """Return the blocks by a call's tree, and by structure those among the modules that were not called."""
        also = (find_blocks(model), innermost_blocks(model))
        modules = choose_blocks(tree, share_that_stays=self._share_that_stays, also=also).modules
        known = set(model.modules())
        found = [each for each in modules if isinstance(each, nn.Module) and each in known]
        if not found:
            return blocks_of(model, innermost_blocks(model))
        called = {call.module for call in _calls(tree)}
        inside = {module for each in found for module in each.modules()}
        others = [each for each in innermost_blocks(model) if each not in called | inside]
        return blocks_of(model, [*found, *(each for each in others if called.isdisjoint(each.modules()))])

    def _check(self, driver: _Fitted) -> None:
        """Have a scouting call, if calls of blocks save something else than a dry run has said.

        The first step of the survey shows it for most blocks, and the last one for all. A compiled block saves what its
        compiler chose, which no dry run knows, and is a whole in any case.
        """
        real: dict[nn.Module, int] = {}
        for module, nbytes in driver.saves:
            if has_compiled(module) or module not in self._predicted:  # or which has replaced another one
                continue
            real[module] = max(real.get(module, 0), nbytes)
        both = [(nbytes, self._predicted[module]) for module, nbytes in real.items()]
        difference = sum(abs(nbytes - predicted) for nbytes, predicted in both)
        is_right = difference <= _MOST_DIFFERENCE * sum(nbytes for nbytes, _ in both)
        if is_right and driver.is_surveyed:
            self._state = _State.KNOWN
        if not is_right:
            self._state = _State.SCOUTING if self._may_scout else _State.KNOWN
            what = "and so are chosen anew" if self._may_scout else "and cannot be chosen anew"
            driver.notes.append(f"blocks save other bytes than a dry run of the model has said, {what}")


def _calls(tree: CallTree) -> Iterator[ModuleCall]:
    waiting = [tree.root]
    while waiting:
        call = waiting.pop()
        yield call
        waiting += call.calls


def _most_saved(tree: CallTree, blocks: set[nn.Module]) -> "weakref.WeakKeyDictionary[nn.Module, int]":
    """Return the most bytes that a call of each block saves; 0 for blocks that are not called."""
    found = weakref.WeakKeyDictionary(dict.fromkeys(blocks, 0))
    for call in _calls(tree):
        if isinstance(call.module, nn.Module) and call.module in blocks:
            found[call.module] = max(found[call.module], tree.total_bytes(tree.saved_in(call)))
    return found
