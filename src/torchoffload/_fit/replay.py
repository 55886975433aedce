"""What one call of a planned block did and keeps for its recomputation, and the mode that notes it in forward."""

import enum
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from torchoffload._checkpoint.saved_outputs import Kept, Packed, PackHook, alias
from torchoffload._core import core
from torchoffload._fit.effects import Containers
from torchoffload._fit.graph import BlockPlan
from torchoffload._fit.module_state import ModuleState
from torchoffload._fit.operators import (
    Kind,
    Layout,
    addresses,
    communicates,
    has_own_counter,
    is_counted,
    kind_of,
    made_by,
    makes_alone,
    scalars,
    takes_generator,
    writes_unseen,
    written,
)

if TYPE_CHECKING:
    from torchoffload._fit.recompute import Run
    from torchoffload._fit.record import BlockRecord

__all__ = ["Argument", "Call", "Forward", "Held", "Mode", "Watch"]

_FOREIGN_WRITE = (
    "torchoffload: {operator} in a planned block wrote to a tensor that is neither made in the block nor a parameter "
    "or buffer of it, which did not happen when the plan was made. The block cannot be computed again. Write to a new "
    "tensor, register the tensor as a buffer, or leave the block out of fit's blocks."
)
_NEW_COLLECTIVE = (
    "torchoffload: {operator} was called in a planned block, and was not when the plan was made. It is a collective: "
    "computed again, this rank would call it once more than others do. Leave the block out of fit's blocks, or give "
    "fit recompute=False."
)


@dataclass(frozen=True)
class Argument:
    """Stands for a tensor that an operator was given and returned: its number among the leaves of the arguments."""

    number: int


