"""The mode of a planned block's recomputation.

The recomputation follows what this very forward did, operator by operator, and not what was once recorded of the block.
The plan only says what to keep and what to leave out as long as forward does what was recorded. So the plan decides
what a step costs, and never what comes out of it.
"""

from typing import Any, Self

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from torchoffload._core import core
from torchoffload._fit.absent import AbsentTensors
from torchoffload._fit.agreement import wait_for
from torchoffload._fit.operators import (
    Kind,
    communicates,
    is_counted,
    is_functional,
    kind_of,
    tensors,
    waits,
    written,
)
from torchoffload._fit.replay import Argument, Call, Held, Mode

__all__ = ["Recomputation", "Run"]

_OTHER_WAY = (
    "torchoffload: the recomputation of a block called {found} where its forward had called {expected}, as operator "
    "{number} of the block. A block that is computed again has to do the same each time: it must not depend on state "
    "that changes between forward and backward. Leave it out of fit's blocks, or give fit recompute=False."
)


class Run:
    """One run of a recomputation.

    Attributes
    ----------
    number : int
        The number of the next counted operator.
    absent : AbsentTensors
        What was left out so far.
    inputs : set of int
        The addresses of the storages of the block's arguments.
    on_their_way : dict of int to tensor
        What functional collectives returned that the program has not waited for, by storage. PyTorch ends the
        recomputation as soon as all is there that backward needs, and so maybe before the program waits for these.
    checks_writes : bool
        Whether parameters or buffers of the block were written to since forward began, so that each operator has to
        look whether it reads what it read in forward.
    """

    def __init__(self, *, checks_writes: bool) -> None:
        self.number = 0
        self.absent = AbsentTensors()
        self.inputs: set[int] = set()
        self.checks_writes = checks_writes
        self.on_their_way: dict[int, torch.Tensor] = {}
        self._hooks: saved_tensors_hooks | None = None
        self._versions: dict[int, tuple[torch.Tensor, int]] = {}

    def keep_version(self, tensor: torch.Tensor) -> None:
        """Note the version of a tensor that is not written to again, which autograd raises all the same."""
        if not tensor.is_inference():
            self._versions.setdefault(id(tensor), (tensor, tensor._version))

    def restore_versions(self) -> None:
        """Give tensors that were not written to the versions that they had."""
        if self._versions:
            kept, versions = zip(*self._versions.values(), strict=True)
            torch._C._autograd._unsafe_set_version_counter(kept, versions)
            self._versions.clear()

    def begin(self) -> None:
        """Have what is absent made before autograd saves it."""
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)

        def make_and_pack(tensor: torch.Tensor) -> object:
            self.absent.make(tensor)
            return pack(tensor)

        self._hooks = saved_tensors_hooks(make_and_pack, unpack)
        self._hooks.__enter__()

    def end(self) -> None:
        """Pop the hooks, and forget everything: what autograd saved holds the hooks, and through them this object."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__(None, None, None)
        self.absent.clear()
        self.restore_versions()
        wait_for(list(self.on_their_way.values()))
        self.on_their_way.clear()

    def note_collective(self, operator: Any, output: Any) -> None:
        """Note what a collective returned, or that it was waited for."""
        for tensor in tensors(output) if is_functional(operator) else ():
            if waits(operator):
                self.on_their_way.pop(tensor.untyped_storage()._cdata, None)
            else:
                self.on_their_way[tensor.untyped_storage()._cdata] = tensor


class Recomputation(Mode):
    """The mode of a block's recomputation. It may be entered once for each backward, by any thread."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)

    def __enter__(self) -> Self:
        call = self._call
        if call.refusal is not None:
            raise RuntimeError(call.refusal)
        call.watch.begins_again()
        run = Run(checks_writes=call.state.has_changed)
        if call.layouts:
            run.begin()
        # The last one first, which is the order in which reloads run ahead.
        for packed in reversed(call.packed):
            packed.hold()
        call.runs.open.append(run)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._call.runs.open.pop().end()
        for packed in self._call.packed:
            packed.let_go()
        self._call.watch.ends_again()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        call = self._call
        run = call.runs.open[-1]
        absent = run.absent
        if absent.is_making:
            return func(*args, **keywords)
        run.restore_versions()
        if not is_counted(func, args, run.inputs):
            if kind_of(func) is not Kind.VIEW:
                absent.make((args, keywords))
            return func(*args, **keywords)
        number = self._next(run, func)
        if number in call.kept:
            return self._kept(run, number, func, args, keywords)
        if number in call.layouts:
            return absent.leave_out(call.layouts[number], func, args, keywords, may_run=number not in call.plan.final)
        if number in call.in_place:
            return absent.leave_out_in_place(func, args, keywords)
        if run.checks_writes:
            call.state.check_unchanged(number, (args, keywords))
        if call.watch.times_operators:
            return call.watch.timed(number, lambda: absent.run(func, args, keywords))
        output = absent.run(func, args, keywords)
        if communicates(func):
            run.note_collective(func, output)
        return output

    def _next(self, run: Run, operator: Any) -> int:
        """Count a call; RuntimeError if forward called another operator here."""
        number, operators = run.number, self._call.operators
        if number >= len(operators) or operators[number] is not operator:
            expected = operators[number] if number < len(operators) else "nothing more"
            raise RuntimeError(_OTHER_WAY.format(found=operator, expected=expected, number=number))
        run.number = number + 1
        return number

    def _kept(self, run: Run, number: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        absent = run.absent
        call, kept = self._call, self._call.kept[number]
        found = {id(leaf): leaf.get() for leaf in tree_leaves(kept) if isinstance(leaf, Held)}
        is_whole = all(tensor is not None for tensor in found.values())
        if number not in call.once:
            if not is_whole:
                return absent.run(func, args, kwargs)
            if call.left_at is not None and number in call.plan.draws:
                absent.run(func, args, kwargs)  # so that what is drawn after it, outside of the plan, is the same
        given = tree_leaves((args, kwargs))
        for target in tensors(written(func, args, kwargs)):
            run.keep_version(target)

        def restore(leaf: Any) -> Any:
            if isinstance(leaf, Argument):
                return given[leaf.number]
            if not isinstance(leaf, Held):
                return leaf
            tensor = found[id(leaf)]
            return core.absent_tensor(*leaf.layout) if tensor is None and leaf.layout is not None else tensor

        return tree_map(restore, kept)
