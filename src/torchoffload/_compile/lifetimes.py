"""The memory of the two graphs that a joint graph is cut into: the buffers that are there as each operator runs.

It is reckoned for a compiler that fuses operators, as inductor does:

- Operators run in the order of the joint graph. Values that backward computes again are made before their first reader.
- A *buffer* is one piece of memory with all its views. It is freed behind its last reader.
- A value is *fused away*, and has no memory, if its operator and all its readers are cheap and nothing outside of the
  graph gets it. Then its readers read the buffers that it is made from, and these live on until they have.
- Cheap operators that read the same buffer run as one kernel, at the place of the last one, unless an operator that is
  not cheap needs one of them and is needed by another. All that such a kernel reads and makes is there at once.
- An operator writes its result into a buffer of the same size that it is the last to read, unless others of its kernel
  read it as well. Backward does so with saved values, too, except for outputs of forward.
"""

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["Lifetimes", "Run"]

_MOST_APART = 64  # inductor fuses no operators that are further apart


@dataclass(frozen=True)
class Run:
    """The run of one graph.

    Attributes
    ----------
    nodes : list of fx.Node
        Its operators in order.
    alive_bytes : list of int
        The bytes of the buffers that are there while each operator runs.
    kernel_bytes : list of int
        The bytes that each cheap operator adds to those that its kernel reads and writes; 0 for the others. All cheap
        operators between two that are not are taken for one kernel, which reads each buffer once.
    begins, ends : dict of int to int
        The places among ``nodes`` from which on and until which the buffers are there, by their numbers.
    fused : set of int
        The numbers of the buffers that are fused away.
    """

    nodes: list[fx.Node]
    alive_bytes: list[int]
    kernel_bytes: list[int]
    begins: dict[int, int]
    ends: dict[int, int]
    fused: set[int]

    @property
    def peak_bytes(self) -> int:
        """The most bytes at any time."""
        return max(self.alive_bytes, default=0)

    def peak_bytes_if_held(self, until: Mapping[int, int], nbytes_of: Callable[[int], int]) -> int:
        """Return the most bytes at any time if some buffers are held until later places."""
        more = [0] * (len(self.nodes) + 1)
        for number, place in until.items():
            begin, end = self.ends[number] + 1, min(place, len(self.nodes) - 1) + 1
            if begin < end:
                more[begin] += nbytes_of(number)
                more[end] -= nbytes_of(number)
        return max(map(operator.add, self.alive_bytes, itertools.accumulate(more)), default=0)


@dataclass
class _Kernel:
    """Cheap operators that run as one: the place of the last, and the buffers that they read, by how many, and make."""

    place: int
    reads: dict[int, int] = field(default_factory=dict)
    makes: set[int] = field(default_factory=set)
    needs: int = 0  # the numbers of the kernels that it needs, as bits


class _Kernels:
    """The kernels of a run: which operators are fused with each other."""

    def __init__(self, nbytes: Sequence[int]) -> None:
        self.all: list[_Kernel] = []
        self._nbytes = nbytes
        self._behind: dict[int, int] = {}  # the kernels that a buffer needs besides those that it is made by, as bits
        self._made_by: dict[int, int] = {}  # the kernels that make a buffer, or the values that it is fused from
        self._made_from: dict[int, set[int]] = {}  # the buffers that a value which is fused away is made from
        self._latest: dict[int, int] = {}  # the latest kernel that reads a buffer

    def add(self, place: int, reads: Collection[int], makes: list[int], *, is_cheap: bool, is_fused: bool) -> set[int]:
        """Take notice of the next operator, and return the buffers that it reads."""
        behind = made_by = 0
        sources: set[int] = set()
        for number in reads:
            behind |= self._behind.get(number, 0)
            made_by |= self._made_by.get(number, 0)
            sources |= self._made_from.get(number, {number})
        if not is_cheap:
            behind, made_by = behind | made_by, 0
        elif is_fused:
            self._made_from |= dict.fromkeys(makes, sources)
        elif makes:
            made_by = self._join(place, sources, makes, behind, made_by)
        self._behind |= dict.fromkeys(makes, behind)
        self._made_by |= dict.fromkeys(makes, made_by)
        return sources

    def _join(self, place: int, sources: set[int], makes: list[int], behind: int, made_by: int) -> int:
        made_bytes = sum(self._nbytes[number] for number in makes)
        found = {
            self._latest[each] for each in sources if each in self._latest and 2 * self._nbytes[each] >= made_bytes
        }
        first = len(self.all) - _MOST_APART
        number = next(
            (each for each in sorted(found, reverse=True) if each >= first and self._may_join(each, behind, made_by)),
            len(self.all),
        )
        if number == len(self.all):
            self.all.append(_Kernel(place))
        kernel = self.all[number]
        kernel.place = place
        kernel.needs |= (behind | made_by) & ~(1 << number)
        kernel.makes.update(makes)
        for each in sources:
            kernel.reads[each] = kernel.reads.get(each, 0) + 1
        self._latest |= dict.fromkeys(sources, number)
        return 1 << number

    def _may_join(self, number: int, behind: int, made_by: int) -> bool:
        bit = 1 << number
        if behind & bit:
            return False
        needed = (behind | made_by) & ~bit
        recent = range(max(0, len(self.all) - 2 * _MOST_APART), len(self.all))
        return not any(needed >> each & 1 and self.all[each].needs & bit for each in recent)


