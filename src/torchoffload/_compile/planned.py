"""The plans for the compiled graphs of this process: their inputs, and the lines of report() about them."""

import functools
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torchoffload._compile.joint_graph import Rates
from torchoffload._compile.joint_plan import GraphPlan, PiecePlan, Room
from torchoffload._contexts.amounts import amount_text, parse_amount
from torchoffload._contexts.options import OffloadOptions, described
from torchoffload._core import core
from torchoffload._devices import accelerator, accelerators_in_use, cuda_properties, meter_for
from torchoffload._estimate.cards import card_of_device
from torchoffload._fit.machine.link import LinkRates, measure_link
from torchoffload._observe.units import human_bytes
from torchoffload._warnings import warn_user

__all__ = [
    "Lookup",
    "Memory",
    "PlanNotes",
    "PlansOfCachedGraph",
    "checked_memory",
    "device_rates",
    "note_lookup",
    "note_plan",
    "plan_lines",
    "planned_device",
    "room",
]

_ANY_BYTES = 1 << 61
_MOST_COMPILATIONS = 16  # of a frame, whose plans are noted
_MOST_FRAMES = 256  # whose plans are noted, and as many amounts of memory
# For a device whose rates nobody knows.
_DEFAULT_RATES = {"cuda": Rates(1.2e12, 2.5e14), "cpu": Rates(1e10, 2e11)}
_REACHED_OF_BYTES = 0.75  # the part of a card's bandwidth that fused kernels reach, as in estimate


@dataclass(frozen=True)
class Memory:
    """The memory that compiled graphs are planned for.

    Attributes
    ----------
    nbytes : int
        For all graphs of a step.
    graphs : int
        How many calls of compiled graphs a step has.
    link_bytes_per_s : float or None
        The rate of the link in either direction; None if it is measured.
    sets_reload_window : bool
        As in ``Room``.
    """

    nbytes: int
    graphs: int = 1
    link_bytes_per_s: float | None = None
    sets_reload_window: bool = False


def checked_memory(memory: object, graphs: object, link_bytes_per_s: object) -> Memory | None:
    """Return the memory that a user gave, checked; None if none was given.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type or value.
    """
    if isinstance(graphs, bool) or not isinstance(graphs, int):
        raise TypeError(f"graphs must be a whole number of at least 1, got {described(graphs)}")
    if graphs < 1:
        raise ValueError(f"graphs must be a whole number of at least 1, got {graphs}")
    rate = link_bytes_per_s
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, (int, float))):
        raise TypeError(f"link_bytes_per_s must be a number of bytes in a second, or None, got {described(rate)}")
    if rate is not None and not 0 < rate < math.inf:
        raise ValueError(f"link_bytes_per_s must be above 0, got {rate}")
    if memory is None:
        if graphs != 1 or rate is not None:
            raise ValueError("graphs and link_bytes_per_s are for memory=: give the memory that the graphs may use")
        return None
    nbytes = parse_amount(memory).in_bytes(_device_bytes)
    return Memory(nbytes, graphs, None if rate is None else float(rate))


def _device_bytes() -> int:
    device = accelerator()
    if device is None:
        raise ValueError('memory is a fraction, of a device whose size is not known. Write memory="8GiB", for example')
    return meter_for(device).total_bytes()


def planned_device() -> torch.device:
    """Return the device that graphs are planned for: the key of a cache depends on it, and is asked for first."""
    device = accelerator() if accelerators_in_use() else None
    return torch.device("cpu") if device is None else device


@functools.cache
def device_rates(device_type: str) -> Rates:
    """Return how fast the current device of a type computes.

    PyTorch's own figures are not taken: for a card that its list lacks, such as the H200, they are a thousandth of the
    truth (``torch._inductor.utils.get_device_tflops`` gives Triton a clock in MHz that is to be in kHz).
    """
    rates = _DEFAULT_RATES.get(device_type, _DEFAULT_RATES["cpu"])
    if device_type == "cuda" and torch.version.hip is None:
        card = card_of_device(cuda_properties())
        if card is not None:
            rates = Rates(card.bandwidth_gb_per_s * 1e9 * _REACHED_OF_BYTES, card.half_tflops * 1e12, card)
    return rates


