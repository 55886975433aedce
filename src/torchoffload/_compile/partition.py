"""The partitioner by which compiled graphs follow plans and move values, and the options that give it to inductor."""

import contextlib
import functools
import hashlib
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from torchoffload._contexts.offload_activations import OffloadActivations
from torchoffload._contexts.options import OffloadOptions
from torchoffload._contexts.planned_graphs import register_planner
from torchoffload._core import build_info
from torchoffload._pytorch import hook_stack
from torchoffload._pytorch.tracing import is_not_traced
from torchoffload._warnings import warn_user

if TYPE_CHECKING:
    from torchoffload._compile.joint_plan import GraphPlan, Room
    from torchoffload._compile.planned import Memory, PlanNotes

__all__ = ["compile_options", "partition_fn"]

_Graphs = tuple[fx.GraphModule, fx.GraphModule]

# If neither the program nor earlier steps say how large the offload window is: the link of a fast GPU takes about 10 ms
# for so many bytes.
_DEFAULT_WINDOW_BYTES = 512 << 20

# Inductor holds a buffer that nobody reads any more until it makes one of the same size, if its own estimate of the
# peak allows that. It knows nothing of values that are reloaded meanwhile: on a CPU, a GPT's peak was 17% higher
# than predicted with this reuse, and 2% without.
_PLANNED_OPTIONS = {"allow_buffer_reuse": False}


@functools.cache  # so that each text is given once
def _warn_of(difference: str) -> None:
    warn_user(
        f"torchoffload: torch {torch.__version__} partitions graphs in another way than is known here ({difference}). "
        "Saved values do not move inside of compiled graphs; contexts around them work as without compile_options()."
    )


def _difference() -> str | None:
    """Return the difference in PyTorch's private functions that a partitioner depends on; None if there is none."""
    try:
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor import config
        from torch._inductor.custom_graph_pass import CustomPartitionerFn
    except ImportError as error:
        return str(error)
    if not hasattr(config, "custom_partitioner_fn"):
        return "torch._inductor.config has no custom_partitioner_fn"
    if not {"__call__", "uuid"} <= CustomPartitionerFn.__abstractmethods__:
        return "a CustomPartitionerFn has other methods"
    parameters = inspect.signature(min_cut_rematerialization_partition).parameters
    names = list(parameters)
    if names[:2] != ["joint_module", "_joint_inputs"] or "num_fwd_outputs" not in names:
        return "min_cut_rematerialization_partition has other parameters"
    return None


def _difference_for_plans() -> str | None:
    """Return the difference in the private functions that plans for graphs depend on; None if there is none."""
    from torch._functorch import partitioners
    from torch.utils import _python_dispatch

    if (difference := _difference()) is not None:
        return difference
    if not hasattr(_python_dispatch, "_disable_current_modes"):
        return "torch.utils._python_dispatch has no _disable_current_modes"
    for name in ("choose_saved_values_set", "get_default_op_list", "NodeInfo"):
        if not hasattr(partitioners, name):
            return f"torch._functorch.partitioners has no {name}"
    if list(inspect.signature(partitioners.choose_saved_values_set).parameters)[:2] != ["joint_graph", "node_info"]:
        return "choose_saved_values_set has other parameters"
    if not {"inputs", "required_bw_nodes"} <= partitioners.NodeInfo.__dataclass_fields__.keys():
        return "NodeInfo has other fields"
    return None


