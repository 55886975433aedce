"""The partitioner that has saved values move inside of compiled graphs, and the options that give it to inductor."""

import functools
import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx

from torchoffload._contexts.offload_activations import OffloadActivations
from torchoffload._contexts.options import OffloadOptions
from torchoffload._core import build_info
from torchoffload._pytorch import hook_stack
from torchoffload._pytorch.tracing import is_not_traced
from torchoffload._warnings import warn_user

__all__ = ["compile_options", "partition_fn"]

_Graphs = tuple[fx.GraphModule, fx.GraphModule]

# If neither the program nor earlier steps say how large the offload window is: the link of a fast GPU takes about 10 ms
# for so many bytes.
_DEFAULT_WINDOW_BYTES = 512 << 20


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


def _partition(
    joint: fx.GraphModule, inputs: Any, num_fwd_outputs: int, *, by_inductor: bool, **keywords: Any
) -> _Graphs:
    graphs = _stock_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **keywords)
    options = _context_options()
    if options is None:
        return graphs
    if (difference := _difference()) is not None:
        _warn_of(difference)
        return graphs
    from torchoffload._compile.rewrite import GraphsDiffer, move_saved_values

    try:
        move_saved_values(*graphs, num_fwd_outputs, _moves(options, by_inductor=by_inductor))
    except GraphsDiffer as error:
        _warn_of(str(error))
    return graphs


@is_not_traced
def partition_fn(joint_module: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **keywords: Any) -> _Graphs:
    """Partition a joint graph as PyTorch does, and have the values that forward saves move by the present context.

    It is for backends that are made by ``aot_autograd``; inductor gets it by ``compile_options()``.

    Parameters
    ----------
    joint_module : torch.fx.GraphModule
        The joint graph.
    joint_inputs : sequence
        Its inputs.
    num_fwd_outputs : int
        How many of its outputs are those of the model.
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
    return _partition(joint_module, joint_inputs, num_fwd_outputs, by_inductor=False, **keywords)


@functools.cache
def _sources() -> str:
    """Return a digest of the sources that rewrite graphs."""
    digest = hashlib.sha256(build_info.version.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _partitioner() -> Callable[..., _Graphs]:
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        """The partitioner of ``compile_options()``."""

        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **keywords: Any) -> _Graphs:
            if _captures_cuda_graphs() and _context_options() is not None:
                warn_user(
                    "torchoffload: values inside of a graph that is compiled with CUDA graphs do not move, and the "
                    'context keeps what it saves: compile without mode="reduce-overhead" and triton.cudagraphs.'
                )
                return _stock_partition(gm, joint_inputs, **keywords)
            return _partition(gm, joint_inputs, keywords.pop("num_fwd_outputs"), by_inductor=True, **keywords)

        def uuid(self) -> str:
            """Return the choices that the graphs depend on beside the joint graph, for keys of inductor's caches."""
            options = _context_options()
            return f"torchoffload {_sources()} {None if options is None else _moves(options, by_inductor=True)!r}"

        def __reduce__(self) -> tuple[Any, ...]:  # the keys of the caches hold a pickle of all options
            return _partitioner, ()

    return Partitioner()


@is_not_traced
def compile_options() -> dict[str, Any]:
    """Return options for ``torch.compile`` with which saved values move inside of a compiled graph.

    Without them a compiled region hands over all its saved tensors as its forward ends. With them each value that the
    graph saves moves while the graph goes on computing, and comes back while backward runs. That is decided as the
    graph is compiled: it moves its values if it was compiled inside of an ``OffloadActivations``, by the options
    ``min_offload_size``, ``offload_window_bytes`` and ``max_fwd_stash_size`` of that context. A graph that was compiled
    outside of a context is PyTorch's own.

    Returns
    -------
    dict
        For ``torch.compile(model, options=...)``, alone or together with other options of inductor. It is empty, and a
        UserWarning is given, if this release of PyTorch partitions graphs in a way that is not known here.

    Examples
    --------
    >>> model = torch.compile(model, options=torchoffload.compile_options())
    >>> with torchoffload.OffloadActivations():
    ...     loss = model(batch).loss
    >>> loss.backward()
    """
    if (difference := _difference()) is not None:
        _warn_of(difference)
        return {}
    from torchoffload._compile import operators  # noqa: F401  (code from a cache calls them)

    return {"custom_partitioner_fn": _partitioner()}
