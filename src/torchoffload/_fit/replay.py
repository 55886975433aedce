"""The two modes of a planned block: one for its forward, one for its recomputation in backward.

The recomputation follows what this very forward did, operator by operator, and not what was once recorded of the block.
The plan only says what to keep and what to leave out as long as forward does what was recorded. So the plan decides
what a step costs, and never what comes out of it.
"""

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from torchoffload._checkpoint.saved_outputs import Kept, Packed, PackHook
from torchoffload._core import core
from torchoffload._fit.graph import BlockPlan
from torchoffload._fit.operators import Kind, Layout, is_counted, kind_of, storages, written

__all__ = ["Call", "Forward", "Recomputation"]

_OTHER_WAY = (
    "torchoffload: the recomputation of a block called {found} where its forward had called {expected}, as operator "
    "{number} of the block. A block that is computed again has to do the same each time: it must not depend on state "
    "that changes between forward and backward. Mark it with recompute=False."
)
_CHANGED = (
    "torchoffload: the output of {operator} in a planned block was written to after the block had returned it, and it "
    "cannot be computed again, because it draws random numbers or writes to a buffer. Clone the block's output before "
    "writing to it."
)

_ABOVE_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
for _name in ("AutocastCPU", "AutocastCUDA", "AutocastXPU", "AutocastHPU", "AutocastMPS", "AutocastPrivateUse1"):
    if hasattr(torch._C.DispatchKey, _name):
        _ABOVE_KERNELS = _ABOVE_KERNELS.add(getattr(torch._C.DispatchKey, _name))