def _context_options() -> OffloadOptions | None:
    """Return the options of the context that gets the next saved tensor of this thread; None if there is none."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return None
    for entry in hook_stack.innermost_first():
        if entry.hooks is not None and entry.hooks.pack_hook is hooks[0]:
            return entry.hooks.options if isinstance(entry.hooks, OffloadActivations) else None
    return None


def _moves(options: OffloadOptions, *, by_inductor: bool) -> Any:
    from torchoffload._compile.rewrite import Moves

    window_bytes = options.offload_window_bytes
    if window_bytes is None and options.max_fwd_stash_size is None:
        window_bytes = _DEFAULT_WINDOW_BYTES
    leaves_images = by_inductor and _chooses_layouts()
    return Moves(options.min_offload_bytes, window_bytes, options.max_fwd_stash_size or 1, leaves_images)


def _stock_partition(joint: fx.GraphModule, inputs: Any, **keywords: Any) -> _Graphs:
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, inputs, **keywords)


def _chooses_layouts() -> bool:
    from torch._inductor import config

    return bool(config.layout_optimization)


def _captures_cuda_graphs() -> bool:
    from torch._inductor import config

    return bool(config.triton.cudagraphs)


_choosing = threading.RLock()  # the function of PyTorch's that is replaced meanwhile is the whole process's


@contextlib.contextmanager
def _choosing_by(choose: Callable[..., list[fx.Node]]) -> Iterator[None]:
    """Have PyTorch ask a function for the values that are saved. Its first argument is PyTorch's own function."""
    from torch._functorch import partitioners

    with _choosing:
        own = partitioners.choose_saved_values_set
        partitioners.choose_saved_values_set = functools.partial(choose, own)
        try:
            yield
        finally:
            partitioners.choose_saved_values_set = own


class _Chooser:
    """The plan for one joint graph, made at the moment at which PyTorch chooses the values that are saved."""

    def __init__(self, room: "Room", num_fwd_outputs: int, *, leaves_images: bool) -> None:
        self.plan: GraphPlan | None = None
        self._room, self._num_fwd_outputs, self._leaves_images = room, num_fwd_outputs, leaves_images

    def choose(
        self, own: Callable[..., list[fx.Node]], joint_graph: fx.Graph, node_info: Any, **_budget: Any
    ) -> list[fx.Node]:
        """Return the values that the plan saves, and those that cost nothing."""
        from torchoffload._compile.joint_graph import JointGraph
        from torchoffload._compile.joint_plan import plan_graph
        from torchoffload._compile.planned import device_rates

        # The whole budget: PyTorch computes only cheap operators again, and no random ones.
        stock = own(joint_graph, node_info, memory_budget=1)
        device_type = next((value.device.type for value in _values(joint_graph) if value.device.type != "cpu"), "cpu")
        joint = JointGraph(
            joint_graph, set(node_info.required_bw_nodes), stock, self._num_fwd_outputs, device_rates(device_type),
            leaves_images=self._leaves_images,
        )  # fmt: skip
        if not joint.is_known or not joint.pieces:
            return stock
        self.plan = plan_graph(joint, self._room)
        if self.plan.saved is None:
            return stock
        outside = [node for node in stock if node not in joint.group_of]
        return list(dict.fromkeys([*outside, *node_info.inputs, *_numbers(joint_graph, node_info), *self.plan.saved]))


def _choose_joined(
    own: Callable[..., list[fx.Node]], joint_graph: fx.Graph, node_info: Any, *, leaves_images: bool, **budget: Any
) -> list[fx.Node]:
    """Return the values that PyTorch saves, with one in place of several views of it."""
    from torchoffload._compile.rewrite import Movable

    saved = own(joint_graph, node_info, **budget)
    joined = Movable.of_joint_graph(joint_graph, leaves_images=leaves_images).joined(saved)
    return saved if joined == saved else list(dict.fromkeys([*joined, *_numbers(joint_graph, node_info)]))


def _numbers(joint_graph: fx.Graph, node_info: Any) -> list[fx.Node]:
    """Return the sizes that forward knows: backward may need them to make views of what is saved."""
    numbers = [node for node in joint_graph.nodes if isinstance(node.meta.get("val"), torch.SymInt)]
    return [node for node in numbers if node not in node_info.required_bw_nodes]


def _values(graph: fx.Graph) -> Iterator[torch.Tensor]:
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            yield value


