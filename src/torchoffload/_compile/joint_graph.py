"""The joint graph of a compiled model as blocks of groups of values, with their bytes and the times they take.

A group is one piece of memory that an operator makes, together with all views of it: to save one of them is to save
them all. An operator that makes several such pieces is a group without memory, which the groups of its results read.
A *piece* is the part of the graph that belongs to one block of the model, or the operators before or behind the blocks.
"""

import itertools
import math
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from torchoffload._compile.lifetimes import Lifetimes, Run
from torchoffload._compile.rewrite import Movable, hint, storage_of, value_of
from torchoffload._estimate.cards import Card
from torchoffload._estimate.operators import Cost, cost_of
from torchoffload._estimate.rates import seconds_of

__all__ = ["Group", "JointGraph", "Piece", "Rates", "may_compute_again"]

_LEAST_SHARE = 0.1  # of the time of a kernel: the cost of an operator that is fused with its readers
# These draw random numbers only if their probability of dropout is above 0, whatever their tags say.
_ATTENTIONS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
# Inductor fuses these as well, which PyTorch's partitioner does not take for fusible.
_FUSED_AS_WELL = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "cat", "constant_pad_nd", "embedding", "gather", "index", "select_scatter", "slice_scatter", "where",
        "_unsafe_index", "_unsafe_masked_index",
    )
    if hasattr(torch.ops.aten, name)
)  # fmt: skip
_TAGS = tuple(
    getattr(torch.Tag, name)
    for name in ("nondeterministic_seeded", "nondeterministic_bitwise")
    if hasattr(torch.Tag, name)
)


@dataclass(frozen=True)
class Rates:
    """How fast a device computes.

    Attributes
    ----------
    bytes_per_s : float
        The bytes that operators read and write.
    flops_per_s : float
        The floating-point operations of matrix products, convolutions and attention.
    card : Card or None
        The device, if it is a card whose figures are known: then ``estimate``'s efficiencies say how fast each kind of
        operator is there, and ``flops_per_s`` is not used.
    """

    bytes_per_s: float
    flops_per_s: float
    card: Card | None = None


@dataclass(eq=False)
class Group:
    """One piece of memory that an operator makes, or an operator that makes several.

    Attributes
    ----------
    number : int
        Its place in the graph.
    maker : fx.Node
        The operator, or the one that takes its result out of the operator's.
    nodes : list of fx.Node
        All values in this memory, the maker's first.
    piece : int
        The number of the piece that it belongs to.
    nbytes : int
        The size of the memory.
    seconds : float
        How long the operator takes.
    inputs : set of int
        The numbers of the groups that its nodes read.
    readers : set of int
        The numbers of the groups that read it.
    may_recompute : bool
        Whether its operator gives the same values whenever it is called.
    """

    number: int
    maker: fx.Node
    nodes: list[fx.Node]
    piece: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    inputs: set[int] = field(default_factory=set)
    readers: set[int] = field(default_factory=set)
    may_recompute: bool = False


@dataclass(frozen=True)
class Piece:
    """A part of the graph.

    Attributes
    ----------
    name : str
        The path of its module in the model; empty for the operators before and behind the blocks.
    groups : tuple of Group
        The groups of its forward, in order.
    """

    name: str
    groups: tuple[Group, ...]


def may_compute_again(node: fx.Node) -> bool:
    """Return whether an operator gives the same values whenever it is called, and does nothing else.

    Random operators, collectives, operators with effects, and operators that are neither PyTorch's own nor known to be
    without effects never are computed again.
    """
    target = node.target
    if target is operator.getitem:
        return True
    if "rand" in str(target):  # inductor's own draw numbers from a seed, and have no tag
        return False
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    if target._schema.is_mutable or node.meta.get("partitioner_tag") == "must_be_in_forward":
        return False
    if node.meta.get("recompute") is not None:  # the program itself chooses the values to compute again
        return False
    if target._schema.name.partition("::")[2] in _ATTENTIONS:
        return _argument(node, target, "dropout_p") == 0
    return not any(tag in target.tags for tag in _TAGS)