@functools.cache
def _measured_link(device: torch.device, options: OffloadOptions) -> LinkRates:
    """Return the link of a tier. Its rates are rounded to powers of the square root of 2: each process finds the same.

    A graph is partitioned while tensors are fake: copies of these would take no time.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        link = measure_link(device, options)
    out, back = (2.0 ** (round(2 * math.log2(rate)) / 2) for rate in (link.out_bytes_per_s, link.in_bytes_per_s))
    return LinkRates(out, back, 1e-4 if options.tier == "disk" else 1e-5)


def room(memory: Memory, options: OffloadOptions | None) -> Room:
    """Return the inputs of a graph's plan beside the graph: the memory, and the context that it is compiled in.

    ``options``: of the context; None if nothing may move.
    """
    if options is None:
        return Room(memory.nbytes, memory.graphs)
    tier_bytes = options.budget_bytes
    if tier_bytes is None:
        tier_bytes = (core.host_memory()["default_budget"] or _ANY_BYTES) if options.tier == "host" else _ANY_BYTES
        tier_bytes = 1 << (tier_bytes.bit_length() - 1)  # the next process finds another amount free
    rate = memory.link_bytes_per_s
    return Room(
        memory.nbytes,
        memory.graphs,
        _measured_link(planned_device(), options) if rate is None else LinkRates(rate, rate, 1e-5),
        options.min_offload_bytes,
        tier_bytes,
        options.offload_window_bytes,
        None if memory.sets_reload_window else options.reload_window_bytes,
        memory.sets_reload_window,
    )


# ---- for report() ----


@dataclass
class _Compilation:
    """The plans of one compilation of a frame: several if PyTorch cuts its graph, as it does under DDP.

    ``attempt``: the number of times that Dynamo began this compilation again.
    """

    attempt: int
    plans: list[GraphPlan] = field(default_factory=list)


class PlanNotes:
    """The plans for the graphs that were compiled for an amount of memory, for reports.

    Parameters
    ----------
    memory : Memory
        The memory.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        # By the frame and its compilation, as for arguments of other sizes.
        self._frames: dict[Any, dict[Any, _Compilation]] = {}

    def note(self, plan: GraphPlan) -> None:
        """Take notice of a plan."""
        from torch._guards import CompileContext

        trace = CompileContext.current_trace_id()
        frame, identity, attempt = (None, None, 0)
        if trace is not None:
            frame, identity, attempt = trace.compile_id.frame_id, trace.compile_id, trace.attempt
        compilations = {} if trace is None else self._frames.pop(frame, {})
        compilation = compilations.get(identity)
        if compilation is None or compilation.attempt != attempt:  # of a former attempt nothing is left
            compilation = compilations[identity] = _Compilation(attempt)
        compilation.plans.append(plan)
        self._frames[frame] = compilations
        if len(compilations) > _MOST_COMPILATIONS:
            del compilations[next(iter(compilations))]
        while len(self._frames) > _MOST_FRAMES:
            del self._frames[next(iter(self._frames))]

    def forget(self, plans: tuple[GraphPlan, ...]) -> None:
        """Forget plans that no graph follows."""
        for compilations in self._frames.values():
            for compilation in compilations.values():
                compilation.plans[:] = [plan for plan in compilation.plans if not any(plan is each for each in plans)]

    @property
    def plans(self) -> tuple[GraphPlan, ...]:
        """The plans of the latest compilation of each frame, in the order in which the frames were compiled."""
        return tuple(plan for each in self._frames.values() for plan in each[next(reversed(each))].plans)

    @property
    def all_plans(self) -> tuple[GraphPlan, ...]:
        """The plans of all compilations."""
        return tuple(
            plan for each in self._frames.values() for compilation in each.values() for plan in compilation.plans
        )

    def lines(self, first_number: int = 0) -> list[str]:
        """Return the lines of a report on the plans, whose graphs have numbers from a first one on."""
        numbered = enumerate(self.plans, first_number)
        return [line for number, plan in numbered for line in _graph_lines(number, self.memory.graphs, plan)]


_noted: dict[Memory, PlanNotes] = {}  # of all graphs that were compiled in this process


class PlansOfCachedGraph:
    """The plans that PyTorch keeps in its cache beside a graph, and that are noted as they come out of there.

    Parameters
    ----------
    plans : tuple of GraphPlan
        Those of the regions that are compiled inside of the graph as one, if there are any, and of the graph.
    """

    def __init__(self, plans: tuple[GraphPlan, ...]) -> None:
        self.plans = tuple(without_nodes(plan) for plan in plans)

    def __reduce__(self) -> tuple[Any, ...]:
        return _plans_from_cache, (self.plans,)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PlansOfCachedGraph":
        return self  # a copy is no search


@dataclass
class Lookup:
    """A search for a graph in PyTorch's cache.

    Attributes
    ----------
    memory : Memory
        The memory that the graph was planned for.
    in_context : bool
        Whether the graph is compiled inside of a context.
    notes : PlanNotes or None
        Told of the plan in place of warnings.
    found : tuple of GraphPlan
        The plans of the latest graph that was read. PyTorch may read several, for arguments of other sizes.
    """

    memory: Memory
    in_context: bool
    notes: PlanNotes | None
    found: tuple[GraphPlan, ...] = ()


class _Lookups(threading.local):
    latest: Lookup | None = None