def _graph_metadata() -> Any:
    """Return AOTAutograd's description of the graph that is being partitioned, which its cache keeps with the graph.

    PyTorch hands it to no partitioner: it is a variable of the function that calls one. None: there is none where it
    is known, and a graph that comes out of the cache has no plan in ``report()``.
    """
    try:
        from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
    except ImportError:
        return None
    frame = inspect.currentframe()
    while frame is not None:
        metadata = frame.f_locals.get("fw_metadata")
        if isinstance(metadata, ViewAndMutationMeta):
            return metadata
        frame = frame.f_back
    return None


def _planned_partition(
    joint: fx.GraphModule, inputs: Any, num_fwd_outputs: int, memory: "Memory", options: OffloadOptions | None,
    notes: "PlanNotes | None", *, leaves_images: bool, **keywords: Any,
) -> "tuple[_Graphs, GraphPlan | None]":  # fmt: skip
    """Partition a graph by a plan; ``options``: of the context that values move by, None if none may move."""
    from torchoffload._compile.planned import PlansOfCachedGraph, note_plan, room
    from torchoffload._compile.rewrite import has_tokens

    if (difference := _difference_for_plans()) is not None:
        _warn_of(difference)
        return _stock_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **keywords), None
    if options is not None and has_tokens(joint.graph.nodes):
        options = None
        warn_user(
            "torchoffload: a compiled graph has a region (torch.compiler.nested_compile_region) that moves values by "
            "a plan of its own. Values outside of such regions stay or are computed again, and none of them move."
        )
    chooser = _Chooser(room(memory, options), num_fwd_outputs, leaves_images=leaves_images)
    with _choosing_by(chooser.choose):
        graphs = _stock_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **keywords)
    if chooser.plan is not None:
        if chooser.plan.releases and options is not None and options.learn:
            warn_user(
                "By the plan of compile_options(memory=...), values of a compiled graph move, and the context that "
                "moves them learns from its steps. Such a context keeps some of these values on the device and widens "
                "its windows, so a step may take more than the memory. Give the context learn=False."
            )
        note_plan(memory, chooser.plan, in_context=_context_options() is not None, notes=notes)
        metadata = _graph_metadata()
        if metadata is not None:
            former = getattr(metadata, "torchoffload_plans", PlansOfCachedGraph(()))
            metadata.torchoffload_plans = PlansOfCachedGraph((*former.plans, chooser.plan))
    return graphs, chooser.plan


def _partition(
    joint: fx.GraphModule, inputs: Any, num_fwd_outputs: int, *, by_inductor: bool, memory: "Memory | None" = None,
    notes: "PlanNotes | None" = None, may_move: bool = True, **keywords: Any,
) -> _Graphs:  # fmt: skip
    options = _context_options() if may_move else None
    moves = None if options is None else _moves(options, by_inductor=by_inductor)
    plan = None
    if memory is not None:
        leaves_images = moves is not None and moves.leaves_images
        graphs, plan = _planned_partition(
            joint, inputs, num_fwd_outputs, memory, options, notes, leaves_images=leaves_images, **keywords
        )
    elif moves is None or _difference_for_plans() is not None:
        graphs = _stock_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **keywords)
    else:
        with _choosing_by(functools.partial(_choose_joined, leaves_images=moves.leaves_images)):
            graphs = _stock_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **keywords)
    if moves is None:
        return graphs
    if (difference := _difference()) is not None:
        _warn_of(difference)
        return graphs
    from torchoffload._compile.rewrite import GraphsDiffer, move_saved_values

    if plan is not None:
        moves = replace(moves, releases=plan.releases, keeps_inputs=not plan.is_tight)
    try:
        count, _ = move_saved_values(*graphs, num_fwd_outputs, moves)
    except GraphsDiffer as error:
        _warn_of(str(error))
        return graphs
    if plan is not None and count < len(plan.releases):
        warn_user(
            f"torchoffload: {len(plan.releases) - count} of the {len(plan.releases)} values that a plan moves cannot "
            "move inside of the compiled graph. They go to the context as forward ends, so that a step may take more "
            "memory than predicted. Please report this."
        )
    return graphs