def _argument(node: fx.Node, target: torch._ops.OpOverload, name: str) -> object:
    if name in node.kwargs:
        return node.kwargs[name]
    for place, argument in enumerate(target._schema.arguments):
        if argument.name == name:
            return node.args[place] if place < len(node.args) else argument.default_value
    return None


def _elements(node: fx.Node) -> list[torch.Tensor]:
    """Return the tensors that a node makes."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    return [each for each in value if isinstance(each, torch.Tensor)] if isinstance(value, (list, tuple)) else []


def _memory_bytes(value: torch.Tensor) -> int:
    """Return the bytes of the memory that a tensor is in, by the example that it was traced with."""
    try:
        nbytes = hint(value.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError):  # a layout without storage
        nbytes = None
    if nbytes is None:
        count = hint(value.numel())
        nbytes = 0 if count is None else count * value.itemsize
    return nbytes


def _storages_of(node: fx.Node) -> Iterator[tuple[StorageWeakRef, int]]:
    """Yield the memory that each result of a node is in, and its bytes."""
    for value in _elements(node):
        storage = storage_of(value)
        if storage is not None:
            yield storage, _memory_bytes(value)


def _items(node: fx.Node) -> list[tuple[str, bool]]:
    """Return the modules around a node that are items of lists of modules, the outermost first.

    Each is the path of the module, and whether the node is in a module inside of it. PyTorch 2.9 writes an item as
    ``_modules['0']``.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [str(entry[0] if isinstance(entry, tuple) else entry) for entry in stack.values()]
    names = [re.sub(r"['\]]", "", path.replace("[", ".")).replace("._modules", "") for path in paths]
    found = [(name, place + 1 < len(names)) for place, name in enumerate(names)]
    return [(name, is_around) for name, is_around in found if name.rpartition(".")[2].isdigit()]


class _Blocks:
    """The blocks of a model: the outermost modules that are items of lists of modules, and have modules inside.

    So the layers of a sequence are no blocks.
    """

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._paths = {path for node in nodes for path, is_around in _items(node) if is_around}

    def of(self, node: fx.Node) -> str | None:
        """Return the path of the block that a node belongs to; None if it belongs to none."""
        return next((path for path, _ in _items(node) if path in self._paths), None)


class _Costs:
    """How long operators take."""

    def __init__(self, rates: Rates) -> None:
        from torch._functorch.partitioners import get_default_op_list

        self._rates = rates
        self._kinds = get_default_op_list()

    def is_cheap(self, node: fx.Node) -> bool:
        """Whether a compiler fuses an operator with its readers."""
        if getattr(node.target, "overloadpacket", None) in _FUSED_AS_WELL:
            return True
        return bool(self._kinds.is_fusible(node)) and not self._kinds.is_compute_intensive(node)

    def kernel_s(self, nbytes: float) -> float:
        """Return how long a kernel of fused operators takes that reads and writes so many bytes."""
        return nbytes / self._rates.bytes_per_s

    def seconds(self, node: fx.Node) -> float:
        """Return how long an operator takes that is not fused with others."""
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return 0.0
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), _sized)
        made = [_as_example(value) for value in _elements(node)]
        read = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        try:
            cost = cost_of(target, args, kwargs, read, made, [])
        except (TypeError, ValueError, AttributeError, IndexError, KeyError):  # this release calls it in another way
            nbytes = sum(_memory_bytes(value) for each in (node, *node.all_input_nodes) for value in _elements(each))
            cost = Cost("other", 0, nbytes, 0, torch.float32)
        if self._rates.card is not None:
            return seconds_of(cost, self._rates.card)
        return max(cost.nbytes / self._rates.bytes_per_s, cost.flops / self._rates.flops_per_s)


