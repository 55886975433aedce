"""offload_modules: offloading only what is saved inside chosen modules of a model, by hooks on their forwards.

The hooks are functions of this module and not closures, so that they are copied and pickled together with the model.
What a hook has to do is looked up by the module that is called. A copy of the module is not found there, so its hooks
do nothing.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Self, Unpack

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from torchoffload._contexts.accelerator import require_accelerator
from torchoffload._contexts.disabling import is_disabled
from torchoffload._contexts.heads import find_heads
from torchoffload._contexts.keywords import ContextKeywords
from torchoffload._contexts.offload_activations import OffloadActivations
from torchoffload._contexts.options import OffloadOptions, check_bool, described, short
from torchoffload._core import core
from torchoffload._modules.selection import Chosen, Selector, choose, compiled_with_more, without_last
from torchoffload._observe.module_stats import COMPILE_FIRST, ModuleStats, note_source
from torchoffload._pytorch import hook_stack
from torchoffload._pytorch.hook_stack import Role
from torchoffload._pytorch.module_hooks import remove_forward_hooks
from torchoffload._pytorch.tensor_subclasses import plain_tensors
from torchoffload._pytorch.tracing import is_not_traced
from torchoffload._warnings import warn_user

__all__ = ["OffloadedModules", "offload_modules"]

_noop_hooks = saved_tensors_hooks(core.noop_pack, core.unpack)
_lock = threading.RLock()


class _Offloading:
    """What one call of offload_modules set up: a context, and the calls of the model that are open under it.

    It lives as long as its handle, or any module that it has hooks on.
    """

    def __init__(self, model: nn.Module, chosen: list[Chosen], only_inputs: bool, manager: OffloadActivations) -> None:
        self.model_name = type(model).__name__
        self.names = names = tuple(each.name for each in chosen)
        self._model = weakref.ref(model)
        self._chosen = [(each.name, weakref.ref(each.module)) for each in chosen]
        self._was_looked_at = False
        self.only_inputs = only_inputs
        self.manager = manager
        self.context = manager._context
        self.context.set_module(len(names))  # so that the core has a row of counts for each module
        self.context.set_module(0)
        self.hooks = saved_tensors_hooks(self.context.pack, core.unpack)
        self.calls = 0  # since reset_stats()
        self.open_calls = 0  # on all threads
        self._on_thread = threading.local()

    @property
    def is_open(self) -> bool:
        """Whether a call is open on this thread."""
        return getattr(self._on_thread, "is_open", False)

    def open(self) -> Callable[[], None]:
        """Begin a call of the model on this thread, with a tape of its own; return the function that ends the call."""
        self.warn_of_compiled()
        self.manager._open()
        self._on_thread.is_open = True
        with _lock:
            self.calls += 1
            self.open_calls += 1
        return self._close

    def _close(self) -> None:
        self._on_thread.is_open = False
        with _lock:
            self.open_calls -= 1
        self.context.exit()

    def warn_of_compiled(self) -> None:
        """Warn of modules inside of compiled regions, where hooks are traced away.

        It looks when the hooks are installed and, if there are no such modules then, once more at the first call.
        """
        model = self._model()
        if self._was_looked_at or model is None:
            return
        chosen = [Chosen(name, module) for name, ref in self._chosen if (module := ref()) is not None]
        traced = compiled_with_more(model, chosen)
        self._was_looked_at = bool(traced) or self.calls > 0
        if traced:
            warn_user(
                f"torchoffload: {len(traced)} of {len(chosen)} chosen modules, such as {traced[0]!r}, are part of a "
                "region of torch.compile, which has no place for their hooks: nothing of them is moved. "
                f"{COMPILE_FIRST}"
            )

    def call_counts(self) -> dict[str, int]:
        """Return how often the hooks of each chosen module saw a call since ``reset_stats()``; empty once removed."""
        owners = {name: _owners.get(module) for name, ref in self._chosen if (module := ref()) is not None}
        return {name: owner.calls for name, owner in owners.items() if owner is not None and owner.has(self)}

    def stats(self) -> tuple[ModuleStats, ...]:
        rows = core.module_rows(self.context)[1:]  # the first row counts what is saved outside of all chosen modules
        return tuple(ModuleStats(name=name, **row) for name, row in zip(self.names, rows, strict=True))

    def forget(self) -> None:
        self.calls = 0
        for _, ref in self._chosen:
            module = ref()
            if module is not None and module in _owners:
                _owners[module].calls = 0
        self.context.forget_modules()


@dataclass(frozen=True, eq=False)
class _Part:
    """The part that one module has in one call of offload_modules.

    Attributes
    ----------
    offloading : _Offloading
        What that call set up.
    number : int
        The number of the module among the chosen ones, from 1. 0 for the model, if it is not chosen itself, and for a
        head.
    is_head : bool
        Whether the module is an output head, whose saved tensors stay.
    """

    offloading: _Offloading
    number: int = 0
    is_head: bool = False

    def begin(
        self, top: Callable[..., Any] | None, inputs: tuple[Any, Any], undo: list[Callable[[], object]]
    ) -> saved_tensors_hooks | None:
        """Begin a call of the module.

        Parameters
        ----------
        top : callable or None
            The pack hook in force.
        inputs : tuple
            The positional and the keyword arguments of the call.
        undo : list of callable
            Functions to call, the last one first, when the call has ended and its hooks were popped. Added to.

        Returns
        -------
        saved_tensors_hooks or None
            The hooks to push for the call.
        """
        offloading = self.offloading
        receiver = getattr(top, "__self__", None)
        if self.is_head:
            return _noop_hooks if receiver is offloading.context else None
        has_gradients = torch.is_grad_enabled()
        is_first = not offloading.is_open
        if is_first:
            if not has_gradients or is_disabled():
                return None
            undo.append(offloading.open())
        if self.number:
            undo.append(partial(offloading.context.set_module, offloading.context.set_module(self.number)))
            if offloading.only_inputs:  # also without gradients, as in the forward of a reentrant checkpoint
                for tensor in _tensors(inputs):
                    offloading.context.admit(tensor)
        # What goes to the hooks of others must go on doing so: a checkpoint counts what it gets, and a NoOpManager was
        # entered on purpose.
        may_push = top is None or (isinstance(receiver, core.Context) and receiver is not offloading.context)
        wants = is_first if offloading.only_inputs else self.number > 0
        is_possible = has_gradients and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        return offloading.hooks if wants and may_push and is_possible else None


class _Owner:
    """The parts that one module has. It owns the entries in ``hook_stack`` that calls of the module make."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.calls = 0  # how many calls the hooks saw since reset_stats(), with gradients or without

    def has(self, offloading: _Offloading) -> bool:
        return any(part.offloading is offloading for part in self.parts)

    def enter(self, inputs: tuple[Any, Any], frame: FrameType) -> None:
        if not torch.is_grad_enabled() and hook_stack.innermost() is None:
            return  # nothing is saved, for example in generate()
        hook_stack.drop_ended()
        undo: list[Callable[[], object]] = []
        hooks = None
        if torch._C._current_graph_task_id() == -1:  # in backward, what a checkpoint computes again stays
            top = hook_stack.top_pack_hook()
            try:
                for part in self.parts:
                    hooks = part.begin(top, inputs, undo) or hooks
            except BaseException:
                _run_last_first(undo)
                raise
        innermost = hook_stack.innermost()
        calls_itself = innermost is not None and innermost.owner is self
        if hooks is not None or undo or calls_itself:
            hook_stack.push(self, Role.MODULE, hooks, frame, partial(_run_last_first, undo))


