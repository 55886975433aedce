"""Tensors that are wrappers around other tensors, such as DTensor."""

from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["plain_tensors"]


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield ``tensor``, or for a wrapper subclass the tensors that hold its bytes, at any depth."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if isinstance(inner, torch.Tensor):  # a DTensor also names its mesh, which is no tensor
            yield from plain_tensors(inner)
