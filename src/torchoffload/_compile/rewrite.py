"""Rewriting the two graphs of a partitioned model, so that values which the forward saves move between them."""

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from torchoffload._compile import operators

__all__ = [
    "GraphsDiffer",
    "Movable",
    "Moves",
    "has_tokens",
    "hint",
    "move_saved_values",
    "numbers_behind",
    "storage_of",
    "value_of",
]

# Compiled kernels may take it that the addresses of their inputs are multiples of this, and that the values which they
# compute themselves have such addresses.
_ALIGNMENT_BYTES = 16
_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


class GraphsDiffer(Exception):
    """The two graphs do not fit together as those of the known releases of PyTorch do. Neither was changed."""


@dataclass(frozen=True)
class Moves:
    """The choice of the values that move between two graphs.

    Attributes
    ----------
    least_bytes : int
        Smaller values stay. A size that is not known before the graph runs is reckoned by the example that the graph
        was traced with.
    window_bytes : int or None
        The graph waits for the copy of a value behind the pack of so many bytes of later values.
    window_values : int
        If ``window_bytes`` is None: it waits behind as many bytes as this many of the largest value.
    releases : mapping of str to str or None, or None
        The plan of the graph, if it has one. Only these values move, by the names of their nodes: the graph waits for
        the copy of each behind the later saved value of that name; None: at its end. Contexts leave all other values
        where they are.
    keeps_inputs : bool
        Whether contexts leave the saved inputs of a planned graph where they are, too.
    leaves_images : bool
        In a graph with convolutions, tensors of four dimensions stay. Inductor may give them other strides than the
        graph says, and decides that after it was partitioned.
    """

    least_bytes: int
    window_bytes: int | None
    window_values: int = 1
    leaves_images: bool = False
    keeps_inputs: bool = True
    releases: Mapping[str, str | None] | None = None


@dataclass(frozen=True)
class _Saved:
    """One value that moves: its place among the outputs of forward, its node there, and its input of backward."""

    place: int
    node: fx.Node
    received: fx.Node
    nbytes: int