class _Counter:
    """The version counter of a tensor. It holds the memory of tensors of other classes only."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._alias = alias(tensor)
        self._version = self._alias._version
        if type(tensor) in {torch.Tensor, nn.Parameter}:
            self._alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # the counter stays

    @property
    def has_changed(self) -> bool:
        return self._alias._version != self._version


class Held:
    """One tensor that an operator returned, for the recomputation.

    Parameters
    ----------
    kept : Kept or Packed or None
        The tensor; None if nobody needs it.
    layout : Layout or None
        Its layout, if the operator must not run again. What was not kept, or was written to since, is absent then.
    """

    def __init__(self, kept: Kept | Packed | None, layout: Layout | None = None) -> None:
        self._kept = kept
        self.layout = layout
        self._others: list[_Counter] = []

    def watch(self, view: torch.Tensor) -> None:
        """Watch for writes through a view that has a version counter of its own. Its memory is not held."""
        self._others.append(_Counter(view))

    def get(self) -> torch.Tensor | None:
        """Return the tensor; None if it was not kept, or was written to since."""
        if self._kept is None or any(other.has_changed for other in self._others):
            return None
        return self._kept.get_unless_mutated()

    def give_up(self) -> Packed | None:
        """Hold the tensor no longer. Returns what was packed."""
        kept, self._kept = self._kept, None
        self._others.clear()
        return kept if isinstance(kept, Packed) else None


class Runs(threading.local):
    """The runs of a recomputation that are open on this thread, the innermost last."""

    def __init__(self) -> None:
        self.open: list[Run] = []


class Watch:
    """What one call of a block is to do, and who is told of it. This class tells nobody.

    Parameters
    ----------
    plan : BlockPlan or None
        The plan that the call follows; None if nothing is computed again.
    """

    records = False  # whether the call is recorded; then it follows no plan
    times_operators = False  # whether ``timed`` is called

    def __init__(self, plan: BlockPlan | None) -> None:
        self.plan = plan

    def recorded(self, record: "BlockRecord") -> None:
        """Tell that forward has returned, and what it did."""

    def ended(self) -> None:
        """Tell that forward has returned."""

    def left_plan(self) -> None:
        """Tell that forward called another operator than planned."""

    def begins_again(self) -> None:
        """Tell that the recomputation begins."""

    def ends_again(self) -> None:
        """Tell that the recomputation has ended."""

    def timed(self, _number: int, run: Callable[[], Any]) -> Any:
        """Run the operator of this number in the recomputation, and return its result."""
        return run()


class Call:
    """What one call of a planned block did, and what it keeps for its recomputation.

    Parameters
    ----------
    module : nn.Module
        The block.
    plan : BlockPlan
        The plan that the call follows.
    pack : callable or None
        The pack hook of the context that moves what the plan says; None if nothing moves.
    arguments : tuple
        The positional and the keyword arguments of the call.
    watch : Watch
        Who is told what the call does.

    Attributes
    ----------
    operators : list
        The counted operators that forward called.
    left_at : int or None
        The number of the first operator that was another one than planned; None while there is none.
    kept : dict of int to Any
        What operators returned, with a Held or an Argument in the place of each tensor.
    layouts : dict of int to Any
        For operators that are left out, what they returned with a Layout in the place of each tensor.
    in_place : set of int
        Operators that are left out, and that wrote to their first argument and returned it.
    once : set of int
        Operators that must not run again, because they wrote to a parameter or buffer or were given a generator.
    refusal : str or None
        Why the call cannot be computed again.
    made : set of int
        The addresses of the storages that operators of this call made.
    unnoted : list of tuple
        What was written to in the module and has new versions that were not noted yet.
    """

    def __init__(self, module: nn.Module, plan: BlockPlan, pack: PackHook | None, arguments: Any, watch: Watch) -> None:
        self.plan = plan
        self.watch = watch
        self.state = ModuleState(module)
        self.effects = Containers(module, arguments)
        self.inputs = addresses(tree_leaves(arguments))
        self.operators: list[Any] = []
        self.left_at: int | None = None
        self.kept: dict[int, Any] = {}
        self.layouts: dict[int, Any] = {}
        self.in_place: set[int] = set()
        self.once: set[int] = set()
        self.refusal: str | None = None
        self.packed: list[Packed] = []  # in the order of forward
        self.runs = Runs()
        self.made: set[int] = set()
        self.unnoted = self.state.unnoted
        self._pack = pack
        self._holders: defaultdict[int, list[tuple[int, Held]]] = defaultdict(list)  # by storage

    def note_uncounted(self, operator: Any, output: Any, arguments: Any) -> None:
        """Note an operator that has no number."""
        if kind_of(operator) is not Kind.VIEW:
            self.made |= made_by(operator, output, arguments)
        elif has_own_counter(operator) and self._holders:
            for leaf in tree_leaves(output):
                for storage in addresses(leaf) & self._holders.keys():
                    for _, held in self._holders[storage]:
                        held.watch(leaf)

    def note(self, operator: Any, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the next counted operator of forward."""
        number, arguments = len(self.operators), (args, kwargs)
        self.operators.append(operator)
        if self.left_at is None and not self._is_planned(number, operator, arguments):
            self.left_at = number
            self.watch.left_plan()
        targets = written(operator, args, kwargs)
        outside: set[int] = set()
        self.made |= made_by(operator, output, arguments)
        self.state.note_versions()
        if targets:
            storages = addresses(targets)
            self._drop(storages)
            outside = storages - self.made
            if not all(map(self.state.owns, outside)):
                self.refusal = _FOREIGN_WRITE.format(operator=operator)
            self.state.wrote(number, targets)
        is_planned = self.left_at is None
        is_new = communicates(operator) and operator not in self.plan.operators
        if is_new and writes_unseen(operator):
            self.refusal = _NEW_COLLECTIVE.format(operator=operator)
        if outside or is_new or takes_generator(operator, arguments):
            self.once.add(number)
            needs = not (is_planned and number in self.plan.skipped)
            self._keep(number, output, arguments, needs=needs)
        elif is_planned and (number in self.plan.kept or number in self.plan.skipped & self.plan.final):
            self._keep(number, output, ())  # one that is final could not be made after all, if anything asked for it
        elif is_planned and number in self.plan.skipped:
            self._leave_out(number, output, args, kwargs, targets)

    def _is_planned(self, number: int, operator: Any, arguments: Any) -> bool:
        plan = self.plan
        if number >= len(plan.operators) or plan.operators[number] is not operator:
            return False
        return number not in plan.scalars or plan.scalars[number] == scalars(operator, arguments)

    def _keep(self, number: int, output: Any, arguments: Any, *, needs: bool = True) -> None:
        """Keep what an operator returned; of one that must not run again, also what it was given and returned."""
        leaves = tree_leaves(output)
        if any(isinstance(leaf, torch.Tensor) and leaf.is_inference() for leaf in leaves) and number not in self.once:
            return  # it has no version, so that a write to it would not be noticed
        given = {id(leaf): index for index, leaf in enumerate(tree_leaves(arguments)) if isinstance(leaf, torch.Tensor)}
        # What a collective returns may be on its way still, where a copy would not wait for it.
        moves = self._pack is not None and number in self.plan.moved and not communicates(self.operators[number])

        def keep(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) in given:
                return Argument(given[id(leaf)])
            layout = Layout.of(leaf) if number in self.once else None
            held = Held(self._hold(leaf, number, moves) if needs or layout is None else None, layout)
            for storage in addresses(leaf):
                self._holders[storage].append((number, held))
            return held

        self.kept[number] = tree_map(keep, output)

    def _hold(self, tensor: torch.Tensor, number: int, moves: bool) -> Kept | Packed:
        if not moves or self._pack is None:
            return Kept(tensor, may_change=tensor.is_inference())
        self.packed.append(Packed(tensor, self._pack, self.operators[number]))
        return self.packed[-1]

    def _leave_out(
        self, number: int, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any], targets: list[Any]
    ) -> None:
        if not targets and (layouts := _layouts(output, (args, kwargs))) is not None:
            self.layouts[number] = layouts
        elif len(targets) == 1 and targets[0] is args[0] is output:
            self.in_place.add(number)

    def _drop(self, storages: set[int]) -> None:
        """Forget what was kept of storages that are written to: the operators that made it run again, and the write."""
        for storage in storages & self._holders.keys():
            for number, held in self._holders.pop(storage):
                if (packed := held.give_up()) is not None:
                    self.packed.remove(packed)
                if number not in self.once:
                    self.kept.pop(number, None)


