"""fit: the step that takes the least time in the memory there is."""

import os
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

import torch
from torch import distributed as dist
from torch import nn

from torchoffload._contexts.accelerator import require_accelerator
from torchoffload._contexts.amounts import Amount, parse_amount
from torchoffload._contexts.disabling import is_disabled
from torchoffload._contexts.keywords import MovingKeywords
from torchoffload._contexts.options import check_module
from torchoffload._contexts.signatures import shows_options
from torchoffload._devices import Meter, meter_for
from torchoffload._fit.choosing.chooser import Chooser
from torchoffload._fit.choosing.named_blocks import blocks_named, blocks_of
from torchoffload._fit.machine.allocator import prepare_allocator
from torchoffload._fit.machine.operators import unique_bytes
from torchoffload._fit.model.compiled_model import CompiledModel, recompilable
from torchoffload._fit.model.describe import FrontierPoint, describe, frontier, plot
from torchoffload._fit.model.driver import Driver
from torchoffload._fit.model.model_calls import ModelCalls
from torchoffload._fit.model.options import DEFAULT_MARGIN, FitOptions
from torchoffload._fit.model.phase import Phase
from torchoffload._fit.model.plan_file import SavedPlan, read_plan, write_plan
from torchoffload._fit.plan.budget import Budget
from torchoffload._fit.plan.fit_plan import FitPlan
from torchoffload._fit.plan.step import StepPlan
from torchoffload._modules.selection import Selector
from torchoffload._observe.idle import advise_if_idle
from torchoffload._observe.module_stats import idle_modules_advice
from torchoffload._observe.units import human_bytes
from torchoffload._pytorch.recompiling import CompileArguments
from torchoffload._pytorch.tracing import is_not_traced

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["FitPlan", "Fitted", "fit", "fit_with"]

_MOST_BARE = 1 << 20  # a number below that was meant in another unit than bytes
_OFF = (
    "torchoffload.fit has changed nothing: TORCHOFFLOAD_DISABLE=1 was set in the environment when it was called. Unset "
    "it and call torchoffload.fit() again."
)


_lock = threading.RLock()
_calls: "weakref.WeakKeyDictionary[nn.Module, ModelCalls]" = weakref.WeakKeyDictionary()


