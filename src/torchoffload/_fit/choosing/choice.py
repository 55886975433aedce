"""Which modules are blocks, by the bytes that autograd saves in their calls.

A step needs the least memory if each block is computed again when its backward comes. Then the device holds

- the inputs of the blocks, as far as they stay there,
- the storages that are saved outside of all blocks, from the moment of their save on,
- and the storages of one block at a time, with the tensors that its operators work on.

Large blocks have few inputs and much inside; small blocks the other way round. So every size of block that makes a
difference is tried, and the rule is

- ``need(M)``, of a module: the most that one of its calls saves and is given, and the largest operator in it;
- ``blocks(window)``: the outermost modules of which none needs more than the window, and which have at most
  ``MOST_OPERATORS`` operators. A module that calls no other one cannot be divided and is taken as it is;
- of these sets of blocks, and of those that the structure of the model gives, whose least memory is within
  ``TOLERANCE`` of the best: the one with the fewest calls.
"""

import itertools
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass

from torchoffload._fit.choosing.call_tree import CallTree, ModuleCall

__all__ = ["MOST_OPERATORS", "SHARE_THAT_STAYS", "TOLERANCE", "Choice", "choose_blocks", "with_blocks"]

MOST_OPERATORS = 4096
"""A plan chooses among the operators of a block: with more of them that would take too long."""
TOLERANCE = 0.05
SHARE_THAT_STAYS = 0.5
"""Of the blocks' inputs, if they may move. With 0 the best blocks would be modules without parts, whose inputs are
nearly all that is saved: nothing would be computed again and everything would move."""


@dataclass(frozen=True)
class Choice:
    """A set of blocks.

    Attributes
    ----------
    modules : tuple
        The blocks, in the order of their first calls.
    least_bytes : int
        The least memory of a step with these blocks, without the memory that every step takes.
    call_count : int
        How many calls of blocks the step has.
    """

    modules: tuple[Hashable, ...]
    least_bytes: int
    call_count: int


def choose_blocks(tree: CallTree, *, share_that_stays: float, also: Iterable[Collection[Hashable]] = ()) -> Choice:
    """Return the blocks of a model by the tensors that one forward of it saved.

    Parameters
    ----------
    tree : CallTree
        The calls of that forward.
    share_that_stays : float
        The share of the blocks' inputs that stays on the device: 1 if nothing may move, else ``SHARE_THAT_STAYS``.
    also : iterable of collections of modules
        Other sets of blocks that are compared. A window may divide the largest of several like modules and take the
        containers of the smaller ones whole, though all of them as they are would need less.

    Returns
    -------
    Choice
        The blocks. There are none if nothing was saved.
    """
    return _Rule(tree, share_that_stays).choose(also)


def with_blocks(tree: CallTree, modules: Collection[Hashable], *, share_that_stays: float) -> Choice:
    """Return the least memory with these blocks, for comparison."""
    return _Rule(tree, share_that_stays).least(modules)


