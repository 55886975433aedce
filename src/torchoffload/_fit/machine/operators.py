"""The storages of tensors in containers, their bytes, and which operators communicate with other ranks."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from torchoffload._pytorch.collectives import communicates
from torchoffload._pytorch.tensor_subclasses import plain_tensors

__all__ = ["communicates", "gradients", "has_storage", "storages", "tensors", "to_one_rank", "unique_bytes"]


def to_one_rank(operator: Any) -> bool:
    """Return whether the operator sends to a single rank, or receives from one."""
    return communicates(operator) and operator.__name__.startswith(("send", "recv"))


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a nest of containers; of a wrapper subclass those that hold its bytes."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield from plain_tensors(leaf)


def has_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor, which is no wrapper and may be a lazy parameter, has a storage that holds its bytes."""
    if is_lazy(tensor):
        return False
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the storage of each tensor in a nest of containers."""
    for tensor in tensors(value):
        if has_storage(tensor):
            yield tensor.untyped_storage()


def unique_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages of tensors, each counted once."""
    seen = {storage._cdata: storage.nbytes() for storage in storages(list(tensors))}
    return sum(seen.values())


def gradients(model: nn.Module | None) -> Iterator[torch.Tensor]:
    """Yield the gradients that a model has; none if it is gone."""
    for parameter in () if model is None else model.parameters():
        if parameter.grad is not None:
            yield parameter.grad