@is_not_traced
def partition_fn(
    joint_module: fx.GraphModule,
    joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    memory: float | str | None = None,
    graphs: int = 1,
    link_bytes_per_s: float | None = None,
    **keywords: Any,
) -> _Graphs:
    """Partition a joint graph as PyTorch does, and have the values that forward saves move by the present context.

    It is for backends that are made by ``aot_autograd``; inductor gets it by ``compile_options()``. To plan for an
    amount of memory, give ``functools.partial(torchoffload.partition_fn, memory=...)``.

    Parameters
    ----------
    joint_module : torch.fx.GraphModule
        The joint graph.
    joint_inputs : sequence
        Its inputs.
    num_fwd_outputs : int
        How many of its outputs are those of the model.
    memory, graphs, link_bytes_per_s
        As for ``compile_options``.
    **keywords
        The other keywords of ``min_cut_rematerialization_partition``.

    Returns
    -------
    tuple of torch.fx.GraphModule
        The graphs of forward and backward.

    Examples
    --------
    >>> from torch._dynamo.backends.common import aot_autograd
    >>> backend = aot_autograd(fw_compiler=compiler, partition_fn=torchoffload.partition_fn)
    >>> model = torch.compile(model, backend=backend)
    """
    from torchoffload._compile.planned import checked_memory

    checked = checked_memory(memory, graphs, link_bytes_per_s)
    return _partition(joint_module, joint_inputs, num_fwd_outputs, by_inductor=False, memory=checked, **keywords)


@functools.cache
def _sources() -> str:
    """Return a digest of the sources that plan and rewrite graphs."""
    digest = hashlib.sha256(build_info.version.encode())
    here = Path(__file__).parent
    others = (here.parent / "_fit" / "plan", here.parent / "_estimate")
    for path in sorted(path for folder in (here, *others) for path in folder.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _plan_key(memory: "Memory | None", options: OffloadOptions | None) -> str:
    """Return all that a plan depends on beside the joint graph."""
    if memory is None:
        return ""
    from torchoffload._compile.planned import device_rates, planned_device, room

    return f" {room(memory, options)!r} {device_rates(planned_device().type)!r}"


@functools.cache
def _partitioner_class() -> type:
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        """The partitioner of ``compile_options()``."""

        def __init__(self, memory: "Memory | None", notes: "PlanNotes | None") -> None:
            self._own_memory, self._notes = memory, notes

        @property
        def _memory(self) -> "Memory | None":
            return self._own_memory if self._notes is None else self._notes.memory

        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **keywords: Any) -> _Graphs:
            may_move = not _captures_cuda_graphs()
            if not may_move and _context_options() is not None:
                warn_user(
                    "torchoffload: values inside of a graph that is compiled with CUDA graphs do not move, and the "
                    'context keeps what it saves: compile without mode="reduce-overhead" and triton.cudagraphs.'
                )
            given = {**keywords, "memory": self._memory, "notes": self._notes, "may_move": may_move}
            return _partition(gm, joint_inputs, given.pop("num_fwd_outputs"), by_inductor=True, **given)

        def uuid(self) -> str:
            """Return the choices that the graphs depend on beside the joint graph, for keys of inductor's caches.

            PyTorch asks for them as it begins to look for a graph in a cache.
            """
            from torchoffload._compile.planned import Lookup, note_lookup

            given = _context_options()
            note_lookup(None if self._memory is None else Lookup(self._memory, given is not None, self._notes))
            options = None if _captures_cuda_graphs() else given
            moves = None if options is None else _moves(options, by_inductor=True)
            return f"torchoffload {_sources()} {moves!r}{_plan_key(self._memory, options)}"

        def __reduce__(self) -> tuple[Any, ...]:  # the keys of the caches hold a pickle of all options
            return _partitioner, (self._memory,)

    return Partitioner


@functools.cache
def _partitioner(memory: "Memory | None" = None) -> Callable[..., _Graphs]:
    made: Callable[..., _Graphs] = _partitioner_class()(memory, None)
    return made