class Lifetimes:
    """The buffers of a joint graph.

    Parameters
    ----------
    graph : fx.Graph
        The joint graph.
    backward : collection of fx.Node
        The nodes that depend on gradients, or are returned as such.
    forward_outputs, backward_outputs : sequence of fx.Node
        The outputs of the two graphs.
    storages_of : callable
        Returns the memory that each result of a node is in, with its size in bytes.
    is_cheap : callable
        Returns whether a compiler fuses an operator with others.
    """

    def __init__(
        self,
        graph: fx.Graph,
        backward: Collection[fx.Node],
        forward_outputs: Sequence[fx.Node],
        backward_outputs: Sequence[fx.Node],
        storages_of: Callable[[fx.Node], Iterable[tuple[StorageWeakRef, int]]],
        is_cheap: Callable[[fx.Node], bool],
    ) -> None:
        self._forward_outputs, self._backward_outputs = forward_outputs, backward_outputs
        self._order = {node: place for place, node in enumerate(graph.nodes)}
        self._backward = [node for node in graph.nodes if node in backward and node.op == "call_function"]
        self._is_of_backward = set(backward)
        self._numbers: dict[StorageWeakRef, int] = {}
        self.nbytes: list[int] = []
        self._of: dict[fx.Node, tuple[int, ...]] = {}
        inputs = {each for node in graph.find_nodes(op="placeholder") for each, _ in storages_of(node)}
        for node in graph.nodes:
            if node.op == "call_function":
                found = [each for each in storages_of(node) if each[0] not in inputs]
                self._of[node] = tuple(dict.fromkeys(self._number(*each) for each in found))
        self._inputs = {node: tuple(node.all_input_nodes) for node in self._of}
        self._reads = {node: frozenset(self.buffers(inputs)) for node, inputs in self._inputs.items()}
        self._is_cheap = {node: is_cheap(node) for node in self._of}

    def _number(self, storage: StorageWeakRef, nbytes: int) -> int:
        number = self._numbers.setdefault(storage, len(self.nbytes))
        if number == len(self.nbytes):
            self.nbytes.append(nbytes)
        return number

    def place(self, node: fx.Node) -> int:
        """Return the place of a node in the joint graph."""
        return self._order[node]

    def is_cheap(self, node: fx.Node) -> bool:
        """Return whether a compiler fuses an operator with others."""
        return self._is_cheap[node]

    def buffers(self, nodes: Iterable[fx.Node]) -> set[int]:
        """Return the numbers of the buffers that values are in; those of the graph's inputs have none."""
        return {number for node in nodes for number in self._of.get(node, ())}

    def _made_from(self, wanted: Iterable[fx.Node], stops: Collection[fx.Node], done: set[fx.Node]) -> list[fx.Node]:
        """Return the operators that have to run for some values, in order; they are added to ``done``."""
        found, waiting = [], list(wanted)
        while waiting:
            node = waiting.pop()
            if node in done or node in stops or node not in self._of:
                continue
            done.add(node)
            found.append(node)
            waiting += self._inputs[node]
        return sorted(found, key=self._order.__getitem__)

    def forward(self, saved: Collection[fx.Node], moved: Collection[fx.Node]) -> Run:
        """Return the run of forward, which saves values; those that move leave as nothing reads them any more."""
        nodes = self._made_from([*self._forward_outputs, *saved], (), set())
        kept = self.buffers([*self._forward_outputs, *saved])
        return self._run(nodes, kept, {}, self.buffers(moved))

    def backward(self, saved: Collection[fx.Node], moved: Collection[fx.Node]) -> Run:
        """Return the run of backward, which is given saved values; those that moved come as they are first read."""
        stops, done = self._is_of_backward.union(saved), set[fx.Node]()
        nodes: list[fx.Node] = []
        for node in self._backward:
            nodes += self._made_from(self._inputs[node], stops, done)
            nodes.append(node)
        nodes += self._made_from(self._backward_outputs, stops, done)
        later = self.buffers(moved)
        given = dict.fromkeys(self.buffers(saved) - later, -1)
        for place, node in enumerate(nodes):
            for number in self._reads[node] & later:
                given.setdefault(number, place)
        return self._run(nodes, self.buffers(self._backward_outputs), given, set())

    def _run(self, nodes: list[fx.Node], kept: set[int], given: dict[int, int], leaving: set[int]) -> Run:
        """Return the run of a graph.

        ``kept``: the buffers that stay until its end. ``given``: those that it is given, and from which place on.
        ``leaving``: those that leave as nothing reads them any more, though they are kept.
        """
        # Others may have forward's outputs, so that backward does not write into their memory.
        lent = self.buffers(self._forward_outputs) if given else set()
        end = len(nodes)
        begins = dict(given)
        maker: dict[int, int] = {}
        makes: list[list[int]] = []
        readers: dict[int, list[int]] = {}
        for place, node in enumerate(nodes):
            made = [number for number in self._of[node] if number not in begins]
            makes.append(made)
            for number in made:
                begins[number] = maker[number] = place
            for number in self._reads[node].difference(self._of[node]):
                readers.setdefault(number, []).append(place)
        is_cheap = [self._is_cheap[node] for node in nodes]
        ends: dict[int, int] = {}
        fused: set[int] = set()
        for number in reversed(begins):
            uses = readers.get(number, [])
            is_cheaply_made = number in maker and number not in kept and is_cheap[maker[number]]
            if is_cheaply_made and uses and all(is_cheap[place] for place in uses):
                fused.add(number)
            # A reader whose results are all fused away reads as they are read.
            last = [
                max(ends[each] for each in makes[place]) if makes[place] and fused.issuperset(makes[place]) else place
                for place in uses
            ]
            ends[number] = max(last, default=max(begins[number], 0))
            if number in kept and number not in leaving:
                ends[number] = end
        kernels, kernel_bytes = self._kernels(nodes, makes, is_cheap, fused)
        shared: set[int] = set()
        for kernel in kernels.all:
            for number in (*kernel.reads, *kernel.makes):
                ends[number] = max(ends[number], kernel.place)
            shared.update(
                number for number, count in kernel.reads.items() if count > 1 and ends[number] == kernel.place
            )
        alive_bytes = self._alive_bytes(makes, is_cheap, begins, ends, fused, lent | shared | leaving)
        return Run(nodes, alive_bytes, kernel_bytes, begins, ends, fused)

    def _kernels(
        self, nodes: list[fx.Node], makes: list[list[int]], is_cheap: list[bool], fused: set[int]
    ) -> tuple[_Kernels, list[int]]:
        kernels = _Kernels(self.nbytes)
        passed: set[int] = set()  # the buffers that cheap operators have read or written since the last other one
        found = []
        for place, (node, made) in enumerate(zip(nodes, makes, strict=True)):
            reads = self._reads[node].difference(self._of[node])
            is_fused = bool(made) and fused.issuperset(made)
            sources = kernels.add(place, reads, made, is_cheap=is_cheap[place], is_fused=is_fused)
            new = {*sources, *made} - passed if is_cheap[place] and made and not is_fused else set()
            passed |= new
            if made and not is_cheap[place]:
                passed.clear()
            found.append(sum(self.nbytes[number] for number in new))
        return kernels, found

    def _alive_bytes(
        self, makes: list[list[int]], is_cheap: list[bool], begins: dict[int, int], ends: dict[int, int],
        fused: set[int], lent: set[int],
    ) -> list[int]:  # fmt: skip
        nbytes = self.nbytes
        coming: dict[int, list[int]] = {}
        going: dict[int, list[int]] = {}
        alive = 0
        for number, place in begins.items():
            if number in fused:
                continue
            going.setdefault(ends[number], []).append(number)
            if place < 0:
                alive += nbytes[number]
            elif number not in makes[place]:  # it moved, and comes now
                coming.setdefault(place, []).append(number)
        found = []
        for place, made in enumerate(makes):
            made = [number for number in made if number not in fused]
            dead = going.get(place, [])
            taken = [nbytes[number] for number in dead if number not in {*made, *lent}] if is_cheap[place] else []
            alive += sum(nbytes[number] for number in coming.get(place, []))
            reused = 0
            for number in made:
                if nbytes[number] in taken:
                    taken.remove(nbytes[number])
                    reused += nbytes[number]
            alive += sum(nbytes[number] for number in made) - reused
            found.append(alive)
            alive -= sum(nbytes[number] for number in dead) - reused
        return found
