"""Fake tensors that a dry run leaves behind in caches outside of the model, and how they are taken out again.

A forward fills caches now and then that are no attributes of the model: a table of positions in a dict of its file or
its class, in an ``lru_cache``, in that of ``parametrize.cached()``. A tensor without data that stays in one would make
the outputs and the gradients of all later calls tensors without data, and nothing would raise.
"""

import collections
import contextlib
import functools
import gc
import logging
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["DryMode", "Globals", "quiet", "take_out"]

_USED = (
    "torchoffload: a tensor that the model's forward made in fit's dry run is used after it. That run calls the "
    "forward of a copy of the model, with tensors that have no data, to see what each module saves. The forward kept "
    "one of them outside of the model, where fit cannot remove it. Say which modules are the blocks (blocks=), so that "
    "there is no dry run, or call the model once before fit, so that the cache is filled."
)
_MOST_TUPLES = 4  # inside of each other, around a tensor
_CONTAINERS = (dict, list, set, collections.deque)
_LINK = "functools._lru_list_elem"  # of an lru_cache of bounded size


class _OfDryRuns(threading.local):
    depth = 0  # of operators that run in a dry run on this thread


_of_dry_runs = _OfDryRuns()


def _is_of_program(_record: logging.LogRecord) -> bool:
    return _of_dry_runs.depth == 0


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Return a context in which PyTorch does not log that an operator of a dry run has failed.

    It logs each failure of an operator on fake tensors as an error, with a traceback, before it raises. In a dry run
    these are no errors of the program's: forward may catch them, and blocks are chosen otherwise. Messages about the
    program's own fake tensors are not touched.
    """
    logger = logging.getLogger(FakeTensorMode.__module__)
    logger.addFilter(_is_of_program)
    try:
        yield
    finally:
        logger.removeFilter(_is_of_program)


class DryMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """The mode of a dry run. Once that has ended, an operator on one of its tensors is an error.

    So is it to ask one of them for the address of its data, as code does that calls a kernel without PyTorch's
    dispatcher: TorchScript's fused kernels, and those of other libraries. PyTorch would give them the address 0, unless
    it is told not to (``torch._functorch.config.fake_tensor_allow_unsafe_data_ptr_access``).
    """

    has_ended = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._allow_unsafe_data_ptr_access = False

    @contextlib.contextmanager
    def giving_addresses(self) -> Iterator[None]:
        """Make tensors that give the address 0, for code of PyTorch that compares addresses and reads nothing there."""
        self._allow_unsafe_data_ptr_access = True
        try:
            yield
        finally:
            self._allow_unsafe_data_ptr_access = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        if self.has_ended and func.namespace != "prim":  # that asks for a property, as gc and repr do
            raise RuntimeError(_USED)
        _of_dry_runs.depth += 1
        try:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        finally:
            _of_dry_runs.depth -= 1


class Globals:
    """The global variables of all modules of Python as they are now."""

    def __init__(self) -> None:
        # Some packages put other objects than modules there.
        spaces = [vars(each) for each in list(sys.modules.values()) if isinstance(each, type(sys))]
        self._spaces = {id(space): (space, dict(space)) for space in spaces}

    def has(self, space: object) -> bool:
        """Return whether a dict holds the variables of a module."""
        return id(space) in self._spaces

    def put_back(self, space: dict[str, Any], value: object) -> None:
        """Put back the former values of variables that have this value now."""
        _, before = self._spaces[id(space)]
        for name in [name for name, each in space.items() if each is value]:
            if name in before:
                space[name] = before[name]
            else:
                del space[name]


def take_out(mode: "weakref.ref[DryMode]", before: Globals) -> None:
    """Take the tensors of a dry run that has ended out of the containers that hold them outside of it.

    Parameters
    ----------
    mode : weakref.ref of DryMode
        The mode. All its tensors hold it. If it is gone, nothing was left.
    before : Globals
        The variables as they were before the run.
    """
    if mode() is None:
        return
    gc.collect()
    if (left := mode()) is None:
        return
    left.has_ended = True
    del left
    _take_out(mode, before)
    if mode() is not None and gc.get_freeze_count():  # get_referrers() misses frozen objects
        gc.unfreeze()
        _take_out(mode, before)


def _take_out(mode: "weakref.ref[DryMode]", before: Globals) -> None:
    # Not isinstance(), which asks proxies for the class of their object.
    tensors = [each for each in gc.get_objects() if type(each) is FakeTensor and each.fake_mode is mode()]
    while tensors:
        _remove(tensors.pop(), before, [tensors], _MOST_TUPLES)


def _remove(value: object, before: Globals, ours: list[object], depth: int) -> None:
    """Remove a value from the objects that refer to it, also through tuples and links of an ``lru_cache``."""
    frame = sys._getframe()
    for holder in gc.get_referrers(value):
        if isinstance(holder, FrameType) or holder is frame or any(holder is each for each in ours):
            continue
        if isinstance(holder, functools._lru_cache_wrapper):
            holder.cache_clear()
        elif isinstance(holder, dict) and before.has(holder):
            before.put_back(holder, value)
        elif isinstance(holder, _CONTAINERS) and not _is_of_object(holder):
            _remove_from(holder, value)
        elif depth > 0 and (type(holder) is tuple or f"{type(holder).__module__}.{type(holder).__name__}" == _LINK):
            _remove(holder, before, [*ours, ours], depth - 1)


def _is_of_object(container: Any) -> bool:
    """Return whether a dict holds the attributes of an object: their former values are not known."""
    return isinstance(container, dict) and any(
        isinstance(each, type) or _attributes(each) is container for each in gc.get_referrers(container)
    )


def _attributes(value: object) -> object:
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def _remove_from(container: Any, value: object) -> None:
    if isinstance(container, dict):
        for key in [key for key, each in container.items() if each is value or key is value]:
            del container[key]
    elif isinstance(container, set):
        container.discard(value)
    else:
        kept = [each for each in container if each is not value]
        container.clear()
        container.extend(kept)