_owners: "weakref.WeakKeyDictionary[nn.Module, _Owner]" = weakref.WeakKeyDictionary()


def _run_last_first(undo: list[Callable[[], object]]) -> None:
    while undo:
        undo.pop()()


def _tensors(inputs: object) -> Iterator[torch.Tensor]:
    if isinstance(inputs, torch.Tensor):
        yield from plain_tensors(inputs)
    elif isinstance(inputs, (tuple, list)):
        for each in inputs:
            yield from _tensors(each)
    elif isinstance(inputs, dict):
        yield from _tensors(list(inputs.values()))


def _enter(module: nn.Module, args: Any, kwargs: Any) -> None:
    # A compiled region saves its tensors after its whole forward, when this hook is over. So it must not be traced.
    if torch.compiler.is_compiling():
        return
    owner = _owners.get(module)
    if owner is None:
        return  # the module is a copy
    if owner.parts:
        owner.calls += 1
        owner.enter((args, kwargs), sys._getframe(1))
    else:
        remove_forward_hooks(module, _enter, _leave)  # offloading was removed in the middle of a call


def _leave(module: nn.Module, _args: Any, _output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    owner = _owners.get(module)
    if owner is not None:
        hook_stack.leave(owner)


def _install(parts: list[tuple[nn.Module, _Part]]) -> None:
    with _lock:
        for module, part in parts:
            owner = _owners.get(module)
            if part.number and owner is not None and any(known.number for known in owner.parts):
                name = part.offloading.names[part.number - 1]
                raise ValueError(
                    f"{name!r} is offloaded already, by an earlier call of offload_modules: remove() what that "
                    "returned, or choose other modules"
                )
        for module, part in parts:
            owner = _owners.setdefault(module, _Owner())
            if not owner.parts:
                remove_forward_hooks(module, _enter, _leave)
                # Our pre-hook runs last, so that it sees the inputs as other hooks leave them; our forward hook runs
                # first. So what other hooks save does not count as saved inside the module.
                module.register_forward_pre_hook(_enter, with_kwargs=True)
                module.register_forward_hook(_leave, prepend=True, always_call=True)
            owner.parts.append(part)


class OffloadedModules:
    """The handle that ``offload_modules`` returns: the chosen modules, what they moved, and how to undo it.

    Dropping the handle changes nothing: offloading goes on. Used as a context manager, it removes the hooks at the end
    of the block.

    Attributes
    ----------
    names : tuple of str
        The names of the modules whose saved tensors move.
    options : OffloadOptions
        The options of the context, checked.
    """

    def __init__(self, offloading: _Offloading) -> None:
        self._offloading = offloading
        self.names = offloading.names
        self.options: OffloadOptions = offloading.manager.options

    def stats(self) -> tuple[ModuleStats, ...]:
        """Return what each module moved and kept since ``reset_stats()``.

        Returns
        -------
        tuple of ModuleStats
            One for each of ``names``, in that order.
        """
        return self._offloading.stats()

    def remove(self) -> None:
        """Remove the hooks from the model.

        Autograd graphs that are alive stay valid, and calls that are under way still move what they save.
        """
        with _lock:
            for module, owner in list(_owners.items()):
                if not owner.has(self._offloading):
                    continue
                owner.parts = [part for part in owner.parts if part.offloading is not self._offloading]
                # In the middle of a call the forward hooks are still needed. Then the next call removes them.
                if not owner.parts and not self._offloading.open_calls:
                    remove_forward_hooks(module, _enter, _leave)
                    del _owners[module]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()

    def __repr__(self) -> str:
        shown = ", ".join(self.names[:4]) + (", ..." if len(self.names) > 4 else "")
        return f"{type(self).__name__}({len(self.names)} of {self._offloading.model_name}: {shown})"


def _check_fraction(fraction: object) -> None:
    allowed = "fraction must be a number above 0 and at most 1, or None for all"
    if fraction is None:
        return
    if not isinstance(fraction, (int, float)) or isinstance(fraction, bool):
        raise TypeError(f"{allowed}, got {described(fraction)}")
    if not 0 < fraction <= 1:
        raise ValueError(f"{allowed}, got {short(fraction)}")


def _parts(model: nn.Module, chosen: list[Chosen], offloading: _Offloading) -> list[tuple[nn.Module, _Part]]:
    numbers = {each.module: number for number, each in enumerate(chosen, start=1)}
    inside = {module for each in chosen for module in each.module.modules()}
    parts = [(module, _Part(offloading, number)) for module, number in numbers.items()]
    if model not in numbers:
        parts.append((model, _Part(offloading)))
    # A tied head of torchtune is not a module of the model.
    inside |= set(find_heads(model)) - set(model.modules())
    heads = [head for head in dict.fromkeys(find_heads(model)) if head in inside and head not in numbers]
    return parts + [(head, _Part(offloading, is_head=True)) for head in heads]


@is_not_traced
def offload_modules(
    model: nn.Module,
    modules: Selector | Sequence[Selector],
    *,
    fraction: float | None = None,
    keep_last: int | None = None,
    only_inputs: bool = False,
    **options: Unpack[ContextKeywords],
) -> OffloadedModules:
    """Move what is saved inside chosen modules of ``model``, whenever ``model`` is called with gradients enabled.

    Parameters
    ----------
    model : torch.nn.Module
        The module that the training loop calls. Each call of it is one tape, and so is a call of a chosen module
        outside of such a call.
    modules : str, type, torch.nn.Module, callable, or sequence of these
        Which modules. A str is a name (``"layers.0.attention"``) or a glob of names (``"layers.*.attention"``), in
        which ``**`` stands for any number of levels. A type stands for all modules of that class. A callable takes a
        name and a module, and returns whether the module is meant. Names leave out wrappers around modules. A
        ``ModuleList`` stands for the modules in it.
    fraction : float, optional
        Move at most this part of the bytes that could move, above 0 and at most 1, beginning with those that are saved
        first. The total is known from the call before, so the first call moves everything. Default: all.
    keep_last : int, optional
        Leave out this many of the chosen modules at the end of the model, with which backward begins. Default: none.
    only_inputs : bool, default False
        Move only the inputs of the chosen modules. That is what a checkpointed block holds until it is computed again.
    **options
        The keyword options of ``OffloadActivations``, except ``model``.

    Returns
    -------
    OffloadedModules
        A handle. Its ``remove()`` undoes everything, and its ``stats()`` returns what each module moved.

    Raises
    ------
    TypeError
        An argument has a wrong type, or an option is unknown.
    ValueError
        No module matches, a module is given twice or is offloaded already, or a number is out of its range.
    FileNotFoundError, NotADirectoryError, PermissionError
        ``disk_dir`` cannot be used, as for ``OffloadActivations``.
    RuntimeError
        ``tier="host"`` on a machine without an accelerator. The model itself may still be on the CPU.

    Notes
    -----
    The output head inside a chosen module is exempt, unless it is chosen itself. Modules inside a region of
    ``torch.compile`` cannot be told apart, so compile first and then choose what ``torch.compile`` returned. For a
    module that ``module.compile()`` compiled in place, choose a module that contains it.

    Examples
    --------
    >>> handle = torchoffload.offload_modules(model, "model.layers.*.self_attn")
    >>> train(model)
    >>> print(torchoffload.report())
    >>> handle.remove()
    """
    _check_fraction(fraction)
    check_bool("only_inputs", only_inputs)
    chosen = without_last(choose(model, modules), keep_last)
    manager = OffloadActivations(model=model, **options)
    require_accelerator(manager.options.tier, "offload_modules")
    manager._context.restrict(1.0 if fraction is None else float(fraction), only_inputs)
    offloading = _Offloading(model, chosen, only_inputs, manager)
    _install(_parts(model, chosen, offloading))
    note_source(offloading)
    offloading.warn_of_compiled()
    return OffloadedModules(offloading)
