"""A model that was compiled as a whole: its graphs are planned as they are compiled, and no step is surveyed.

``fit`` compiles such a model anew, with the arguments that it was compiled with and ``compile_options``'s partitioner,
at its first call with gradients, and at the first one of another size. The former compiled function stays: it runs all
calls without gradients, and ``remove()`` puts it back. The model is compiled once more if so much was allocated after
the first step, as by an optimizer, that its graphs do not fit beside it, if a step turns out to call several graphs, or
if a call is too large for a graph. Layers of one class may have a graph in common, so the calls of graphs are counted
in the autograd graph of the output.
"""

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from torchoffload._contexts.amounts import amount_text
from torchoffload._contexts.offload_activations import OffloadActivations
from torchoffload._contexts.planned_graphs import GraphPlan, planned_graphs
from torchoffload._devices import Meter
from torchoffload._fit.machine.operators import unique_bytes
from torchoffload._fit.model.clock import Clock, FinishedStep, Opener
from torchoffload._fit.model.options import FitOptions
from torchoffload._fit.model.phase import Phase
from torchoffload._fit.model.planned_functions import CallSize, PlannedFunction, PlannedFunctions
from torchoffload._fit.model.progress import Progress, log_phase
from torchoffload._fit.model.sizes import argument_bytes, tensors_in
from torchoffload._fit.plan.budget import Budget
from torchoffload._fit.plan.fit_plan import FitPlan
from torchoffload._fit.plan.trials import does_not_fit
from torchoffload._observe.units import human_bytes
from torchoffload._pytorch.compiled_calls import not_traced
from torchoffload._pytorch.module_wrappers import COMPILED
from torchoffload._pytorch.recompiling import (
    CompileArguments,
    compile_anew,
    compile_arguments,
    most_compiles,
    set_whole_call,
    whole_call_of,
)
from torchoffload._pytorch.tracing import is_transformed
from torchoffload._warnings import warn_user

__all__ = ["CompiledModel", "recompilable"]

_MOST_COMPILES = 8  # for one amount of memory; each may take minutes
_MOST_SIZES = 256  # that are remembered
_COMPILED_NODE = "CompiledFunctionBackward"  # AOTAutograd's, one for each call of a compiled graph


class _Call:
    """The call of a compiled model, in the place of its former compiled function.

    The model holds it, so that the model is held by nothing but itself.
    """

    def __init__(self, former: Callable[..., Any], driver: "CompiledModel") -> None:
        self.former, self.driver = former, driver
        self.calls: weakref.WeakKeyDictionary[PlannedFunction, Callable[..., Any]] = weakref.WeakKeyDictionary()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a part of another compiled region
            return self.former(*args, **kwargs)
        return not_traced(_run)(self, args, kwargs)