def _layouts(output: Any, arguments: Any) -> Any | None:
    """Return ``output`` with a Layout in the place of each tensor; None if the operator has to run."""
    used = addresses(arguments)
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            if Layout.of(leaf) is None or leaf.is_inference() or leaf.untyped_storage()._cdata in used:
                return None
            used.add(leaf.untyped_storage()._cdata)
    return tree_map(lambda leaf: Layout.of(leaf) if isinstance(leaf, torch.Tensor) else leaf, output)


class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode of a planned block."""

    # As in PyTorch's own modes for checkpoints: an operator that runs a graph is seen as one operator, and a compiled
    # region stays compiled.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled regions compiled."""
        return True

    def __init__(self, call: Call) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call = call


class Forward(Mode):  # type: ignore[no-untyped-call]
    """The mode of a block's forward: notes its operators, and keeps what the plan says.

    It is called for each operator, many of which take the device less time than Python needs for a function. So its
    ``__torch_dispatch__`` is the core's, which calls ``_note`` for those alone that the plan says something about, and
    for those that may write.
    """

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._notes: object = core.forward_notes(call, call.plan.operators, call.plan.special, _classify, _note)

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        # What the notes hold is unknown to the garbage collector, and an exception of the block's may hold this mode.
        self._notes = None


# Here and not in the class, where PyTorch would put a function in Python around it that keeps torch.compile away. The
# core does that itself.
Forward.__torch_dispatch__ = core.forward_dispatch  # type: ignore[method-assign]


class _Noting(enum.IntEnum):
    """How an operator is noted; the core's ``Noting``."""

    NEVER = 0
    SIMPLE = 1
    FULL = 2


def _classify(operator: Any) -> tuple[Any, int]:
    """Return what to call in the place of an operator, and how it is noted."""
    called = operator._op if type(operator) is torch._ops.OpOverload else operator  # what it would call itself
    if kind_of(operator) is Kind.VIEW and not has_own_counter(operator):
        return called, _Noting.NEVER
    return called, _Noting.SIMPLE if makes_alone(operator) else _Noting.FULL


def _note(call: Call, operator: Any, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if is_counted(operator, args, call.inputs):
        call.note(operator, output, args, kwargs)
    else:
        call.note_uncounted(operator, output, (args, kwargs))