def _as_example(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor like another one, of the sizes that the graph was traced with."""
    sizes, strides = ([hint(each) or 1 for each in numbers] for numbers in (value.shape, value.stride()))
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")


def _sized(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return _as_example(value) if isinstance(value, torch.Tensor) and value.layout is torch.strided else value


class JointGraph:
    """The joint graph of one compiled function, before it is partitioned.

    Parameters
    ----------
    graph : fx.Graph
        The joint graph.
    backward : set of fx.Node
        The nodes that depend on gradients, or are returned as such.
    stock : list of fx.Node
        The values that PyTorch saves.
    num_fwd_outputs : int
        How many of the outputs are those of forward.
    rates : Rates
        Of the device.
    leaves_images : bool, default False
        As in ``Moves``.

    Attributes
    ----------
    forward_s, backward_s : list of float
        How long the forward and the backward of each piece take by PyTorch's own plan.
    groups : list of Group
        All groups that do not depend on gradients, in order.
    pieces : list of Piece
        The pieces, in the order of forward.
    group_of : dict of fx.Node to Group
        The group that a node is in.
    needed : set of int
        The numbers of the groups that backward's operators read.
    again : set of int
        The numbers of the groups that PyTorch has backward compute again.
    saved : dict of int to list of fx.Node
        The values that PyTorch saves of a group.
    stock : list of fx.Node
        All values that PyTorch saves.
    """

    def __init__(
        self, graph: fx.Graph, backward: set[fx.Node], stock: Sequence[fx.Node], num_fwd_outputs: int, rates: Rates,
        *, leaves_images: bool = False,
    ) -> None:  # fmt: skip
        self._graph, self._backward, self._leaves_images = graph, backward, leaves_images
        self._costs = _Costs(rates)
        flat = tree_leaves(next(iter(graph.find_nodes(op="output"))).args)
        self.forward_outputs = [node for node in flat[:num_fwd_outputs] if isinstance(node, fx.Node)]
        self.backward_outputs = [node for node in flat[num_fwd_outputs:] if isinstance(node, fx.Node)]
        self.placeholders = graph.find_nodes(op="placeholder")
        self._blocks = _Blocks(graph.nodes)
        self.group_of: dict[fx.Node, Group] = {}
        self.groups = self._grouped([node for node in graph.nodes if node not in backward])
        self._connect()
        self._find_stock(stock)
        self._divide()
        self.stock = list(stock)
        self._find_seconds()

    # ---- groups ----

    def _grouped(self, nodes: Iterable[fx.Node]) -> list[Group]:
        groups: list[Group] = []
        of_storage: dict[StorageWeakRef, Group | None] = {}
        for node in nodes:
            storages = [each for each in map(storage_of, _elements(node)) if each is not None]
            if node.op != "call_function":
                of_storage |= dict.fromkeys(storages, None)
                continue
            if not _elements(node):
                continue
            known = [of_storage[each] for each in storages if each in of_storage]
            group: Group | None
            if known and len(known) == len(storages):
                group = known[0]  # None: a view of an input
            else:
                group = Group(len(groups), node, [])
                groups.append(group)
            if value_of(node) is not None:
                for each in storages:
                    of_storage.setdefault(each, group)
            if group is not None:
                group.nodes.append(node)
                self.group_of[node] = group
        return groups

    def _connect(self) -> None:
        for group in self.groups:
            for node in group.nodes:
                for each in node.all_input_nodes:
                    source = self.group_of.get(each)
                    if source is not None and source is not group:
                        group.inputs.add(source.number)
                        source.readers.add(group.number)
            value = value_of(group.maker)
            group.nbytes = 0 if value is None else _memory_bytes(value)
        written = self._written_inputs()
        for group in self.groups:
            reads_written = any(written.intersection(self._sources(node)) for node in group.nodes)
            group.may_recompute = may_compute_again(group.maker) and not reads_written
        self._lifetimes = Lifetimes(
            self._graph, self._backward, self.forward_outputs, self.backward_outputs, _storages_of, self._costs.is_cheap
        )

    def _written_inputs(self) -> set[StorageWeakRef | None]:
        """Return the memory of the inputs that forward writes to: operators that read them are not called again."""
        output = next(iter(self._graph.find_nodes(op="output")))
        notes = tree_leaves(output.meta.get("desc", ()))
        written = [str(note.mutated_input) for note in notes if hasattr(note, "mutated_input")]
        copied = {node.args[0] for node in self._graph.nodes if node.target is torch.ops.aten.copy_.default}
        found: set[StorageWeakRef | None] = set()
        for node in self.placeholders:
            value = value_of(node)
            if value is None:
                continue
            # A release that has no such notes may have written to any input that needs no gradient.
            may_be = str(node.meta.get("desc")) in written if notes else not value.requires_grad
            if may_be or node in copied:
                found.add(storage_of(value))
        return found

    def _sources(self, node: fx.Node) -> set[StorageWeakRef | None]:
        outside = [each for each in node.all_input_nodes if each not in self.group_of]
        return {storage_of(value) for each in outside for value in _elements(each)}

    @staticmethod
    def values(group: Group) -> list[fx.Node]:
        """Return the values to save if a group is saved: none if the group has no memory."""
        return [group.maker] if value_of(group.maker) is not None else []

    # ---- PyTorch's own choice ----

    def _find_stock(self, stock: Sequence[fx.Node]) -> None:
        self.saved: dict[int, list[fx.Node]] = {}
        for node in stock:
            if node in self.group_of:
                self.saved.setdefault(self.group_of[node].number, []).append(node)
        readers = [node for node in self._backward if node.op == "call_function"]  # and not the output of both graphs
        asked = {each for node in readers for each in node.all_input_nodes} | set(self.backward_outputs)
        wanted = [node for node in asked if node not in self._backward or node in self.group_of]
        self.needed = {self.group_of[node].number for node in wanted if node in self.group_of}
        self.again: set[int] = set()
        stops = set(stock)
        seen: set[fx.Node] = set()
        while wanted:
            node = wanted.pop()
            if node in seen or node in stops or node.op != "call_function":
                continue
            seen.add(node)
            group = self.group_of.get(node)
            if group is not None and group.number not in self.saved:
                self.again.add(group.number)
            wanted += node.all_input_nodes

    # ---- pieces ----

    def _divide(self) -> None:
        names = [self._blocks.of(group.maker) for group in self.groups]
        is_late = [group.maker.meta.get("partitioner_tag") == "is_backward" for group in self.groups]
        # Backward makes some values of its own for a block, behind all that forward does.
        known = [place for place, name in enumerate(names) if name is not None and not is_late[place]]
        order: dict[str, int] = {}
        if known:
            order["before"] = 0
        before = "before" if known else ""
        labels = []
        latest = before
        for place, name in enumerate(names):
            if name is not None and not (is_late[place] and name not in order):
                latest = name
            elif known and place > known[-1] and not is_late[place]:
                latest = "behind"
            order.setdefault(latest, len(order))
            labels.append(latest)
        for group, label in zip(self.groups, labels, strict=True):
            group.piece = order[label]
        members: list[list[Group]] = [[] for _ in order]
        for group in self.groups:
            members[group.piece].append(group)
        outside = {"before", "behind"}
        self.pieces = [
            Piece("" if label in outside else label, tuple(groups))
            for label, groups in zip(order, members, strict=True)
        ]

    # ---- bytes and times of a step that saves nothing in its pieces ----

    @cached_property
    def input_bytes(self) -> int:
        """The bytes of forward's inputs, which are there all the time: weights, buffers and the batch."""
        return sum(self._input_storages(lambda node: node not in self._backward).values())

    @cached_property
    def gradient_bytes(self) -> int:
        """The bytes of the gradients that backward is given."""
        return sum(self._input_storages(lambda node: node in self._backward).values())

    def _input_storages(self, is_counted: Any) -> dict[StorageWeakRef | None, int]:
        nodes = [node for node in self.placeholders if is_counted(node)]
        return {storage_of(value): _memory_bytes(value) for node in nodes for value in _elements(node)}

    def forward(self, saved: Sequence[fx.Node], moved: Sequence[fx.Node]) -> Run:
        """Return the run of forward, if these values are saved, and those that move leave at once."""
        return self._lifetimes.forward(saved, moved)

    def backward(self, saved: Sequence[fx.Node], moved: Sequence[fx.Node]) -> Run:
        """Return the run of backward, if these values were saved, and of them ``moved`` have moved."""
        return self._lifetimes.backward(saved, moved)

    def in_order(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """Return values in the order in which forward makes them."""
        return sorted(nodes, key=self._lifetimes.place)

    def buffers(self, nodes: Iterable[fx.Node]) -> set[int]:
        """Return the numbers of the buffers that values are in."""
        return self._lifetimes.buffers(nodes)

    def nbytes_of(self, number: int) -> int:
        """Return the bytes of a buffer."""
        return self._lifetimes.nbytes[number]

    def buffer_bytes(self, nodes: Iterable[fx.Node]) -> int:
        """Return the bytes of the buffers that values are in; those of the graph's inputs do not count."""
        return sum(self._lifetimes.nbytes[number] for number in self._lifetimes.buffers(nodes))

    @cached_property
    def output_bytes(self) -> int:
        """The bytes of forward's outputs."""
        return self.buffer_bytes(self.forward_outputs)

    def bytes_of_pieces(self, saved: Sequence[fx.Node]) -> tuple[list[int], list[int]]:
        """Return, for each piece, the most in memory while its forward and its backward run, if these are saved.

        The bytes are those beside the inputs, and beside the saved values of the other pieces.
        """
        forward, backward = self.forward(saved, ()), self.backward(saved, ())
        in_forward = self._most(forward, self._forward_pieces(forward), saved)
        in_backward = self._most(backward, self._backward_pieces(backward), saved)
        # Before the blocks, the gradients of the blocks are there, too, even if nothing there has a backward.
        for number in range(len(in_backward) - 2, -1, -1):
            in_backward[number] = in_backward[number] or in_backward[number + 1]
        return in_forward, [nbytes + self.gradient_bytes for nbytes in in_backward]

    def _most(self, run: Run, pieces: list[int], saved: Sequence[fx.Node]) -> list[int]:
        of_pieces: list[set[int]] = [set() for _ in self.pieces]
        for node in saved:
            if node in self.group_of:
                of_pieces[self.group_of[node].piece] |= self._lifetimes.buffers([node])
        changes = [[0] * (len(run.nodes) + 2) for _ in self.pieces]
        for piece, numbers in enumerate(of_pieces):
            for number in numbers & run.begins.keys():
                changes[piece][max(run.begins[number], 0)] += self._lifetimes.nbytes[number]
                changes[piece][run.ends[number] + 1] -= self._lifetimes.nbytes[number]
        held = [list(itertools.accumulate(each)) for each in changes]
        all_held = [sum(each) for each in zip(*held, strict=True)]
        most = [0] * len(self.pieces)
        for place, (piece, alive_bytes) in enumerate(zip(pieces, run.alive_bytes, strict=True)):
            most[piece] = max(most[piece], alive_bytes - all_held[place] + held[piece][place])
        return most

    def _forward_pieces(self, run: Run) -> list[int]:
        """Return the number of the piece that each operator of a forward belongs to."""
        found, latest = [], 0
        for node in run.nodes:
            group = self.group_of.get(node)
            latest = latest if group is None else group.piece
            found.append(latest)
        return found

    def _backward_pieces(self, run: Run) -> list[int]:
        """Return the number of the piece in whose backward each operator runs."""
        names = {piece.name: number for number, piece in enumerate(self.pieces) if piece.name}
        found: list[int | None] = []
        latest = len(self.pieces) - 1
        for node in run.nodes:
            is_again = node not in self._backward
            latest = latest if is_again else names.get(self._blocks.of(node) or "", latest)
            found.append(None if is_again else latest)
        pieces: list[int] = []
        for piece in reversed(found):  # what is computed again is there for the gradient behind it
            latest = latest if piece is None else piece
            pieces.append(latest)
        return pieces[::-1]

    def seconds(self, run: Run) -> list[float]:
        """Return how long each operator of a run takes."""
        return [
            self._costs.kernel_s(nbytes) if self._lifetimes.is_cheap(node) else self._operator_s(node)
            for node, nbytes in zip(run.nodes, run.kernel_bytes, strict=True)
        ]

    def _operator_s(self, node: fx.Node) -> float:
        if node not in self._operator_seconds:
            is_view = not self._lifetimes.buffers([node]) - self._lifetimes.buffers(node.all_input_nodes)
            self._operator_seconds[node] = 0.0 if is_view else self._costs.seconds(node)
        return self._operator_seconds[node]

    def _find_seconds(self) -> None:
        self._operator_seconds: dict[fx.Node, float] = {}
        forward, backward = self.forward(self.stock, ()), self.backward(self.stock, ())
        self.forward_s, self.backward_s = [0.0] * len(self.pieces), [0.0] * len(self.pieces)
        of_node: dict[fx.Node, float] = {}
        for node, piece, seconds in zip(
            forward.nodes, self._forward_pieces(forward), self.seconds(forward), strict=True
        ):
            self.forward_s[piece] += seconds
            of_node[node] = seconds
        for piece, seconds in zip(self._backward_pieces(backward), self.seconds(backward), strict=True):
            self.backward_s[piece] += seconds
        for group in self.groups:
            least = self._costs.kernel_s(_LEAST_SHARE * sum(map(_memory_bytes, _elements(group.maker))))
            if group.maker.target is not operator.getitem:
                group.seconds = max(least, of_node.get(group.maker, 0.0))

    def may_move(self, group: Group) -> bool:
        """Return whether the saved values of a group may move, all of them as one value."""
        moved = self.moved_values(group)
        return len(moved) <= 1 and all(self._movable.nbytes(node) is not None for node in (*moved, *self.values(group)))

    def is_stock(self, saved: Iterable[fx.Node]) -> bool:
        """Return whether values are those that PyTorch saves, beside the graph's inputs."""
        return set(saved) == {node for node in self.stock if node in self.group_of}

    def moved_values(self, group: Group) -> list[fx.Node]:
        """Return the values to save in place of PyTorch's own choice if a group moves."""
        return self._movable.joined(self.saved.get(group.number, ()))

    @cached_property
    def _movable(self) -> Movable:
        return Movable.of_joint_graph(self._graph, leaves_images=self._leaves_images)

    @property
    def is_known(self) -> bool:
        """Whether all sizes are known, by the example that the graph was traced with."""
        values = (value for node in self.group_of for value in _elements(node))
        return all(hint(value.numel()) is not None for value in values)

    @property
    def is_dynamic(self) -> bool:
        """Whether inputs of other sizes may be given to the graph."""
        values = [value for node in self.placeholders for value in _elements(node)]
        return any(isinstance(number, torch.SymInt) for value in values for number in value.shape)

    def is_planable(self, piece: Piece) -> bool:
        """Return whether anything of a piece may be computed again, beside that which PyTorch does."""
        if not piece.name and len(self.pieces) > 1:
            return False
        return all(node.meta.get("recompute") is None for group in piece.groups for node in group.nodes)

    @staticmethod
    def rounded_s(seconds: float) -> float:
        """Return a time to three digits, so that times of equal work are equal."""
        if seconds <= 0:
            return 0.0
        return round(seconds, 2 - math.floor(math.log10(seconds)))