_lookups = _Lookups()


def note_lookup(lookup: Lookup | None) -> None:
    """Take notice of the search in PyTorch's cache that this thread begins; None if the graph has no plan."""
    _lookups.latest = lookup


def _plans_from_cache(plans: tuple[GraphPlan, ...]) -> PlansOfCachedGraph:
    from torch._guards import CompileContext

    lookup = _lookups.latest
    if lookup is not None and CompileContext.current_trace_id() is not None:
        for notes in (lookup.notes, _noted.get(lookup.memory)):
            if notes is not None:
                notes.forget(lookup.found)
        for plan in plans:
            note_plan(lookup.memory, plan, in_context=lookup.in_context, notes=lookup.notes)
        lookup.found = plans
    return PlansOfCachedGraph(plans)


def without_nodes(plan: GraphPlan) -> GraphPlan:
    """Return a plan without the nodes of its graph, which would hold the graph."""
    return plan if plan.saved is None else replace(plan, saved=None)


def note_plan(memory: Memory, plan: GraphPlan, *, in_context: bool, notes: PlanNotes | None) -> None:
    """Take notice of a plan that is followed, and warn if the graphs of a step do not fit together.

    ``in_context``: whether the graph was compiled inside of a context. ``notes``: told of it in place of warnings.
    """
    plan = without_nodes(plan)
    own = _noted.pop(memory, None) or PlanNotes(memory)
    _noted[memory] = own
    while len(_noted) > _MOST_FRAMES:
        del _noted[next(iter(_noted))]
    former_count = len(own.plans)
    own.note(plan)
    if notes is not None:
        notes.note(plan)
        return
    if plan.is_tight:
        most_bytes = plan.predicted_peak_bytes + plan.doubt_bytes
        more = f", or up to {human_bytes(plan.doubt_bytes)} more," if plan.doubt_bytes else ""
        warn_user(
            f"torchoffload: {human_bytes(memory.nbytes)} {'may be' if plan.fits else 'is'} too little for a compiled "
            f"graph, which takes {human_bytes(plan.predicted_peak_bytes)}{more} by the plan of the least memory. Give "
            f'memory="{amount_text(most_bytes)}", or a smaller batch'
            + ("." if in_context else ", or compile inside of an OffloadActivations, so that values may move.")
        )
    count = len(own.plans)
    if count > max(former_count, memory.graphs):
        warn_user(
            f"torchoffload: {count} graphs were compiled for memory={human_bytes(memory.nbytes)}, and each was planned "
            f"as if it were one of {memory.graphs} in a step. If they run in the same step, give "
            f"compile_options(memory=..., graphs={count})."
        )


def _piece_text(pieces: list[PiecePlan]) -> str:
    first, last = pieces[0], pieces[-1]
    name = first.name or "outside of blocks"
    if len(pieces) > 1:
        name += f" to {last.name.rpartition('.')[2]}"
    text = f"{name}: {human_bytes(first.kept_bytes)} kept, {human_bytes(first.moved_bytes)} moved"
    if first.again:
        names = sorted({each.partition(".")[0] for each in first.again})
        shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        text += f", computed again in {first.again_s * 1e3:.3g} ms: {shown}"
    return text + (" (each)" if len(pieces) > 1 else "")


def _runs(pieces: tuple[PiecePlan, ...]) -> Iterator[list[PiecePlan]]:
    """Yield runs of pieces with the same plan."""
    run: list[PiecePlan] = []
    for piece in pieces:
        if run and run[-1].name and piece.name and _work(run[-1]) == _work(piece):
            run.append(piece)
        else:
            if run:
                yield run
            run = [piece]
    if run:
        yield run


def _work(piece: PiecePlan) -> Any:
    return piece.kept_bytes, piece.moved_bytes, piece.again


def _graph_lines(number: int, graphs: int, plan: GraphPlan) -> list[str]:
    """Return the lines on one graph: its plan beside PyTorch's own, and that of each block."""
    others = f", one of {graphs}" if graphs > 1 else ""
    doubt = f" (or up to {human_bytes(plan.doubt_bytes)} more)" if plan.doubt_bytes else ""
    first = (
        f"  compiled graph {number}{others}, for {human_bytes(plan.memory_bytes)}: predicted peak "
        f"{human_bytes(plan.predicted_peak_bytes)}{doubt}, {plan.predicted_s * 1e3:.3g} ms; PyTorch's own plan "
        f"{human_bytes(plan.stock_peak_bytes)}, {plan.stock_s * 1e3:.3g} ms"
    )
    return [first, *(f"    {_piece_text(run)}" for run in _runs(plan.pieces))]


def plan_lines() -> list[str]:
    """Return the lines of ``report()`` on the graphs that were planned in this process."""
    return [line for notes in _noted.values() for line in notes.lines()]