class Fitted:
    """The handle that ``fit`` returns: the plan of a model, its predicted time and memory, and the way to undo it.

    Dropping the handle changes nothing: the model goes on following its plan. Used as a context manager, it removes
    the hooks at the end of the block.
    """

    def __init__(self, model: nn.Module, driver: Driver | CompiledModel, *, is_off: bool = False) -> None:
        self._model = weakref.ref(model)
        self._driver = driver
        self._is_off = is_off

    @property
    def phase(self) -> str:
        """The phase of the model: "survey", "trials", "settled", "least memory" (nothing fits) or "removed".

        It is "compiled" if the model was compiled as a whole: then its graphs are planned as they are compiled.
        With ``TORCHOFFLOAD_DISABLE=1`` in the environment of the call it is "removed" from the beginning.
        """
        return self._driver.phase.value

    @property
    def plan(self) -> FitPlan | None:
        """The plan that is followed; None as long as none has been chosen."""
        if isinstance(self._driver, CompiledModel):
            return self._driver.plan
        settled = self._driver.settled
        if settled is None:
            return None
        plan: StepPlan = settled.plan
        return FitPlan(
            predicted_s=plan.step_s,
            measured_s=settled.step_s,
            predicted_peak_bytes=settled.peak_bytes,
            reserved_bytes=settled.reserved_bytes,
            recompute_s=plan.recompute_s,
            kept_bytes=plan.kept_bytes,
            moved_bytes=plan.moved_bytes,
            window_bytes=plan.window_bytes,
        )

    def frontier(self, count: int = 12) -> tuple[FrontierPoint, ...]:
        """Return the times that the step would take in other amounts of memory, as predicted.

        Parameters
        ----------
        count : int, default 12
            The number of amounts, from the least that will do to the memory of a step with nothing moved or computed
            again.

        Returns
        -------
        tuple of FrontierPoint
            From the least memory to the most.

        Raises
        ------
        RuntimeError
            The survey is not done yet: it takes the first steps, three as a rule. Or the model was compiled as a whole.
        """
        return frontier(self._surveyed().snapshot(), count)

    def report(self) -> str:
        """Return a text for people: the plan, how each block runs, and the gain of more memory."""
        if self._is_off:
            return _OFF
        driver = self._driver
        return driver.report() if isinstance(driver, CompiledModel) else describe(driver.snapshot())

    def _check_is_on(self) -> None:
        if self._is_off:
            raise RuntimeError(_OFF)

    def _surveyed(self) -> Driver:
        """Return the driver of a model whose blocks are planned."""
        self._check_is_on()
        if isinstance(self._driver, CompiledModel):
            raise RuntimeError(
                f"{self._driver.model_name} was compiled as a whole: no step of it is surveyed, and its graphs are "
                "planned as they are compiled. report() has the plan"
            )
        return self._driver

    def plot_frontier(self, path: str | os.PathLike[str]) -> None:
        """Write a picture of time against memory, with the plan that is followed. It needs matplotlib.

        Parameters
        ----------
        path : str or os.PathLike
            The file; its suffix says which format, as matplotlib knows them.

        Raises
        ------
        RuntimeError
            The survey is not done yet, or the model was compiled as a whole.
        ImportError
            matplotlib is not installed.
        """
        plot(self._surveyed().snapshot(), path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file, for ``fit(model, plan=path)`` in a later run of the same training.

        Parameters
        ----------
        path : str or os.PathLike
            The file. It is replaced if it exists.

        Raises
        ------
        RuntimeError
            No plan has been chosen yet, or the model was compiled as a whole.
        """
        write_plan(self._surveyed().snapshot(), path)

    def replan(self, memory: float | str) -> None:
        """Plan for another amount of memory. The survey still holds; plans are tried again.

        Parameters
        ----------
        memory : int, float or str
            As for ``fit``.

        Raises
        ------
        TypeError, ValueError
            ``memory`` is not valid.
        RuntimeError
            The step does not fit, or the handle was removed.
        """
        self._check_is_on()
        driver = self._driver
        why = driver.why_over
        if why is not None:
            raise RuntimeError(f"there is nothing to plan for: {why}. Call torchoffload.fit() again")
        amount, model = parse_amount(memory), self._model()
        if model is not None:
            _check_holds_weights(amount, model, driver.meter.device, is_lenient=driver.is_lenient)
        driver.replan(amount.in_bytes(driver.meter.total_bytes))

    def remove(self) -> None:
        """Remove all hooks from the model. Autograd graphs that are alive stay valid."""
        model = self._model()
        with _lock:
            if self._driver.phase is Phase.REMOVED:
                return
            if model is not None and (calls := _calls.pop(model, None)) is not None:
                calls.remove()
            self._driver.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._driver.progress()})"


def _device_of(model: nn.Module) -> torch.device:
    devices = {tensor.device for tensor in [*model.parameters(), *model.buffers()]} - {torch.device("meta")}
    on_accelerators = sorted((each for each in devices if each.type != "cpu"), key=str)
    if len(on_accelerators) > 1:
        shown = ", ".join(map(str, on_accelerators))
        raise ValueError(f"model is spread over several devices ({shown}): call fit for the part on each of them")
    return on_accelerators[0] if on_accelerators else torch.device("cpu")


@is_not_traced
@shows_options(MovingKeywords.__optional_keys__)
def fit(
    model: nn.Module,
    memory: float | str | None = None,
    *,
    blocks: Selector | Sequence[Selector] | None = None,
    recompute: bool = True,
    move: bool = True,
    margin: float = DEFAULT_MARGIN,
    plan: str | os.PathLike[str] | None = None,
    on_unfit: Literal["error", "warn"] = "error",
    allocator: Literal["expandable", "as it is"] = "expandable",
    group: "ProcessGroup | Literal['auto'] | None" = "auto",
    **options: Unpack[MovingKeywords],
) -> Fitted:
    """Have training steps of ``model`` take the least time that can be found in the memory there is.

    For each block of the model it is chosen which of its operators' outputs are kept on the device, which move to the
    host or to disk, and which are computed again in backward. The training loop stays as it is. The first three or so
    steps run in the least memory and are measured. Then a few plans are tried, for two steps each, each of which takes
    more memory than the one before, and the fastest one is followed. Gradients are those of a step without ``fit``, bit
    for bit, if those of ``torch.utils.checkpoint`` are.

    Parameters
    ----------
    model : torch.nn.Module
        The module that the training loop calls, on one device.
    memory : int, float, str, optional
        The memory that this process may reserve on the device, everything included: weights, gradients, the optimizer.
        Bytes, a text such as ``"40GiB"``, or a fraction of the memory that the process can have there. Default: all of
        that, which is the free memory and the memory that PyTorch has reserved already.
    blocks : str, type, torch.nn.Module, callable, or sequence of these, optional
        The blocks, as ``offload_modules`` takes modules. Default: they are chosen at the first call with gradients, by
        the bytes that each call of a module saves, so that a step can do with little memory.
    recompute : bool, default True
        Whether blocks may be computed again.
    move : bool, default True
        Whether anything may move.
    margin : float, default 0.04
        The part of the memory that plans leave free, for fragmentation.
    plan : str or os.PathLike, optional
        A file that ``Fitted.save`` wrote: its plan is followed, without a survey. ``memory`` is that of the file, if
        it is not given.
    on_unfit : {"error", "warn"}, default "error"
        How a step that needs more than ``memory`` under every plan ends: raise torch.OutOfMemoryError, once, or warn.
        Either way it runs in the least memory from then on.
    allocator : {"expandable", "as it is"}, default "expandable"
        Whether PyTorch's CUDA allocator is told to make its segments expandable from now on, which leaves fewer pieces
        of memory that nothing fits into. It is left as it is if ``PYTORCH_CUDA_ALLOC_CONF`` or ``PYTORCH_ALLOC_CONF``
        is set, if the program has set anything itself or has another allocator, and on platforms that have no such
        segments; ``report()`` says so. The guide says how this affects tensors that are shared with other processes.
    group : torch.distributed.ProcessGroup or "auto" or None, default "auto"
        The ranks that plan together, since they communicate inside of blocks: a collective that one rank computes again
        and another one does not would hang. ``"auto"``: the groups in which blocks are seen to communicate in the first
        step. None: no block that communicates is computed again, and each rank plans for itself.
    **options
        The keyword options of ``OffloadActivations``, except ``model`` and the windows, for tensors that move.

    Returns
    -------
    Fitted
        A handle: ``report()``, ``plan``, ``frontier()``, ``plot_frontier()``, ``save()``, ``replan()``, ``remove()``.

    Raises
    ------
    TypeError
        An argument has a wrong type, or an option is unknown.
    ValueError
        An argument is out of its range, ``memory`` is less than the weights take, no module matches ``blocks``, a block
        belongs to another fitted model, or ``model`` is spread over several devices.
    FileNotFoundError, NotADirectoryError, PermissionError
        ``disk_dir`` cannot be used, as for ``OffloadActivations``, or there is no file ``plan``.
    RuntimeError
        Something may move with ``tier="host"`` on a machine without an accelerator.
    torch.OutOfMemoryError
        A training step raises it if it does not fit. The message has the least memory that would do.

    Notes
    -----
    A model that inductor has compiled as a whole (``torch.compile(model)`` or ``model.compile()``) is compiled anew at
    its next call with gradients, with the same arguments and a plan for its graphs, as by
    ``compile_options(memory=...)``. No step is measured then. If something is computed again, the last bits of
    gradients may differ, since inductor may fuse operators in another way.

    If it is called again for the same model, it replaces the former call. Each phase that begins is one line in the
    log, of the logger ``"torchoffload"`` at the level INFO.

    While it measures it resets PyTorch's statistics of peak memory, and it empties the allocator's cache each time that
    the plan changes. On a CPU the memory that a step takes is reckoned from sizes and not measured.

    Examples
    --------
    >>> fitted = torchoffload.fit(model, memory="40GiB")
    >>> train(model)
    >>> print(fitted.report())
    """
    check_module("model", model)
    own: dict[str, Any] = {
        "recompute": recompute, "move": move, "margin": margin, "plan": plan, "on_unfit": on_unfit,
        "allocator": allocator, "group": group,
    }  # fmt: skip
    return fit_with(model, blocks, FitOptions.of("fit", memory, own | dict(options), also=frozenset({"blocks"})))


def fit_with(model: nn.Module, blocks: Selector | Sequence[Selector] | None, options: FitOptions) -> Fitted:
    """Call ``fit`` with options that were checked before.

    Parameters
    ----------
    model, blocks
        As for ``fit``.
    options : FitOptions
        The options.
    """
    if options.move:
        require_accelerator(options.moving.tier, "fit")
    meter = meter_for(_device_of(model))
    saved = None if options.plan is None else read_plan(options.plan)
    if options.memory is not None:
        _check_holds_weights(options.memory, model, meter.device, is_lenient=options.on_unfit == "warn")
    memory_bytes = _memory_bytes(options, saved, meter)
    is_alone = options.group is None or not dist.is_initialized() or dist.get_world_size() == 1
    # Ranks need not agree on plans for graphs: no collective of a graph is computed again.
    if blocks is None and saved is None and options.recompute and (found := recompilable(model)) is not None:
        return _fit_compiled(model, *found, memory_bytes, meter, options)
    chooser = None
    if blocks is not None:
        chosen = blocks_of(model, blocks)
    elif saved is not None and not saved.is_of_several:
        chosen = blocks_named(model, saved.blocks)
    else:
        chooser = Chooser(model, may_move=options.move, may_scout=options.move and is_alone, options=options.moving)
        chosen = chooser.first_blocks()
    with _lock:
        former = _calls.get(model)
        for other in _calls.values():
            for each in chosen:
                if other is not former and each.module in other.driver.names:
                    raise ValueError(f"{each.name!r} is a block of another model that is fitted: remove() that first")
        _remove_former(model)
        budget = Budget(memory_bytes, float(options.margin), meter.device, model)
        try:
            driver = Driver(model, chosen, meter, budget, options)
        except BaseException:
            budget.end()
            raise
        driver.allocator = prepare_allocator(meter.device, options.allocator)
        try:
            if saved is not None:
                driver.follow_saved(saved)
        except BaseException:
            driver.remove()
            raise
        return _begun(model, driver, chooser)


def _begun(model: nn.Module, driver: Driver | CompiledModel, chooser: Chooser | None) -> Fitted:
    """Have the calls of a model tell its driver; called with the lock held."""
    is_off = is_disabled()
    if is_off:
        driver.remove()
    else:
        _calls[model] = ModelCalls(model, driver, chooser)
    return Fitted(model, driver, is_off=is_off)


def _remove_former(model: nn.Module) -> None:
    """Remove the former fit of a model, if there is one."""
    former = _calls.pop(model, None)
    if former is not None:
        former.remove()
        former.driver.remove()


def _fit_compiled(
    model: nn.Module,
    compiled: nn.Module,
    arguments: CompileArguments,
    memory_bytes: int,
    meter: Meter,
    options: FitOptions,
) -> Fitted:
    """Fit a model that was compiled as a whole: it is compiled anew at its next call, by plans for its graphs."""
    with _lock:
        _remove_former(model)
        budget = Budget(memory_bytes, float(options.margin), meter.device, compiled)
        driver = CompiledModel(compiled, arguments, meter, budget, options)
        driver.allocator = prepare_allocator(meter.device, options.allocator)
        return _begun(model, driver, None)


def _check_holds_weights(amount: Amount, model: nn.Module, device: torch.device, *, is_lenient: bool) -> None:
    """Raise ValueError if an amount of memory is less than the weights of a model on its device.

    Parameters
    ----------
    amount : Amount
        The amount.
    model, device : nn.Module, torch.device
        The model, and its device.
    is_lenient : bool
        Whether the user wants a warning when the step runs. A number that can only lack its unit is an error anyway.
    """
    may_lack_unit = not amount.has_unit and amount.nbytes is not None and amount.nbytes <= _MOST_BARE
    if amount.nbytes is None or (is_lenient and not may_lack_unit):
        return
    tensors = [each for each in (*model.parameters(), *model.buffers()) if not nn.parameter.is_lazy(each)]
    weights = unique_bytes(each for each in tensors if each.device == device)
    if amount.nbytes >= weights:
        return
    told = f"memory={amount.given!r}"
    if not may_lack_unit:
        raise ValueError(
            f"{told} is less than the weights of {type(model).__name__} take by themselves, {human_bytes(weights)}: "
            "give more"
        )
    other = ", or 1.0 for all that this process can have" if amount.nbytes == 1 else ""
    unit = "GiB" if amount.nbytes <= 1024 else "MiB"  # as nvidia-smi counts
    raise ValueError(
        f"{told} means {amount.nbytes} bytes, and the weights of {type(model).__name__} take {human_bytes(weights)}; "
        f'did you mean "{amount.nbytes}{unit}"{other}?'
    )


def _memory_bytes(options: FitOptions, saved: SavedPlan | None, meter: Meter) -> int:
    """Return the memory that was given, or that of a saved plan, or all that the process can have."""
    if options.memory is not None:
        return options.memory.in_bytes(meter.total_bytes)
    return meter.total_bytes() if saved is None else saved.memory_bytes


def _idle_advice() -> str:
    """Return advice for a program that called fit, if nothing was saved in any context."""
    models = [(calls.driver.model_name, calls.driver.clock.has_been_called) for calls in list(_calls.values())]
    if not models or idle_modules_advice():
        return ""
    name, was_called = models[0]
    if was_called:
        return f"torchoffload.fit was called for {name}: report() of what it returned has the plan, and what moves."
    return (
        f"torchoffload.fit was called for {name}, and no call of it with gradients was seen yet: train first. Its plan "
        "is in report() of what fit returned."
    )


advise_if_idle(_idle_advice)
