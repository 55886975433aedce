"""Operators as a dispatch mode sees them: which of them are counted, and what they do with memory."""

import enum
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import SAC_IGNORED_OPS

from torchoffload._pytorch.tensor_subclasses import plain_tensors

__all__ = ["Kind", "Layout", "draws_by_tag", "is_counted", "kind_of", "storages", "tensors", "written"]

_TO_COPY = torch.ops.aten._to_copy.default
# They return a view of their argument, though their schemas do not say so.
_UNANNOTATED_VIEWS = (torch.ops.aten._unsafe_view.default, torch.ops.aten._reshape_alias.default)


class Kind(enum.Enum):
    """How an operator is treated."""

    COUNTED = enum.auto()
    """It has a number in its block."""
    VIEW = enum.auto()
    """It returns views of its arguments and copies nothing. It always runs."""
    IGNORED = enum.auto()
    """Forward and recomputation need not call it equally often. It always runs."""


# By the operator's address, since hashing an operator takes long. The operator is held, so that the address stays its.
_kinds: dict[int, tuple[Any, Kind]] = {}
_IGNORED_ADDRESSES = frozenset(id(operator) for operator in SAC_IGNORED_OPS)


def kind_of(operator: Any) -> Kind:
    """Return how an operator is treated."""
    known = _kinds.get(id(operator))
    if known is None:
        known = _kinds[id(operator)] = (operator, _classify(operator))
    return known[1]


def _classify(operator: Any) -> Kind:
    if id(operator) in _IGNORED_ADDRESSES:
        return Kind.IGNORED
    if operator in _UNANNOTATED_VIEWS:
        return Kind.VIEW
    schema = getattr(operator, "_schema", None)  # an operator that runs a graph has none
    if schema is None or schema.is_mutable or not schema.returns:
        return Kind.COUNTED
    is_view = all(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
    return Kind.VIEW if is_view else Kind.COUNTED


def is_counted(operator: Any, arguments: tuple[Any, ...]) -> bool:
    """Return whether this call of an operator has a number in its block.

    Views have none. Neither has what SAC_IGNORED_OPS lists, nor the cast of a parameter, which autocast makes once in
    each of its regions and then remembers: forward and recomputation need not make them equally often.
    """
    if kind_of(operator) is not Kind.COUNTED:
        return False
    return operator is not _TO_COPY or not isinstance(arguments[0], nn.Parameter)


def draws_by_tag(operator: Any) -> bool:
    """Return whether the operator's tags say that it draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a nest of containers; of a wrapper subclass those that hold its bytes."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield from plain_tensors(leaf)


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized


def storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the storage of each tensor in a nest of containers."""
    for tensor in tensors(value):
        if _has_storage(tensor):
            yield tensor.untyped_storage()


def written(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that the operator writes to, by its schema."""
    schema = getattr(operator, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    found = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return found


class Layout(NamedTuple):
    """What is needed to make a tensor like another one, without its values.

    Attributes
    ----------
    sizes, strides : tuple of int
        In elements.
    storage_offset : int
        In elements.
    nbytes : int
        Of the whole storage.
    dtype : torch.dtype
        The type of an element.
    device : torch.device
        Where the storage is.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int
    nbytes: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Layout | None":
        """Return the layout of a tensor; None if the tensor is more than a layout and bytes."""
        is_plain = type(tensor) is torch.Tensor and _has_storage(tensor) and not (tensor.is_conj() or tensor.is_neg())
        if not is_plain or tensor.device.type == "meta":
            return None
        nbytes, offset = tensor.untyped_storage().nbytes(), tensor.storage_offset()
        if not isinstance(offset, int):  # symbolic
            return None
        return cls(tuple(tensor.shape), tensor.stride(), offset, nbytes, tensor.dtype, tensor.device)