class Call:
    """What one call of a planned block did, and what it keeps for its recomputation.

    Attributes
    ----------
    plan : BlockPlan
        The plan that the call follows.
    pack : callable or None
        The pack hook of the context that moves what the plan says; None if nothing moves.
    operators : list
        The counted operators that forward called.
    left_at : int or None
        The number of the first operator that was another one than planned; None while there is none.
    kept : dict of int to Any
        What operators returned, with a Kept or a Packed in the place of each tensor.
    layouts : dict of int to Any
        For operators that are left out, what they returned with a Layout in the place of each tensor.
    in_place : set of int
        Operators that are left out, and that wrote to their first argument and returned it.
    """

    def __init__(self, plan: BlockPlan, pack: PackHook | None) -> None:
        self.plan = plan
        self.pack = pack
        self.packed: list[Packed] = []  # in the order of forward
        self.operators: list[Any] = []
        self.left_at: int | None = None
        self.kept: dict[int, Any] = {}
        self.layouts: dict[int, Any] = {}
        self.in_place: set[int] = set()

    def note(self, operator: Any, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the next counted operator of forward."""
        number = len(self.operators)
        self.operators.append(operator)
        if self.left_at is not None:
            return
        plan = self.plan
        if number >= len(plan.operators) or plan.operators[number] is not operator:
            self.left_at = number
        elif number in plan.kept:
            pack = self.pack if number in plan.moved else None
            self.kept[number] = tree_map(lambda leaf: self._keep(leaf, pack), output)
        elif number in plan.skipped:
            targets = written(operator, args, kwargs)
            if not targets and (layouts := _layouts(output, (args, kwargs))) is not None:
                self.layouts[number] = layouts
            elif len(targets) == 1 and targets[0] is args[0] is output:
                self.in_place.add(number)

    def _keep(self, leaf: Any, pack: PackHook | None) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if pack is None:
            return Kept(leaf, may_change=False)
        self.packed.append(Packed(leaf, pack))
        return self.packed[-1]

    def follows_plan(self, number: int) -> bool:
        """Return whether forward did what was planned up to the operator of this number."""
        return self.left_at is None or number < self.left_at


def _layouts(output: Any, arguments: Any) -> Any | None:
    """Return ``output`` with a Layout in the place of each tensor; None if the operator has to run."""
    used = {storage._cdata for storage in storages(arguments)}
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            if Layout.of(leaf) is None or leaf.untyped_storage()._cdata in used:
                return None
            used.add(leaf.untyped_storage()._cdata)
    return tree_map(lambda leaf: Layout.of(leaf) if isinstance(leaf, torch.Tensor) else leaf, output)


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    # As in PyTorch's own modes for checkpoints: an operator that runs a graph is seen as one operator, and a compiled
    # region stays compiled.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, call: Call) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call = call


class Forward(_Mode):  # type: ignore[no-untyped-call]
    """The mode of a block's forward: notes its operators, and keeps what the plan says."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if is_counted(func, args):
            self._call.note(func, output, args, kwargs or {})
        return output


class _Run:
    """One run of a recomputation."""

    def __init__(self) -> None:
        self.number = 0  # of the next counted operator
        self.absent = _AbsentTensors()
        self.hooks: saved_tensors_hooks | None = None


class _Runs(threading.local):
    def __init__(self) -> None:
        self.open: list[_Run] = []


class Recomputation(_Mode):  # type: ignore[no-untyped-call]
    """The mode of a block's recomputation. It may be entered once for each backward, by any thread."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._runs = _Runs()

    def __enter__(self) -> Self:
        run = _Run()
        if self._call.layouts:
            pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)

            def make_and_pack(tensor: torch.Tensor) -> object:
                run.absent.make(tensor)
                return pack(tensor)

            run.hooks = saved_tensors_hooks(make_and_pack, unpack)
            run.hooks.__enter__()
        # The last one first, which is the order in which reloads run ahead.
        for packed in reversed(self._call.packed):
            packed.hold()
        self._runs.open.append(run)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        run = self._runs.open.pop()
        for packed in self._call.packed:
            packed.let_go()
        if run.hooks is not None:
            run.hooks.__exit__(*exception)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        run, call = self._runs.open[-1], self._call
        absent = run.absent
        if absent.is_making:
            return func(*args, **keywords)
        if not is_counted(func, args):
            if kind_of(func) is not Kind.VIEW:
                absent.make((args, keywords))
            return func(*args, **keywords)
        number = self._next(run, func)
        if number in call.kept:
            return self._kept(absent, number, func, args, keywords)
        if number in call.layouts:
            return absent.leave_out(call.layouts[number], func, args, keywords)
        if number in call.in_place:
            return absent.leave_out_in_place(func, args, keywords)
        if number in call.plan.passed and call.follows_plan(number):
            return args[0]
        return absent.run(func, args, keywords)

    def _next(self, run: _Run, operator: Any) -> int:
        """Count a call; RuntimeError if forward called another operator here."""
        number, operators = run.number, self._call.operators
        if number >= len(operators) or operators[number] is not operator:
            expected = operators[number] if number < len(operators) else "nothing more"
            raise RuntimeError(_OTHER_WAY.format(found=operator, expected=expected, number=number))
        run.number = number + 1
        return number

    def _kept(
        self, absent: "_AbsentTensors", number: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        call, plan = self._call, self._call.plan
        kept = call.kept[number]
        tensors = {
            id(leaf): leaf.get_unless_mutated() for leaf in tree_leaves(kept) if isinstance(leaf, (Kept, Packed))
        }
        if any(tensor is None for tensor in tensors.values()):
            if number in plan.draws or number in plan.effects:
                raise RuntimeError(_CHANGED.format(operator=func))
            return absent.run(func, args, kwargs)
        if call.left_at is not None and number in plan.draws:
            absent.run(func, args, kwargs)  # so that what is drawn after it, outside of the plan, is the same
        return tree_map(lambda leaf: tensors.get(id(leaf), leaf), kept)


class _AbsentTensors:
    """The outputs that a recomputation has left out so far, and how to make each of them after all."""

    def __init__(self) -> None:
        self.is_making = False
        self._thunks: dict[int, list[Callable[[], None]]] = {}  # by storage
        self._readers: defaultdict[int, set[int]] = defaultdict(set)  # storages whose thunks read this one
        self._held: list[torch.Tensor] = []  # so that no address comes to mean another storage

    def leave_out(self, layouts: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what an operator would return, without values."""
        absent: list[torch.Tensor] = []

        def make(leaf: Any) -> Any:
            if not isinstance(leaf, Layout):
                return leaf
            absent.append(core.absent_tensor(*leaf))
            return absent[-1]

        output = tree_map(make, layouts, is_leaf=lambda leaf: isinstance(leaf, Layout))

        is_made = False

        def run() -> None:
            nonlocal is_made
            if is_made:
                return
            is_made = True
            self.make((args, kwargs))
            made = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
            for target, value in zip(absent, made, strict=True):
                core.give_memory(target)
                target.copy_(value)

        for tensor in absent:
            self._add_thunk(tensor, run, (args, kwargs))
        return output

    def leave_out_in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Leave out an operator that writes to its first argument, if that is absent and nobody has read it yet."""
        storage = args[0].untyped_storage()._cdata
        if storage not in self._thunks or self._readers.get(storage):
            return self.run(func, args, kwargs)

        def run() -> None:
            self.make((args[1:], kwargs))
            func(*args, **kwargs)

        self._add_thunk(args[0], run, (args[1:], kwargs))
        return args[0]

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on arguments that all have values."""
        for target in written(func, args, kwargs):
            for storage in storages(target):
                self._make_readers(storage._cdata)  # they read what it is now
        self.make((args, kwargs))
        return func(*args, **kwargs)

    def make(self, value: Any) -> None:
        """Make the tensors in ``value`` that are absent."""
        if self._thunks:
            for storage in storages(value):
                self._make(storage._cdata)

    def _add_thunk(self, tensor: torch.Tensor, run: Callable[[], None], arguments: Any) -> None:
        storage = tensor.untyped_storage()._cdata
        self._thunks.setdefault(storage, []).append(run)
        self._held.append(tensor)
        for read in storages(arguments):
            self._readers[read._cdata].add(storage)

    def _make(self, storage: int) -> None:
        thunks = self._thunks.pop(storage, None)
        if thunks is None:
            return
        with self._making():
            for thunk in thunks:
                thunk()

    def _make_readers(self, storage: int) -> None:
        for reader in self._readers.pop(storage, ()):
            self._make(reader)

    @contextlib.contextmanager
    def _making(self) -> Iterator[None]:
        """Operators run as they did below autograd and autocast, and are not counted."""
        was_making, self.is_making = self.is_making, True
        try:
            with torch.no_grad(), torch._C._ExcludeDispatchKeyGuard(_ABOVE_KERNELS):
                yield
        finally:
            self.is_making = was_making