class _PlannedGraphs:
    """The graphs of a model that ``fit`` compiles; see ``PlannedGraphs`` in ``_contexts/planned_graphs.py``."""

    def __init__(self, nbytes: int, graphs: int, sets_reload_window: bool) -> None:
        from torchoffload._compile.planned import Memory, PlanNotes

        self.graphs = graphs
        self._notes = PlanNotes(Memory(nbytes, graphs, sets_reload_window=sets_reload_window))

    @property
    def nbytes(self) -> int:
        return self._notes.memory.nbytes

    @nbytes.setter
    def nbytes(self, nbytes: int) -> None:
        self._notes.memory = replace(self._notes.memory, nbytes=nbytes)

    @property
    def plans(self) -> "tuple[GraphPlan, ...]":
        return self._notes.plans

    @property
    def all_plans(self) -> "tuple[GraphPlan, ...]":
        return self._notes.all_plans

    def lines(self, first_number: int) -> list[str]:
        return self._notes.lines(first_number)

    def options(self) -> dict[str, Any]:
        """Return the options; none if PyTorch partitions graphs in a way that is not known here."""
        if (difference := _difference_for_plans()) is not None:
            _warn_of(difference)
            return {}
        from torchoffload._compile import operators  # noqa: F401  (code from a cache calls them)

        return {"custom_partitioner_fn": _partitioner_class()(None, self._notes), **_PLANNED_OPTIONS}


register_planner(_PlannedGraphs)


@is_not_traced
def compile_options(
    *, memory: float | str | None = None, graphs: int = 1, link_bytes_per_s: float | None = None
) -> dict[str, Any]:
    """Return options for ``torch.compile`` with which saved values move inside of a compiled graph.

    Without them a compiled region hands over all its saved tensors as its forward ends. With them each value that the
    graph saves moves while the graph goes on computing, and comes back while backward runs. That is decided as the
    graph is compiled: it moves its values if it was compiled inside of an ``OffloadActivations``, by the options
    ``min_offload_size``, ``offload_window_bytes`` and ``max_fwd_stash_size`` of that context. A graph that was compiled
    outside of a context is PyTorch's own.

    With ``memory`` each graph is planned as it is compiled: for each value whether it is kept, moved or computed again,
    so that the predicted peak is within the memory and the predicted time is least. Values move if the graph was
    compiled inside of an ``OffloadActivations``; otherwise they are kept or computed again. ``report()`` tells it. The
    options then turn inductor's ``allow_buffer_reuse`` off: it would hold buffers that nobody reads any more.

    Parameters
    ----------
    memory : int, float, str or None, default None
        The memory that compiled graphs may use: a number of bytes, a text such as ``"40GiB"``, or a fraction of the
        device. It counts their inputs (weights, buffers and the batch), gradients, saved values and temporaries. All
        else that is on the device, such as an optimizer's state, has to be subtracted. None: nothing is planned.
    graphs : int, default 1
        How many calls of compiled graphs a step has, if the model is not compiled as a whole. They share the memory.
    link_bytes_per_s : float or None, default None
        The rate of the link in either direction, in bytes a second. None: it is measured when the first graph is
        planned, and rounded to a power of the square root of 2, so that the keys of compile caches stay the same.

    Returns
    -------
    dict
        For ``torch.compile(model, options=...)``, alone or together with other options of inductor. It is empty, and a
        UserWarning is given, if this release of PyTorch partitions graphs in a way that is not known here.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type or value.

    Examples
    --------
    >>> model = torch.compile(model, options=torchoffload.compile_options())
    >>> with torchoffload.OffloadActivations():
    ...     loss = model(batch).loss
    >>> loss.backward()
    """
    from torchoffload._compile.planned import checked_memory

    checked = checked_memory(memory, graphs, link_bytes_per_s)
    if (difference := _difference()) is not None:
        _warn_of(difference)
        return {}
    from torchoffload._compile import operators  # noqa: F401  (code from a cache calls them)

    return {"custom_partitioner_fn": _partitioner(checked), **({} if checked is None else _PLANNED_OPTIONS)}
