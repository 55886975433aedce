"""Operators as a dispatch mode sees them: which of them are counted, and what they do with memory."""

import enum
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import SAC_IGNORED_OPS

from torchoffload._core import core
from torchoffload._pytorch.collectives import communicates
from torchoffload._pytorch.tensor_subclasses import plain_tensors

__all__ = [
    "Kind",
    "Layout",
    "addresses",
    "communicates",
    "draws_by_tag",
    "has_own_counter",
    "has_storage",
    "is_counted",
    "is_functional",
    "kind_of",
    "made_by",
    "makes_alone",
    "scalars",
    "storages",
    "takes_generator",
    "tensors",
    "to_one_rank",
    "waits",
    "writes_unseen",
    "written",
]

_TO_COPY = torch.ops.aten._to_copy.default
_LIFT_FRESH = torch.ops.aten.lift_fresh.default
# They return a view of their argument, though their schemas do not say so. The view has a version counter of its own.
_UNANNOTATED_VIEWS = (
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten._reshape_alias.default,
    torch.ops.aten.unsafe_split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default,
)
# It puts a tensor that may be on its way into one that waits for it before it is used.
_WRAPS = "_c10d_functional._wrap_tensor_autograd.default"
_SCALARS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
# The names under which operators of batch normalization take their running statistics. They write to them in training,
# and most of their schemas do not say so.
_RUNNING_STATISTICS = ("running_mean", "running_var")
_TRAINING = ("training", "train", "use_input_stats")


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
    if id(operator) in _IGNORED_ADDRESSES or operator is _LIFT_FRESH:
        return Kind.IGNORED
    if operator in _UNANNOTATED_VIEWS or str(operator) == _WRAPS:
        return Kind.VIEW
    schema = getattr(operator, "_schema", None)  # an operator that runs a graph has none
    if schema is not None and _is_composite(operator):
        return Kind.COUNTED  # in inference mode it comes here undivided, and may copy
    if schema is None or schema.is_mutable or not schema.returns:
        return Kind.COUNTED
    is_view = all(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
    return Kind.VIEW if is_view else Kind.COUNTED


def _is_composite(operator: Any) -> bool:
    """Return whether the operator is made of others, as autograd sees it."""
    if not torch._C._dispatch_has_kernel(operator.name()):
        return False  # it is none of the dispatcher's, as prim::layout
    return bool(operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def is_counted(operator: Any, arguments: tuple[Any, ...], inputs: AbstractSet[int]) -> bool:
    """Return whether this call of an operator has a number in its block.

    Views have none. Neither has what SAC_IGNORED_OPS lists, nor the cast of a leaf or of an input of the block:
    autocast makes it once in each of its regions and then remembers it, so forward and recomputation need not make it
    equally often.

    Parameters
    ----------
    operator : operator
        What is called.
    arguments : tuple
        Its positional arguments.
    inputs : set of int
        The addresses of the storages of the block's own arguments.
    """
    if kind_of(operator) is not Kind.COUNTED:
        return False
    if operator is not _TO_COPY:
        return True
    tensor = arguments[0]
    is_remembered = isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)
    return not is_remembered and inputs.isdisjoint(addresses(tensor))


def made_by(operator: Any, output: Any, arguments: Any) -> set[int]:
    """Return the addresses of the storages that an operator made.

    What torch.tensor() returns was filled before any operator was called, and comes here as the argument of lift_fresh.
    """
    return addresses(output) if operator is _LIFT_FRESH else addresses(output) - addresses(arguments)


def has_own_counter(operator: Any) -> bool:
    """Return whether what the operator returns shares memory with its argument and not the version counter."""
    return operator in _UNANNOTATED_VIEWS


_generators: dict[int, tuple[Any, bool]] = {}  # by the operator's address, as above


def takes_generator(operator: Any, arguments: Any) -> bool:
    """Return whether a random number generator is among the arguments."""
    return _may_take_generator(operator) and any(isinstance(leaf, torch.Generator) for leaf in tree_leaves(arguments))


def _may_take_generator(operator: Any) -> bool:
    known = _generators.get(id(operator))
    if known is None:
        schema = getattr(operator, "_schema", None)
        may_take = schema is None or any("Generator" in str(each.type) for each in schema.arguments)
        known = _generators[id(operator)] = (operator, may_take)
    return known[1]


def scalars(operator: Any, arguments: Any) -> tuple[Any, ...] | None:
    """Return the numbers and the like among the arguments of an operator that is not PyTorch's; None for its own.

    What such an operator does beside its result may depend on them, such as whether it draws random numbers.
    """
    if getattr(operator, "namespace", "aten") in {"aten", "prims", "prim"}:
        return None
    return tuple(leaf for leaf in tree_leaves(arguments) if isinstance(leaf, _SCALARS))


def is_functional(operator: Any) -> bool:
    """Return whether the operator is a functional collective, whose result has to be waited for by ``wait_tensor``."""
    return "functional" in getattr(operator, "namespace", "")


def waits(operator: Any) -> bool:
    """Return whether the operator waits for what a functional collective returned."""
    return is_functional(operator) and operator.__name__.startswith("wait_tensor")


def to_one_rank(operator: Any) -> bool:
    """Return whether the operator sends to a single rank, or receives from one."""
    return communicates(operator) and operator.__name__.startswith(("send", "recv"))


def writes_unseen(operator: Any) -> bool:
    """Return whether the operator is a collective that writes to its first argument: their schemas do not say so."""
    return getattr(operator, "namespace", "") == "c10d"


def draws_by_tag(operator: Any) -> bool:
    """Return whether the operator's tags say that it draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a nest of containers; of a wrapper subclass those that hold its bytes."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield from plain_tensors(leaf)


def has_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor, which is no wrapper, has a storage that holds its bytes."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the storage of each tensor in a nest of containers."""
    for tensor in tensors(value):
        if has_storage(tensor):
            yield tensor.untyped_storage()


def addresses(value: Any) -> set[int]:
    """Return the addresses of the storages of the tensors in a nest of containers."""
    found = core.storage_addresses(value)
    return {storage._cdata for storage in storages(value)} if found is None else found


def written(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that the operator writes to, by its schema, and running statistics that it updates."""
    schema = getattr(operator, "_schema", None)
    if schema is None:
        return []
    if writes_unseen(operator):
        return [leaf for leaf in tree_leaves(args[:1]) if isinstance(leaf, torch.Tensor)]
    names = _writes_of(operator, schema)
    if not names:
        return []
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    found = [given[name] for name in names.always if given.get(name) is not None]
    if names.in_training and any(given.get(name) for name in names.switches):
        found += [given[name] for name in names.in_training if given.get(name) is not None]
    return found


def makes_alone(operator: Any) -> bool:
    """Return whether an operator is counted in each call, and does nothing but make storages, as far as is known."""
    schema = getattr(operator, "_schema", None)
    if schema is None or kind_of(operator) is not Kind.COUNTED or operator is _TO_COPY:
        return False
    return not (communicates(operator) or _writes_of(operator, schema) or _may_take_generator(operator))


class _Writes(NamedTuple):
    always: tuple[str, ...]  # the names of the arguments that it writes to
    in_training: tuple[str, ...]  # those that it writes to if a switch is on
    switches: tuple[str, ...]


_writes: dict[int, tuple[Any, _Writes | None]] = {}  # by the operator's address, as above


def _writes_of(operator: Any, schema: Any) -> _Writes | None:
    known = _writes.get(id(operator))
    if known is None:
        known = _writes[id(operator)] = (operator, _find_writes(schema))
    return known[1]


def _find_writes(schema: Any) -> _Writes | None:
    arguments = schema.arguments
    always = tuple(each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write)
    names = {each.name for each in arguments}
    in_training = tuple(name for name in _RUNNING_STATISTICS if name in names and name not in always)
    switches = tuple(name for name in _TRAINING if name in names)
    return _Writes(always, in_training, switches) if always or (in_training and switches) else None


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
        is_plain = type(tensor) is torch.Tensor and has_storage(tensor) and not (tensor.is_conj() or tensor.is_neg())
        if not is_plain or tensor.device.type == "meta":
            return None
        nbytes, offset = tensor.untyped_storage().nbytes(), tensor.storage_offset()
        if not isinstance(offset, int):  # symbolic
            return None
        return cls(tuple(tensor.shape), tensor.stride(), offset, nbytes, tensor.dtype, tensor.device)