def _run(call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    driver = call.driver
    function = None
    if torch.is_grad_enabled() and not is_transformed():
        function = driver.function_for(call, (args, kwargs))
    if function is None:
        return call.former(*args, **kwargs)
    try:
        with driver.context:
            output = call.calls[function](*args, **kwargs)
    except torch.OutOfMemoryError as error:
        driver.tell_unfit(error)
        raise
    driver.note_plans()
    driver.tell_unfit()
    return output


def _call_of(model: nn.Module) -> "_Call | None":
    call = whole_call_of(model)
    return call if isinstance(call, _Call) else None


def recompilable(model: nn.Module) -> tuple[nn.Module, CompileArguments] | None:
    """Return the module that was compiled as a whole, which may be inside of DDP, and the arguments of its compilation.

    Returns
    -------
    tuple of nn.Module and CompileArguments, or None
        None if no module was compiled as a whole, or if the arguments are unknown.
    """
    compiled, call = model, whole_call_of(model)
    if call is None and isinstance(model, nn.parallel.DistributedDataParallel):
        compiled = model.module
        call = whole_call_of(compiled)
    if isinstance(call, _Call):  # of a former fit
        call = call.former
    arguments = None if call is None else compile_arguments(compiled, call)
    return None if arguments is None else (compiled, arguments)


class CompiledModel:
    """One fitted model that was compiled as a whole.

    Parameters
    ----------
    model : nn.Module
        The model, without a wrapper of DDP. It is held weakly.
    arguments : CompileArguments
        The arguments with which it was compiled.
    meter : Meter
        The device's clock and memory.
    budget : Budget
        The memory that plans may take.
    options : FitOptions
        The options of ``fit``.

    Attributes
    ----------
    model_name : str
        The model's class.
    names : mapping
        The blocks that ``fit`` has hooks on: none.
    clock : Clock
        Tells the steps.
    allocator : str
        The settings of the device's allocator, for people.
    notes : list of str
        The events that did not go as planned.
    """

    def __init__(
        self, model: nn.Module, arguments: CompileArguments, meter: Meter, budget: Budget, options: FitOptions
    ) -> None:
        former = whole_call_of(model)
        assert former is not None
        self.model = weakref.ref(model)
        self.model_name = type(model._modules.get(COMPILED, model)).__name__
        self.names: Mapping[nn.Module, str] = {}
        self.meter, self.budget = meter, budget
        self.allocator = ""
        self.notes: list[str] = []
        self.clock = Clock(self, meter, lambda *values: values)
        self._arguments, self._options = arguments, options
        self._manager = self._planned_manager = None
        if options.move and not arguments.options.get("triton.cudagraphs", False):
            self._manager = self._planned_manager = self._new_manager(model)
        self._functions = PlannedFunctions(arguments.keywords.get("dynamic"))
        self._latest: PlannedFunction | None = None  # the function that ran last
        self._room_bytes = self._outside_bytes = 0  # for the graphs that were compiled last, and allocated beside them
        self._gradient_bytes = 0  # the most that there were as a call began
        self._compile_count = self._all_compiles = 0  # for one amount of memory, and for all of them
        self._steps = 0
        self._open_count = self._most_open_count = 1  # calls of the model before a common backward
        self._sizes: set[CallSize] = set()  # of the calls since the model was compiled last
        self._size = CallSize(())  # of the latest call
        self._is_new_size = False  # whether no former one had it
        self._graph_calls = 1  # of compiled graphs, by one call of the model
        self._counted_sizes = 0  # whose calls of graphs were counted
        self._has_begun = False  # a call with gradients
        self._was_told = self._was_doubted = self._is_limit_told = self._is_removed = False
        set_whole_call(model, _Call(former, self))

    def _new_manager(self, model: nn.Module, **options: Any) -> OffloadActivations:
        # A context that learns keeps values that are to move, and widens its windows: plans know of neither.
        return OffloadActivations(model=model, **self._options.moving.as_keywords() | {"learn": False} | options)

    @property
    def plans(self) -> tuple[GraphPlan, ...]:
        """The plans of the graphs that were compiled, or that came out of PyTorch's cache."""
        return self._functions.plans

    @property
    def _latest_plans(self) -> tuple[GraphPlan, ...]:
        return () if self._latest is None else self._latest.graphs.plans

    @property
    def phase(self) -> Phase:
        """The phase: compiled, or removed."""
        if self._is_removed:
            return Phase.REMOVED
        return Phase.COMPILED if all(plan.fits for plan in self.plans) else Phase.LEAST

    @property
    def why_over(self) -> str | None:
        """Why there will be no more steps of the model; None if some may come."""
        if self._is_removed:
            return "this fit was removed"
        return "the model does not exist any more" if self.model() is None else None

    @property
    def is_lenient(self) -> bool:
        """Whether graphs that do not fit are a warning and no error."""
        return self._options.on_unfit == "warn"

    @property
    def plan(self) -> FitPlan | None:
        """The plan of the graphs of the latest call together; None before they are compiled."""
        plans = self._latest_plans
        if not plans:
            return None
        pieces = [piece for plan in plans for piece in plan.pieces]
        return FitPlan(
            predicted_s=sum(plan.predicted_s for plan in plans),
            measured_s=None,
            predicted_peak_bytes=max(plan.predicted_peak_bytes for plan in plans),
            reserved_bytes=0,
            recompute_s=sum(piece.again_s for piece in pieces),
            kept_bytes=sum(piece.kept_bytes for piece in pieces),
            moved_bytes=sum(piece.moved_bytes for piece in pieces),
            window_bytes=max(plan.reload_bytes for plan in plans),
        )

    # ---- calls and steps ----

    def call_begins(self, inputs: Any) -> None:
        """Take notice of a call of the model with gradients."""
        self.clock.call_begins(argument_bytes(inputs))
        self._open_count = self._open_count + 1 if self.clock.has_open_calls else 1
        self._most_open_count = max(self._most_open_count, self._open_count)
        self._has_begun = True

    is_opening = False  # compiled graphs are no blocks, which steps could begin with

    def module_opens(self, module: nn.Module) -> bool:  # noqa: ARG002
        """Return that nothing is to be told of modules that are entered."""
        return False

    def call_goes_on(self, inputs: Any) -> None:  # noqa: ARG002
        """Take notice of the call of another part, which belongs to the call before."""
        self.clock.call_goes_on(0)

    def call_raised(self) -> None:
        """Take notice of a call of the model that has raised."""
        self.clock.call_raised()

    def call_ends(self, output: Any) -> None:
        """Take notice of the model's output."""
        self.clock.call_ends(output)
        if self._counted_sizes < len(self._sizes):
            self._counted_sizes = len(self._sizes)
            self._graph_calls = max(self._graph_calls, _graph_calls_behind(output))

    def opener_of(self, called: Opener) -> Opener:
        """Return the module that a step begins with: the one that is called."""
        return called

    def step_begins(self, size: int) -> None:
        """Take notice of a step that begins."""

    def step_finished(self, step: FinishedStep) -> None:  # noqa: ARG002
        """Count the step."""
        self._steps += 1
        self.budget.note_step()

    def backward_began(self) -> None:
        """Take notice of a backward."""

    def backward_ended(self) -> None:
        """Take notice of the end of a backward."""

    def note_stuck(self) -> None:
        """Do nothing: a plan needs no backward to be seen."""

    # ---- compiling ----

    def _outside(self, model: nn.Module, inputs: Any) -> int:
        """Return the bytes on the device that are neither inputs of the graphs nor made by them.

        Gradients count as many as there ever were: if they are kept for some steps, the optimizer's state comes in a
        step that begins without them.
        """
        grads = [each.grad for each in model.parameters() if each.grad is not None]
        if not self.meter.measures_memory:
            gradient_bytes, other_bytes = unique_bytes(grads), 0
        else:
            here = self.meter.device
            gradient_bytes = unique_bytes(each for each in grads if each.device == here)
            inside = [*model.parameters(), *model.buffers(), *tensors_in(inputs)]
            inside_bytes = unique_bytes(each for each in inside if each.device == here)
            other_bytes = max(0, self.meter.counts().allocated_bytes - inside_bytes - gradient_bytes)
        self._gradient_bytes = max(self._gradient_bytes, gradient_bytes)
        return other_bytes + self._gradient_bytes

    def function_for(self, call: _Call, inputs: Any) -> PlannedFunction | None:
        """Return the function that runs a call, compiled anew if it is time to; None if no call was told of."""
        model = self.model()
        if model is None or not self._has_begun:
            return None
        self._size = size = CallSize.of(inputs)
        self._is_new_size = size not in self._sizes
        function = self._functions.find(size)
        if function is not None and torch._C._current_graph_task_id() != -1:  # a checkpoint calls the model again
            self._latest = function
            return function
        if not self.clock.has_open_calls:
            self.budget.share(None, self.meter)
        outside_bytes = self._outside(model, inputs)
        room_bytes = _rounded(max(1, self.budget.usable_bytes - outside_bytes))
        # Calls that wait for their backward have allocated what they hold.
        graph_count = self._graph_calls * max(1, self._most_open_count - self._open_count + 1)
        why = None if function is None else self._why_anew(function, size, room_bytes, graph_count, outside_bytes)
        if function is not None and why is not None and self._compile_count >= _MOST_COMPILES:
            self._tell_of_many_compiles(why)
            why = None
        if function is None or why is not None:
            if why is not None:
                self.notes.append(f"{why}: compiled anew")
            self._room_bytes, self._outside_bytes = room_bytes, outside_bytes
            sets_window = self._options.moving.reload_window_bytes is None
            graphs = planned_graphs(room_bytes, graph_count, sets_reload_window=sets_window)
            function = PlannedFunction(graphs, size, room_bytes)
            call.calls[function] = compile_anew(model, self._arguments, function.graphs.options())
            self._note_compiled(function)
        if len(self._sizes) < _MOST_SIZES:
            self._sizes.add(size)
        if self._is_new_size:
            self._functions.mark_dynamic(inputs, function)
        function.graphs.nbytes = room_bytes  # a graph may be compiled for the same size, too, as if autocast ends
        self._latest = function
        return function

    def _why_anew(
        self, function: PlannedFunction, size: CallSize, room_bytes: int, graph_count: int, outside_bytes: int
    ) -> str | None:
        """Return why calls of a function may not fit any more, while others may; None if they fit."""
        count = max(graph_count, function.graphs.graphs) if self._open_count == 1 else graph_count
        if function.needed_bytes(size, count) <= room_bytes:
            return None
        if count > function.graphs.graphs:
            return f"a step has {count} calls of graphs, which share the memory"
        if function.needed_bytes(CallSize(()), count) <= room_bytes:
            return f"a call had arguments of {human_bytes(size.nbytes)}, more than its graph was planned for"
        if self._open_count > 1:
            return "a step has several calls of the model before a backward, which share the memory"
        more = human_bytes(max(0, outside_bytes - self._outside_bytes))
        return f"{more} more were allocated before a step than at the first one"

    def _note_compiled(self, function: PlannedFunction) -> None:
        self._functions.put(function)
        self._latest = function
        self._compile_count += 1
        self._all_compiles += 1
        self._tell_of_limit()
        self._sizes.clear()
        self._is_new_size = True
        self._counted_sizes = 0
        beside = f", beside {human_bytes(self._outside_bytes)} that are allocated" if self._outside_bytes else ""
        log_phase(
            self.progress(), f"compiled: its graphs are planned for {human_bytes(function.graphs.nbytes)}{beside}"
        )

    def _tell_of_many_compiles(self, why: str) -> None:
        """Warn, once, if the model is compiled no more."""
        if self._is_limit_told:
            return
        self._is_limit_told = True
        message = (
            f"{self.model_name} was compiled {self._compile_count} times, and is compiled no more: {why}, so a step "
            "may run out of memory. replan(memory) begins anew."
        )
        self.notes.append(message)
        warn_user(f"torchoffload: fit: {message}")

    def _tell_of_limit(self) -> None:
        """Warn, once, if PyTorch may compile the model no more: then it runs without a plan."""
        limit = most_compiles()
        if limit is None or self._all_compiles != limit:
            return
        message = (
            f"{self.model_name} was compiled anew {limit} times, and PyTorch {torch.__version__} compiles a function "
            "no more often: it may run without its plan. Call torch._dynamo.reset() before the next step."
        )
        self.notes.append(message)
        warn_user(f"torchoffload: fit: {message}")

    @property
    def context(self) -> Any:
        """The context of the present call: one that moves if a plan moves anything, or if a graph may be compiled."""
        plans = self._latest_plans
        if self._manager is None or self._planned_manager is None:
            return contextlib.nullcontext()
        if self._is_new_size or not plans:
            return self._manager  # with the options that the user gave, which a plan depends on
        windows = [plan.reload_bytes for plan in plans if plan.releases]
        if not windows:
            return contextlib.nullcontext()
        model = self.model()
        if self._options.moving.reload_window_bytes is None and model is not None:
            window = min(windows)  # all of them fit with the smallest one
            if self._planned_manager.options.reload_window_bytes != window:
                self._planned_manager = self._new_manager(model, reload_window_bytes=window)
        return self._planned_manager

    def note_plans(self) -> None:
        """Take notice of the plans that the latest call has made, if it has made any."""
        assert self._latest is not None
        for plan in self._latest.note_plans(self._size):
            peak = human_bytes(plan.predicted_peak_bytes)
            log_phase(
                self.progress(),
                f"planned: predicted {plan.predicted_s * 1e3:.1f} ms a step and {peak} at the peak; "
                f"{self.progress().does}",
            )

    def tell_unfit(self, error: BaseException | None = None) -> None:
        """Raise or warn, once, if no plan of a graph fits, and warn, once, if the plan of the least memory may not fit.

        Parameters
        ----------
        error : BaseException, optional
            The error by which the call has ended.
        """
        tight = [plan for plan in self.plans if plan.is_tight]
        fits = self.phase is not Phase.LEAST
        if not tight or self._was_told or (fits and self._was_doubted):
            return
        largest = max(tight, key=lambda plan: plan.predicted_peak_bytes + plan.doubt_bytes)
        most_bytes = largest.predicted_peak_bytes + largest.doubt_bytes
        self._was_told, self._was_doubted = not fits, True
        needed_bytes = int((most_bytes + self._outside_bytes) / (1 - self.budget.margin) * 1.01)
        taken = human_bytes(largest.predicted_peak_bytes)
        taken += f", or up to {human_bytes(largest.doubt_bytes)} more," if largest.doubt_bytes else ""
        message = (
            f"The graphs of {self.model_name}, which was compiled as a whole, take {taken} by the "
            f"plan of the least memory, and {human_bytes(largest.memory_bytes)} of {self.budget.limit} are left for "
            f"them. {'If a step runs out of memory, give' if fits else 'Give'} "
            f'memory="{amount_text(needed_bytes)}", or a smaller batch'
            + ("." if self._options.move else ", or let tensors move: move=True.")
        )
        self.notes.append(message)
        if fits:
            warn_user(f"torchoffload: fit: {message}")
            return
        if self.is_lenient:
            warn_user(f"torchoffload: fit: {message} It runs in the least memory.")
            return
        raise does_not_fit(message, self.meter.device) from error

    def replan(self, memory_bytes: int) -> None:
        """Plan for another amount of memory: the model is compiled anew at its next call."""
        self.budget.give(memory_bytes)
        self._functions.clear()
        self._latest = None
        self._compile_count = self._gradient_bytes = 0
        self._was_told = self._was_doubted = self._is_limit_told = False

    def remove(self) -> None:
        """Put the former compiled function back."""
        self._is_removed = True
        self.budget.end()
        model = self.model()
        call = None if model is None else _call_of(model)
        if model is not None and call is not None and call.driver is self:
            set_whole_call(model, call.former)

    # ---- for people ----

    def progress(self) -> Progress:
        """Return its present work, in few words."""
        pieces = [piece for plan in self._latest_plans for piece in plan.pieces if piece.name]
        is_planned = bool(self._latest_plans)
        return Progress(
            model_name=self.model_name,
            block_count=len(pieces),
            names=tuple(piece.name for piece in pieces),
            phase=self.phase,
            phase_step=self._steps + 1,
            recomputed_count=sum(bool(piece.again) for piece in pieces) if is_planned else None,
            moved_count=sum(piece.moved_bytes > 0 for piece in pieces) if is_planned else None,
        )

    def report(self) -> str:
        """Return the report: the plan of each graph, per block."""
        allocator = f"; {self.allocator}" if self.allocator else ""
        lines = [
            f"torchoffload.fit: {self.model_name}, compiled as a whole, within "
            f"{human_bytes(self.budget.memory_bytes)}{allocator}"
        ]
        notes = [f"Note: {note}" for note in self.notes]
        functions = self._functions.all
        if not functions:
            why = self.why_over or "it is made as the model is compiled, at its next call with gradients"
            return "\n".join([*lines, f"  There is no plan yet: {why}.", *notes])
        lines.append(
            f"  {human_bytes(self._room_bytes)} are for its graphs: {human_bytes(self._outside_bytes)} were allocated "
            f"beside them, and {self.budget.margin:.0%} are left for fragmentation"
        )
        if not self.plans:
            lines.append("  No graph is compiled yet, or PyTorch's cache does not tell its plan.")
        number = 0
        for function in functions:
            lines += function.graphs.lines(number)
            number += len(function.graphs.plans)
        return "\n".join([*lines, *notes])


def _graph_calls_behind(output: Any) -> int:
    """Return how many calls of compiled graphs the autograd graph of an output has."""
    waiting = [tensor.grad_fn for tensor in tensors_in(output)]
    seen = set()
    count = 0
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        count += type(node).__name__ == _COMPILED_NODE
        waiting.extend(next_node for next_node, _ in node.next_functions)
    return max(1, count)


def _rounded(nbytes: int) -> int:
    """Return at most 1% less, so that another process finds the same amount, and its graphs in inductor's caches."""
    step = 1 << max(0, nbytes.bit_length() - 8)
    return nbytes // step * step
