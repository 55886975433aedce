"""Answers for the operators of a dry run whose result depends on data."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchoffload._fit.choosing.collector import storages_in

__all__ = ["Answers", "Stop"]

_aten = torch.ops.aten
_INDEXING = (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_, _aten._unsafe_index)
_MASKS = (torch.bool, torch.uint8)
_ANY_INT = 1  # stands for an integer that only the data would tell


class Stop(BaseException):
    """Ends a dry run. Forwards catch an Exception now and then, and go on."""


class Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells of operators, and answers for those whose result depends on data, which a fake tensor does not have.

    A condition on all values of a tensor is taken to hold, any other one not to. Masks choose everything.

    Parameters
    ----------
    note : callable
        Is told of each operator but those that only make views: the operator, its arguments as a tuple and a dict, and
        its output.
    originals : set of int
        The addresses of the storages of the model, which its copy must not come upon.
    limit_s : float
        How long the run may take, in seconds. It is looked at with each operator.

    Attributes
    ----------
    guess_count : int
        How often a number was asked for that only data would tell.
    """

    guess_count = 0

    def __init__(self, note: Callable[[Any, Any, Any, Any], None], originals: set[int], limit_s: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note, self._originals = note, originals
        self._limit_s, self._end = limit_s, time.monotonic() + limit_s
        self._all: dict[int, torch.UntypedStorage] = {}  # results of all()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "prim":  # it asks for a property of a tensor, and C++ takes no exception
            return func(*args, **(kwargs or {}))
        if time.monotonic() > self._end:
            raise Stop(f"it took more than {self._limit_s:g} s")
        packet, keywords = func.overloadpacket, kwargs or {}
        if func.namespace == "c10d":
            raise Stop("its forward communicates")
        if packet is _aten._cudnn_init_dropout_state:
            _draw_dropout_state_later(torch.device(keywords["device"]))
            raise Stop("a recurrent layer with dropout draws a state, which PyTorch would keep for later calls")
        if packet in (_aten._local_scalar_dense, _aten.is_nonzero) and isinstance(args[0], FakeTensor):
            return self._scalar(args[0])
        if packet is _aten.nonzero and isinstance(args[0], FakeTensor):
            output: Any = args[0].new_empty((_count(args[0]), args[0].dim()), dtype=torch.long)
        elif packet is _aten._grouped_mm and args[0].dtype is not torch.bfloat16 and isinstance(args[0], FakeTensor):
            output = args[0].new_empty(_grouped_shape(args[0], args[1], _offsets(args, keywords)))
        else:
            if packet in _INDEXING:
                args = (args[0], _indices(args[1]), *args[2:])
            output = func(*args, **keywords)
        self._check(args, keywords)
        if packet is _aten.all:
            storage = output.untyped_storage()
            self._all[storage._cdata] = storage
        if func._schema.is_mutable or not _is_view(func):
            self._note(func, args, keywords, output)
        return output

    def _scalar(self, tensor: FakeTensor) -> Any:
        if tensor.constant is not None:
            return tensor.constant.item()
        self.guess_count += 1
        if tensor.dtype is torch.bool:
            return tensor.untyped_storage()._cdata in self._all
        return _ANY_INT if not tensor.is_floating_point() else 0.0

    def _check(self, args: Any, kwargs: Any) -> None:
        """End the run if it has come upon the model itself, by a reference that was not copied."""
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor):
                for storage in storages_in(leaf):
                    if storage._cdata in self._originals:
                        raise Stop("its forward refers to the model by a way that is not copied")


def _draw_dropout_state_later(device: torch.device) -> None:
    """Have PyTorch draw the dropout state of cuDNN's recurrent layers at their next call, as it was about to.

    It takes note that it has drawn the state before it does so. Setting a generator's state takes the note back.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    generator.set_state(generator.get_state())


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def _offsets(args: Any, kwargs: Any) -> Any:
    return args[2] if len(args) > 2 else kwargs.get("offs")


def _grouped_shape(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor | None) -> tuple[int, ...]:
    """Return the shape of a grouped product. The one for fake tensors knows bfloat16 alone, and CPUs know others."""
    if left.dim() == right.dim() == 2:
        assert offsets is not None
        return offsets.shape[0], left.shape[0], right.shape[1]
    if left.dim() == 2:
        return left.shape[0], right.shape[2]
    return (left.shape[1], right.shape[1]) if right.dim() == 2 else (left.shape[0], left.shape[1], right.shape[2])


def _count(tensor: FakeTensor) -> int:
    return tensor.numel() if tensor.constant is None else int(tensor.constant.count_nonzero())


def _indices(indices: Any) -> list[Any]:
    found: list[Any] = []
    for each in indices:
        if isinstance(each, FakeTensor) and each.dtype in _MASKS:
            found += [each.new_empty(_count(each), dtype=torch.long) for _ in range(each.dim())]
        else:
            found.append(each)
    return found
