"""A dry run: the forward of a copy of a model without memory, which shows what each call of a module would save.

It calls the user's forward once more, and is to leave no trace. So it runs on a copy, without hooks; with warnings off;
it puts the states of random number generators back; it fills no cache of autocast; and no tensor that it makes stays
in a cache outside of the model. What remains is what forward does to the world else, such as a line that it prints.
"""

import contextlib
import random
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchoffload._fit.choosing.call_tree import CallTree
from torchoffload._fit.choosing.collector import Collector, storages_in
from torchoffload._fit.choosing.fake_copy import FakeCopy, cannot_be_copied
from torchoffload._fit.choosing.leftovers import DryMode, Globals, take_out

__all__ = ["LIMIT_S", "DryRunError", "dry_run"]

LIMIT_S = 5.0

_aten = torch.ops.aten
_INDEXING = (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_, _aten._unsafe_index)
_MASKS = (torch.bool, torch.uint8)
_ANY_INT = 1  # what an integer is taken for that only the data would tell


class DryRunError(Exception):
    """A dry run told nothing."""


class _Stop(BaseException):
    """Ends a dry run. Forwards catch an Exception now and then, and go on."""


class _Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells of operators, and answers for those whose result depends on data, which a fake tensor does not have.

    A condition on all values of a tensor is taken to hold, any other one not to. Masks choose everything.
    """

    def __init__(self, collector: Collector, originals: set[int], end: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._collector, self._originals, self._end = collector, originals, end
        self._all: dict[int, torch.UntypedStorage] = {}  # results of all()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "prim":  # it asks for a property of a tensor, where C++ takes no exception
            return func(*args, **(kwargs or {}))
        if time.monotonic() > self._end:
            raise _Stop(f"it took more than {LIMIT_S:g} s")
        if func.namespace == "c10d":
            raise _Stop("its forward communicates")
        packet, keywords = func.overloadpacket, kwargs or {}
        if packet in (_aten._local_scalar_dense, _aten.is_nonzero) and isinstance(args[0], FakeTensor):
            return self._scalar(args[0])
        if packet is _aten.nonzero and isinstance(args[0], FakeTensor):
            output: Any = args[0].new_empty((_count(args[0]), args[0].dim()), dtype=torch.long)
        else:
            if packet in _INDEXING:
                args = (args[0], _indices(args[1]), *args[2:])
            output = func(*args, **keywords)
        self._check(args, keywords)
        if packet is _aten.all:
            storage = output.untyped_storage()
            self._all[storage._cdata] = storage
        if func._schema.is_mutable or not _is_view(func):
            self._collector.note_operator((args, keywords), output)
        return output

    def _scalar(self, tensor: FakeTensor) -> Any:
        if tensor.constant is not None:
            return tensor.constant.item()
        if tensor.dtype is torch.bool:
            return tensor.untyped_storage()._cdata in self._all
        return _ANY_INT if not tensor.is_floating_point() else 0.0

    def _check(self, args: Any, kwargs: Any) -> None:
        """End the run if it has come upon the model itself, by a reference that was not copied."""
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor):
                for storage in storages_in(leaf):
                    if storage._cdata in self._originals:
                        raise _Stop("its forward refers to the model by a way that is not copied")


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


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


def dry_run(model: nn.Module, args: Any, kwargs: Any, limit_s: float = LIMIT_S) -> CallTree:
    """Return what a call of a model would save, as a tree of the calls of its modules.

    Parameters
    ----------
    model : nn.Module
        The model. It is not called, and stays as it is.
    args, kwargs : tuple, dict
        The arguments of the call.
    limit_s : float
        How long forward may take, in seconds. It is looked at with each operator.

    Raises
    ------
    DryRunError
        The forward cannot run without data, takes too long, or would do more than compute.
    """
    why = cannot_be_copied(model)
    if why is not None:
        raise DryRunError(why)
    before = Globals()
    modes: list[weakref.ref[DryMode]] = []
    try:
        with _undone(model):
            told = _run(model, args, kwargs, limit_s, modes)
    finally:
        for mode in modes:
            take_out(mode, before)
    if isinstance(told, str):
        raise DryRunError(told)
    return told


def _run(
    model: nn.Module, args: Any, kwargs: Any, limit_s: float, modes: list["weakref.ref[DryMode]"]
) -> CallTree | str:
    """Return what a call would save, or why that cannot be told: an exception would hold the tensors of the run."""
    try:
        copy = FakeCopy(model, (args, kwargs))
        modes.append(weakref.ref(copy.mode))
        collector = Collector(copy.model)
        collector.watch(copy.originals)
        originals = {storage._cdata for storage in storages_in([*model.parameters(), *model.buffers()])}
        args, kwargs = copy.arguments
        end = time.monotonic() + limit_s

        def note(tensor: torch.Tensor) -> torch.Tensor:
            collector.note_save(tensor)
            return tensor.detach()  # an output that its own graph holds is never freed

        with copy.mode, _Answers(collector, originals, end), saved_tensors_hooks(note, lambda tensor: tensor):
            copy.model(*args, **kwargs)
        return collector.tree()
    except _Stop as stop:
        return str(stop)
    except Exception as error:  # whatever a forward without data ends by
        return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _undone(model: nn.Module) -> Iterator[None]:
    """Put back what a forward changes outside of a model."""
    devices = {each.device for each in [*model.parameters(), *model.buffers()]}
    modules = [(each, torch.get_device_module(each.type)) for each in devices if each.type not in ("cpu", "meta")]
    states = [(each, module, module.get_rng_state(each)) for each, module in modules]
    state, python_state = torch.get_rng_state(), random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    is_cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with warnings.catch_warnings(), _not_taken_for_a_trace():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_autocast_cache_enabled(is_cached)
        torch.set_rng_state(state)
        for device, module, device_state in states:
            module.set_rng_state(device_state, device)
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


@contextlib.contextmanager
def _not_taken_for_a_trace() -> Iterator[None]:
    """Have transformers compute on this thread as it does with data.

    It takes fake tensors for a trace, and then makes a mask instead of calling a causal kernel
    (``transformers.utils.import_utils.is_tracing``).
    """
    module: Any = sys.modules.get("transformers.utils.import_utils")
    real = getattr(module, "is_fake_tensor", None)
    if real is None:
        yield
        return
    thread = threading.get_ident()
    module.is_fake_tensor = lambda tensor: threading.get_ident() != thread and real(tensor)
    try:
        yield
    finally:
        module.is_fake_tensor = real
