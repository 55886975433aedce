"""The joint graph of a compiled model as blocks of groups of values, with their bytes and the times they take.

A group is one piece of memory that an operator makes, together with all views of it: to save one of them is to save
them all. An operator that makes several such pieces is a group without memory, which the groups of its results read.
A *piece* is the part of the graph that belongs to one block of the model, or the operators before or behind the blocks.
"""

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from torchoffload._compile.rewrite import hint, storage_of, value_of

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
    """

    bytes_per_s: float
    flops_per_s: float


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
    is_cheap : bool
        Whether a compiler fuses its operator with others.
    is_fused : bool
        Whether it is cheap, and read by cheap operators alone: then it never is in memory, unless it is saved.
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
    is_cheap: bool = False
    is_fused: bool = False
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


def _items(node: fx.Node) -> list[tuple[str, bool]]:
    """Return the modules around a node that are items of lists of modules, the outermost first.

    Each is the path of the module, and whether the node is in a module inside of it.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [str(entry[0] if isinstance(entry, tuple) else entry) for entry in stack.values()]
    names = [path.replace("['", ".").replace("']", "").replace("[", ".").replace("]", "") for path in paths]
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
        return bool(self._kinds.is_fusible(node)) and not self._kinds.is_compute_intensive(node)

    def seconds(self, node: fx.Node, *, writes: bool) -> float:
        """Return how long an operator takes: by its bytes, or by its floating-point operations if they take longer."""
        made = sum(map(_memory_bytes, _elements(node)))
        if self.is_cheap(node):
            return made / self._rates.bytes_per_s * (1.0 if writes else _LEAST_SHARE)
        read = sum(_memory_bytes(value) for each in node.all_input_nodes for value in _elements(each))
        return max((made + read) / self._rates.bytes_per_s, self._flops(node) / self._rates.flops_per_s)

    @staticmethod
    def _flops(node: fx.Node) -> float:
        from torch.utils.flop_counter import flop_registry

        target = getattr(node.target, "overloadpacket", None)
        count = flop_registry.get(target)
        if count is None and getattr(target, "__name__", None) in _ATTENTIONS:  # all of them do the same
            count = flop_registry.get(torch.ops.aten._scaled_dot_product_flash_attention)
        if count is None:
            return 0.0

        def sized(given: Any) -> Any:
            value = given.meta.get("val") if isinstance(given, fx.Node) else given
            if not isinstance(value, torch.Tensor):
                return value
            return torch.empty([hint(size) or 1 for size in value.shape], dtype=value.dtype, device="meta")

        made = node.meta.get("val")
        results = type(made)(map(sized, made)) if isinstance(made, (list, tuple)) else sized(made)
        try:
            given = fx.map_arg((node.args, dict(node.kwargs)), sized)
            return float(count(*given[0], **given[1], out_val=results))
        except (TypeError, ValueError, AttributeError, IndexError, KeyError, AssertionError):
            return 0.0  # counted by its bytes: this release counts it in another way


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

    Attributes
    ----------
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
    """

    def __init__(
        self, graph: fx.Graph, backward: set[fx.Node], stock: Sequence[fx.Node], num_fwd_outputs: int, rates: Rates
    ) -> None:
        self._graph, self._backward = graph, backward
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
            called = group.maker.args[0] if group.maker.target is operator.getitem else group.maker
            group.is_cheap = isinstance(called, fx.Node) and self._costs.is_cheap(called)
            reads_written = any(written.intersection(self._sources(node)) for node in group.nodes)
            group.may_recompute = may_compute_again(group.maker) and not reads_written
        for group in reversed(self.groups):
            readers = [self.groups[number] for number in group.readers]
            is_returned = any(node in self.forward_outputs for node in group.nodes)
            is_read_cheaply = bool(readers) and all(each.is_cheap for each in readers)
            group.is_fused = group.is_cheap and is_read_cheaply and not is_returned
            if group.maker.target is not operator.getitem:
                group.seconds = self._costs.seconds(group.maker, writes=not group.is_fused)

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
        known = [place for place, name in enumerate(names) if name is not None]
        order: dict[str, int] = {}
        if known:
            order["before"] = 0
        before = "before" if known else ""
        labels = []
        latest = before
        for place, group in enumerate(self.groups):
            name = names[place]
            is_late = group.maker.meta.get("partitioner_tag") == "is_backward"
            if name is not None and not (is_late and name not in order):
                latest = name
            elif known and place > known[-1] and not is_late:
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

    def forward_bytes(self) -> list[int]:
        """Return, for each piece, the most in memory while its forward runs, beside the inputs and the saved values.

        Of the piece itself, all that PyTorch saves is there as well.
        """
        groups = self._of_forward
        last = self._last_uses(groups)
        most = [0] * len(self.pieces)
        own = [0] * len(self.pieces)
        alive = 0
        ending: dict[int, list[Group]] = {}
        for place, group in enumerate(groups):
            if not group.is_fused:
                alive += group.nbytes
                ending.setdefault(last[group.number], []).append(group)
            most[group.piece] = max(most[group.piece], alive + own[group.piece])
            for dead in ending.pop(place, []):
                alive -= dead.nbytes
                if dead.number in self.saved:
                    own[dead.piece] += dead.nbytes
        self.loss_bytes = alive + self.gradient_bytes
        return most

    @cached_property
    def _of_forward(self) -> list[Group]:
        """The groups that forward's outputs depend on."""
        wanted = [self.group_of[node] for node in self.forward_outputs if node in self.group_of]
        found: set[int] = set()
        while wanted:
            group = wanted.pop()
            if group.number not in found:
                found.add(group.number)
                wanted += [self.groups[number] for number in group.inputs]
        return [group for group in self.groups if group.number in found]

    def _last_uses(self, groups: list[Group]) -> dict[int, int]:
        """Return the place of the last operator that reads each group, through readers that are fused."""
        places = {group.number: place for place, group in enumerate(groups)}
        last: dict[int, int] = {}
        returned = {self.group_of[node].number for node in self.forward_outputs if node in self.group_of}
        for group in reversed(groups):
            readers = [number for number in group.readers if number in places]
            uses = [last[number] if self.groups[number].is_fused else places[number] for number in readers]
            last[group.number] = len(groups) if group.number in returned else max(uses, default=places[group.number])
        return last

    def forward_s(self) -> list[float]:
        """Return how long the forward of each piece takes."""
        seconds = [0.0] * len(self.pieces)
        for group in self._of_forward:
            seconds[group.piece] += group.seconds
        return seconds

    def backward_costs(self) -> tuple[list[float], list[int]]:
        """Return for each piece how long its backward takes, and the most in memory meanwhile.

        The bytes are those of gradients: beside the inputs, and beside all that forward saves.
        """
        names = {piece.name: number for number, piece in enumerate(self.pieces) if piece.name}
        nodes = [node for node in self._graph.nodes if node in self._backward and node.op == "call_function"]
        made: dict[StorageWeakRef, list[Any]] = {}  # [maker, last use, bytes]
        returned = {storage_of(value) for node in self.backward_outputs for value in _elements(node)}
        places = {node: place for place, node in enumerate(nodes)}
        pieces = []
        seconds = [0.0] * len(self.pieces)
        latest = len(self.pieces) - 1
        for place, node in enumerate(nodes):
            latest = names.get(self._blocks.of(node) or "", latest)
            pieces.append(latest)
            fuses = self._costs.is_cheap(node) and all(map(self._costs.is_cheap, node.users))
            is_new = False
            for value in _elements(node):
                storage = storage_of(value)
                if storage is None or node in self.group_of:
                    continue
                last = max((places.get(user, place) for user in node.users), default=place)
                last = len(nodes) if storage in returned else last
                if storage in made:
                    made[storage][1] = max(made[storage][1], last)
                else:
                    is_new = True
                    nbytes = 0 if fuses and storage not in returned else _memory_bytes(value)
                    made[storage] = [place, last, nbytes]
            seconds[latest] += self._costs.seconds(node, writes=not fuses) if is_new else 0.0
        changes = [0] * (len(nodes) + 2)
        for begin, end, nbytes in made.values():
            changes[begin] += nbytes
            changes[end + 1] -= nbytes
        most, alive = [0] * len(self.pieces), self.gradient_bytes
        for place, piece in enumerate(pieces):
            alive += changes[place]
            most[piece] = max(most[piece], alive)
        # Before the blocks, the gradients of the blocks are there, too, even if nothing there has a backward.
        for number in range(len(most) - 2, -1, -1):
            most[number] = most[number] or (most[number + 1] if number + 1 < len(most) else 0)
        return seconds, most

    def may_move(self, group: Group) -> bool:
        """Return whether saved values of a group may leave the device: nobody outside of the graph has its memory."""
        return all(storage_of(value) not in self._shared for node in self.values(group) for value in _elements(node))

    @cached_property
    def _shared(self) -> set[StorageWeakRef | None]:
        nodes = [*self.forward_outputs, *self.backward_outputs, *self.placeholders]
        return {storage_of(value) for node in nodes for value in _elements(node)}

    @property
    def is_known(self) -> bool:
        """Whether all sizes are known, by the example that the graph was traced with."""
        values = (value for node in self.group_of for value in _elements(node))
        return all(hint(value.numel()) is not None for value in values)

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