class _Rule:
    def __init__(self, tree: CallTree, share_that_stays: float) -> None:
        self._tree, self._share = tree, share_that_stays
        self._order: dict[int, int] = {}  # of a storage's first save
        for number, storage in enumerate(tree.saves, start=1):
            self._order.setdefault(storage, number)
        self._needs: dict[Hashable, int] = {}
        self._operator_counts: dict[Hashable, int] = {}
        self._callers: set[Hashable] = set()  # the modules that call others
        self._inside: dict[ModuleCall, set[int]] = {}
        self._work: dict[ModuleCall, int] = {}
        self._note(tree.root)

    def _note(self, call: ModuleCall) -> tuple[int, int]:
        """Note the memory that a call needs. Return its largest operator, in bytes, and its number of operators."""
        work, count = call.work_bytes, call.operator_count
        for inner in call.calls:
            inner_work, inner_count = self._note(inner)
            work, count = max(work, inner_work), count + inner_count
        saved = self._tree.saved_in(call)
        self._work[call], self._inside[call] = work, saved | call.inputs
        if call.module is not None:
            need = (self._tree.total_bytes(self._inside[call]) if saved else 0) + work
            self._needs[call.module] = max(self._needs.get(call.module, 0), need)
            self._operator_counts[call.module] = max(self._operator_counts.get(call.module, 0), count)
            if call.calls:
                self._callers.add(call.module)
        return work, count

    def choose(self, also: Iterable[Collection[Hashable]]) -> Choice:
        """Return the best set of blocks."""
        choices: dict[frozenset[Hashable], Choice] = {}
        windows = sorted(set(self._needs.values()), reverse=True)
        for modules in itertools.chain(map(self._blocks, windows), map(self._called, also)):
            key = frozenset(modules)
            if key and key not in choices:
                choices[key] = self.least(modules)
        if not choices:
            return Choice((), 0, 0)
        best = min(each.least_bytes for each in choices.values())
        most = best + TOLERANCE * (best + self._tree.fixed_bytes)
        near = [each for each in choices.values() if each.least_bytes <= most]
        return min(near, key=lambda each: (each.call_count, each.least_bytes))

    def _blocks(self, window: int) -> list[Hashable]:
        found: dict[Hashable, None] = {}
        waiting = [self._tree.root]
        while waiting:
            call = waiting.pop()
            if not _saves(call) or call.module in found:
                continue
            if call.module is not None and self._is_block(call.module, window):
                found[call.module] = None
            else:
                waiting += reversed(call.calls)
        return list(found)

    def _called(self, modules: Collection[Hashable]) -> list[Hashable]:
        """Return those of these modules that are called and save something, if none has too many operators."""
        blocks, _ = self._divided(frozenset(modules))
        found = [block.module for block in blocks if block.module is not None]
        return list(dict.fromkeys(found)) if all(map(self._is_small, found)) else []

    def _is_small(self, module: Hashable) -> bool:
        return self._operator_counts[module] <= MOST_OPERATORS

    def _is_block(self, module: Hashable, window: int) -> bool:
        fits = self._needs[module] <= window and self._is_small(module)
        return fits or module not in self._callers

    def least(self, modules: Collection[Hashable]) -> Choice:
        """Return the least memory of a step with these blocks."""
        blocks, outside = self._divided(frozenset(modules))
        return Choice(tuple(modules), self._least_bytes(blocks, outside), len(blocks))

    def _divided(self, modules: frozenset[Hashable]) -> tuple[list[ModuleCall], list[int]]:
        """Return the calls of the blocks that save something, and the storages saved outside of them, in order."""
        blocks: list[ModuleCall] = []
        outside: set[int] = set()
        waiting = [self._tree.root]
        while waiting:
            call = waiting.pop()
            if call.module in modules:
                if _saves(call):
                    blocks.append(call)
            else:
                outside |= self._saved_by_itself(call)
                waiting += reversed(call.calls)
        return blocks, sorted(outside, key=self._order.__getitem__)

    def _saved_by_itself(self, call: ModuleCall) -> set[int]:
        """Return the storages saved in a call and in none of the calls that it makes."""
        saved: set[int] = set()
        begin = call.begin
        for inner in call.calls:
            saved.update(self._tree.saves[begin : inner.begin])
            begin = inner.end
        saved.update(self._tree.saves[begin : call.end])
        return saved

    def _least_bytes(self, blocks: Iterable[ModuleCall], outside: list[int]) -> int:
        """Return the most memory of a backward in which each block is computed again, and of the moment before it.

        Blocks come in the order of their ends, so the storages that stayed at one block stay at the next, with some
        more.
        """
        nbytes = self._tree.nbytes
        staying: set[int] = set()  # saved outside of blocks until now
        inputs: set[int] = set()  # of blocks until now, without those in the other set
        staying_bytes = input_bytes = most = 0
        coming = iter(outside)
        following = next(coming, None)
        for block in blocks:
            while following is not None and self._order[following] <= block.end:
                staying.add(following)
                staying_bytes += nbytes[following]
                if following in inputs:
                    inputs.remove(following)
                    input_bytes -= nbytes[following]
                following = next(coming, None)
            inside = self._inside[block]
            own = self._tree.total_bytes(inside - staying)
            earlier = input_bytes - self._tree.total_bytes(inside & inputs)
            most = max(most, staying_bytes + own + self._work[block] + int(self._share * earlier))
            new = block.inputs - staying - inputs
            inputs |= new
            input_bytes += self._tree.total_bytes(new)
        inputs.difference_update(outside)
        at_loss = self._tree.total_bytes(outside) + int(self._share * self._tree.total_bytes(inputs))
        return max(most, at_loss)


def _saves(call: ModuleCall) -> bool:
    return call.end > call.begin
