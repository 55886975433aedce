"""The calls of a model's modules in one forward, as a tree, and the storages that autograd saved in each of them.

Nothing here knows of torch: a module is any object that can be a key, and a storage is a number.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

__all__ = ["CallTree", "ModuleCall"]


@dataclass(eq=False)
class ModuleCall:
    """One call of a module.

    Attributes
    ----------
    module : hashable or None
        The module; None for the caller of the model.
    begin, end : int
        How many saves there had been when the call began and when it ended.
    calls : list of ModuleCall
        The calls that it made, in their order.
    inputs : frozenset of int
        The storages of the tensors in its arguments, without parameters and buffers.
    work_bytes : int
        The largest sum of the bytes that one operator read and returned, among the operators that ran while this was
        the innermost call.
    operator_count : int
        How many of these there were.
    """

    module: Hashable | None
    begin: int = 0
    end: int = 0
    calls: list["ModuleCall"] = field(default_factory=list)
    inputs: frozenset[int] = frozenset()
    work_bytes: int = 0
    operator_count: int = 0


@dataclass(eq=False)
class CallTree:
    """The calls of one forward.

    Attributes
    ----------
    root : ModuleCall
        The call of the model, or the caller of parts of it.
    saves : list of int
        The storage of each saved tensor, in the order of the saves, without parameters and buffers. A storage stands
        here once for each time that it is saved.
    nbytes : dict of int to int
        The size of each storage in bytes.
    fixed_bytes : int
        The parameters, the buffers, and the gradients that the step makes.
    """

    root: ModuleCall
    saves: list[int] = field(default_factory=list)
    nbytes: dict[int, int] = field(default_factory=dict)
    fixed_bytes: int = 0

    def saved_in(self, call: ModuleCall) -> set[int]:
        """Return the storages that were saved in a call, and in the calls that it made."""
        return set(self.saves[call.begin : call.end])

    def total_bytes(self, storages: Iterable[int]) -> int:
        """Return the bytes of several storages, each of which is given once."""
        return sum(map(self.nbytes.__getitem__, storages))