def value_of(node: object) -> torch.Tensor | None:
    """Return the tensor that a node stands for; None if it stands for something else."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def hint(number: int | torch.SymInt) -> int | None:
    """Return the number, or the example that it was traced with; None if there is none. Asking adds no guard."""
    return number if isinstance(number, int) else number.node.hint


def has_tokens(nodes: Iterable[fx.Node]) -> bool:
    """Return whether tokens are among values: a region inside of the graph moves values of its own."""
    values = map(value_of, nodes)
    return any(value is not None and value.dtype is operators.TOKEN_TYPE for value in values)


def storage_of(value: torch.Tensor) -> StorageWeakRef | None:
    """Return the memory that a tensor is in, as a value to compare; None for a layout that has no storage."""
    try:
        return StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]
    except (RuntimeError, NotImplementedError):  # a layout without storage
        return None


def _storages(nodes: Iterable[object]) -> set[StorageWeakRef | None]:
    values = (value_of(node) for node in nodes)
    return {storage_of(value) for value in values if value is not None}


def _output(graph: fx.Graph) -> fx.Node:
    node: fx.Node = next(iter(graph.find_nodes(op="output")))
    return node


def _returned(graph: fx.Graph) -> list[Any]:
    """Return the outputs of a graph."""
    return list(_output(graph).args[0])  # type: ignore[arg-type]


def _movable_bytes(value: torch.Tensor) -> int | None:
    """The bytes of a plain tensor that an operator of ours can save; None if it cannot."""
    if value.layout is not torch.strided or is_traceable_wrapper_subclass(value):
        return None
    if value.is_conj() or value.is_neg() or value.is_quantized:
        return None
    offset = hint(value.storage_offset())
    if not isinstance(value.storage_offset(), int) or offset is None or offset * value.itemsize % _ALIGNMENT_BYTES:
        return None
    count = hint(value.numel())
    return None if count is None else count * value.itemsize


def _base_of(node: fx.Node) -> fx.Node | None:
    """Return the value that a value is a view of; None if an operator on the way reads another tensor as well."""
    base, storage = node, None if (value := value_of(node)) is None else storage_of(value)
    while storage is not None and node.op == "call_function":
        read = [each for each in node.all_input_nodes if not isinstance(each.meta.get("val"), torch.SymInt)]
        viewed = [each for each in read if storage in _all_storages(each)]
        if not viewed:
            return base
        if len(read) > 1:
            return None
        (node,) = viewed
        if value_of(node) is not None:
            base = node
    return None


def _all_storages(node: fx.Node) -> set[StorageWeakRef | None]:
    """Return the memory that each result of an operator is in."""
    value = node.meta.get("val")
    several = value if isinstance(value, (list, tuple)) else [value]
    return {storage_of(each) for each in several if isinstance(each, torch.Tensor)}


class Movable:
    """The values of a graph that may move: for planners and for the rewriting.

    Parameters
    ----------
    nodes : iterable of fx.Node
        All of the graph.
    others : iterable
        The inputs and outputs of the graph. Their memory is not the graph's own, so that nothing is freed by moving it.
    leaves_images : bool
        As in ``Moves``.
    """

    def __init__(self, nodes: Iterable[fx.Node], others: Iterable[object], *, leaves_images: bool) -> None:
        nodes = list(nodes)
        self._others = _storages(others)
        self._leaves_images = leaves_images and any(node.target in _CONVOLUTIONS for node in nodes)
        devices = {value.device.type for value in map(value_of, nodes) if value is not None}
        self._leaves_cpu = devices != {"cpu"}

    @classmethod
    def of_joint_graph(cls, graph: fx.Graph, *, leaves_images: bool) -> "Movable":
        """Return the values of a graph that was not partitioned yet."""
        others = [*tree_leaves(_output(graph).args), *graph.find_nodes(op="placeholder")]
        return cls(graph.nodes, others, leaves_images=leaves_images)

    def nbytes(self, node: fx.Node) -> int | None:
        """Return the bytes of a value that may move; None if it may not."""
        value = value_of(node)
        if value is None or node.op != "call_function" or storage_of(value) in self._others:
            return None
        if (self._leaves_images and value.dim() == 4) or (self._leaves_cpu and value.device.type == "cpu"):
            return None
        return _movable_bytes(value)

    def joined(self, saved: Sequence[fx.Node]) -> list[fx.Node]:
        """Return values to save, with one in place of several views of it: its memory would move once for each."""
        views: dict[fx.Node, list[fx.Node]] = {}
        for node in saved:
            if (base := _base_of(node)) is not None and self.nbytes(base) is not None:
                views.setdefault(base, []).append(node)
        base_by_view = {view: base for base, several in views.items() if len(several) > 1 for view in several}
        return list(dict.fromkeys(base_by_view.get(node, node) for node in saved))


def _find_saved(forward: fx.Graph, backward: fx.Graph, num_fwd_outputs: int, moves: Moves) -> list[_Saved]:
    """Return the values that move, in the order in which forward makes them."""
    outputs = _returned(forward)
    received = {node.name: node for node in backward.find_nodes(op="placeholder")}
    order = {node: number for number, node in enumerate(forward.nodes)}
    inputs = forward.find_nodes(op="placeholder")
    others = [*inputs, *outputs[:num_fwd_outputs], *_output(backward).args[0]]  # type: ignore[misc]
    movable = Movable([*order, *backward.nodes], others, leaves_images=moves.leaves_images)
    found = []
    for place, node in enumerate(outputs[num_fwd_outputs:], num_fwd_outputs):
        value = value_of(node)
        if not isinstance(node, fx.Node) or value is None:
            continue
        if node.name not in received:
            raise GraphsDiffer(f"backward has no input {node.name}")
        taken = received[node.name]
        taken_value = value_of(taken)
        if taken_value is None or taken_value.dtype is not value.dtype or taken_value.dim() != value.dim():
            raise GraphsDiffer(f"the input {taken.name} of backward is another value")
        nbytes = movable.nbytes(node)
        if nbytes is None or not taken.users:
            continue
        is_chosen = nbytes >= max(moves.least_bytes, 1) if moves.releases is None else node.name in moves.releases
        if is_chosen:
            found.append(_Saved(place, node, taken, nbytes))
    return sorted(found, key=lambda saved: order[saved.node])


def _set_value(node: fx.Node, like: fx.Node, value: torch.Tensor) -> None:
    """Give a node of ours the notes of another one, and its own value."""
    node.meta = {name: note for name, note in like.meta.items() if name not in ("tensor_meta", "eager_input_vals")}
    node.meta["val"] = value


def _fake(example: torch.Tensor, target: Any, *arguments: Any) -> torch.Tensor:
    with example.fake_mode:  # type: ignore[attr-defined]
        made: torch.Tensor = target(*arguments)
    return made


def numbers_behind(sizes: Sequence[int], window_bytes: int) -> list[int | None]:
    """Return, for each of several values in order, the number of the later one with which a window of bytes is full."""
    found: list[int | None] = []
    for number in range(len(sizes)):
        passed = itertools.accumulate(sizes[number + 1 :])
        found.append(next((later for later, nbytes in enumerate(passed, number + 1) if nbytes >= window_bytes), None))
    return found


def _released_behind(saved: list[_Saved], moves: Moves, kept: list[fx.Node]) -> list[fx.Node | None]:
    """Return the value behind which the graph waits for the copy of each value; None: at its end.

    It is a value that has memory of its own in any case, one that is saved. To ask for another one could change the
    fusions of a compiler, and with them the last bits.
    """
    if moves.releases is not None:
        named = {node.name: node for node in (*kept, *(each.node for each in saved))}
        return [named.get(moves.releases[each.node.name] or "") for each in saved]
    window_bytes = moves.window_bytes
    if window_bytes is None:
        window_bytes = moves.window_values * max((each.nbytes for each in saved), default=0)
    behind = numbers_behind([each.nbytes for each in saved], window_bytes)
    return [None if number is None else saved[number].node for number in behind]


def _behind(node: fx.Node) -> fx.Node:
    """Return the last of the nodes that take apart and pack the results of one operator, if ``node`` is one."""
    while node.next.op == "call_function" and node.next.target in (operator.getitem, operators.pack):
        node = node.next
    return node


def _rewrite_forward(graph: fx.Graph, saved: list[_Saved], behind: list[fx.Node | None], num_fwd_outputs: int) -> None:
    output = _output(graph)
    outputs = _returned(graph)
    order = {node: number for number, node in enumerate(graph.nodes)}
    returned = [node for node in outputs[:num_fwd_outputs] if value_of(node) is not None and node.op == "call_function"]
    returned.sort(key=lambda node: -order[node])
    packed = {}
    for number, each in enumerate(saved):
        each.node.meta["inductor_realize_to_strides"] = True  # in one place, as a value that is saved
        with graph.inserting_after(_behind(each.node)):
            token = graph.call_function(operators.pack, (each.node, number))
        value = each.node.meta["val"]
        _set_value(token, each.node, _fake(value, operators.pack, value, number))
        token.meta.pop("inductor_realize_to_strides")
        packed[each.node] = token
    for number, (each, after) in enumerate(zip(saved, behind, strict=True)):
        token = packed[each.node]
        if after is not None and order[after] > order[each.node]:
            at = graph.inserting_after(packed.get(after, _behind(after)))
        else:  # behind what comes last, so that no compiler puts it earlier
            later = [node for node in (*returned, saved[-1].node) if order[node] > order[each.node]]
            after, at = (later[0] if later else None), graph.inserting_before(output)
        with at:
            released = graph.call_function(operators.release, (token, each.node, after))
        _set_value(released, token, _fake(each.node.meta["val"], operators.pack, each.node.meta["val"], number))
        outputs[each.place] = released
    output.args = (tuple(outputs),)


def _rewrite_backward(graph: fx.Graph, saved: list[_Saved]) -> None:
    order = {node: number for number, node in enumerate(graph.nodes)}
    for number, each in enumerate(saved):
        old, value = each.received, each.received.meta["val"]
        with graph.inserting_before(old):
            token = graph.placeholder(f"{old.name}_token")
        _set_value(token, old, _fake(value, operators.pack, value, number))
        first = min(old.users, key=lambda user: order.get(user, 0))
        with graph.inserting_before(first):
            unpacked = graph.call_function(operators.unpack, (token, value.device, value.dtype))
        _set_value(unpacked, old, value)
        old.replace_all_uses_with(unpacked)
        graph.erase_node(old)


def _find_kept(forward: fx.Graph, num_fwd_outputs: int, moves: Moves) -> list[fx.Node]:
    """Return the saved tensors that stay by the plan. Those that are to move and cannot do so here go to hooks."""
    kept: dict[fx.Node, None] = {}
    for node in _returned(forward)[num_fwd_outputs:]:
        if not moves.keeps_inputs and isinstance(node, fx.Node) and node.op == "placeholder":
            continue
        value = value_of(node)
        is_plain = value is not None and value.layout is torch.strided and not is_traceable_wrapper_subclass(value)
        is_plain = is_plain and not has_tokens([node])
        if is_plain and moves.releases is not None and node.name not in moves.releases:
            kept[node] = None
    return list(kept)


def _take_kept(backward: fx.Graph, first: fx.Node, value: torch.Tensor) -> None:
    """Have backward take the note of the values that stay before ``first``, the first saved value of forward."""
    taken = next((node for node in backward.find_nodes(op="placeholder") if node.name == first.name), None)
    if taken is None:
        raise GraphsDiffer(f"backward has no input {first.name}")
    with backward.inserting_before(taken):
        note = backward.placeholder("kept_note")
    _set_value(note, taken, value)


def _keep(forward: fx.Graph, kept: list[fx.Node], first: fx.Node, num_fwd_outputs: int, value: torch.Tensor) -> None:
    """Have forward tell contexts that values stay, and save the note of it before all others."""
    output = _output(forward)
    with forward.inserting_before(output):
        note = forward.call_function(operators.keep, (kept,))
    _set_value(note, first, value)
    outputs = _returned(forward)
    outputs.insert(num_fwd_outputs, note)
    output.args = (tuple(outputs),)
    if (descriptions := output.meta.get("desc")) is not None:
        place = num_fwd_outputs
        output.meta["desc"] = [*descriptions[:place], descriptions[place], *descriptions[place:]]


def move_saved_values(
    forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int, moves: Moves
) -> tuple[int, int]:
    """Rewrite both graphs in place, so that the values which forward saves for backward move between them.

    Parameters
    ----------
    forward, backward : torch.fx.GraphModule
        The graphs that a partitioner has made of one joint graph.
    num_fwd_outputs : int
        How many of forward's outputs are those of the model; the saved values follow them.
    moves : Moves
        Which values move, and how long their copies may take.

    Returns
    -------
    (int, int)
        How many values move, and their bytes by the example that the graph was traced with.

    Raises
    ------
    GraphsDiffer
        The graphs do not fit together in the known way.
    """
    # A compiler might give the memory of a token of a region inside, which has none, to a token of this graph.
    may_move = not has_tokens([*forward.graph.nodes, *backward.graph.nodes])
    saved = _find_saved(forward.graph, backward.graph, num_fwd_outputs, moves) if may_move else []
    kept = _find_kept(forward.graph, num_fwd_outputs, moves)
    if kept:
        first, example = _returned(forward.graph)[num_fwd_outputs], kept[0].meta["val"]
        value = _fake(example, operators.keep, [example])
        _take_kept(backward.graph, first, value)
    if saved:
        _rewrite_forward(forward.graph, saved, _released_behind(saved, moves, kept), num_fwd_outputs)
        _rewrite_backward(backward.graph, saved)
    if kept:
        _keep(forward.graph, kept, first, num_fwd_outputs, value)
    if saved or kept:
        for module in (forward, backward):
            module.graph.lint()
            module.recompile()
    return len(saved), sum(each.nbytes for each in saved)
