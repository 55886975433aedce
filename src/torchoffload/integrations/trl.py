"""TRL: ``activation_offloading=True`` of its trainers, carried out by torchoffload.

The function that is put in place has TRL's own order and names of arguments; it needs no TRL.

Examples
--------
>>> torchoffload.integrations.trl.install()  # before the trainer is made
>>> trainer = SFTTrainer(model, args=SFTConfig(activation_offloading=True), train_dataset=data)
"""

import functools
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any, Self, Unpack, cast

from torch import nn

import torchoffload
from torchoffload import OffloadActivations
from torchoffload._contexts.keywords import ContextKeywords, OwnKeywords
from torchoffload._contexts.options import OffloadOptions, check_bool, refuse_renamed
from torchoffload.integrations._trainers import missing_package, quiet_other_ranks

__all__ = ["Installation", "get_act_offloading_ctx_manager", "install"]

_NAME = "get_act_offloading_ctx_manager"
_HOME = "trl.models.activation_offloading"


def get_act_offloading_ctx_manager(
    model: nn.Module,
    use_pin_memory: bool = True,
    use_streams: bool = True,
    min_offload_size: int | None = 1024,
    max_fwd_stash_size: int | None = 5,
    warn_if_no_head: bool = True,
    **options: Unpack[OwnKeywords],
) -> OffloadActivations:
    """``torchoffload.get_act_offloading_ctx_manager`` with the signature of ``trl.models.activation_offloading``.

    The defaults are TRL's, taken at their word: copies from 1 KiB on, and an offload window of 5 of the largest record.
    None for either chooses torchoffload's default, which is usually faster.

    Parameters
    ----------
    model : torch.nn.Module
        The model; its output head is exempt.
    use_pin_memory, use_streams, min_offload_size, max_fwd_stash_size, warn_if_no_head
        As in TRL and ``OffloadActivations``.
    **options
        The other keyword options of ``OffloadActivations``, such as ``tier="disk"``.

    Raises
    ------
    TypeError, ValueError
        A wrong argument.
    """
    check_bool("warn_if_no_head", warn_if_no_head)
    manager = torchoffload.get_act_offloading_ctx_manager(
        model,
        True,
        warn_if_no_head=warn_if_no_head,
        use_pin_memory=use_pin_memory,
        use_streams=use_streams,
        min_offload_size=min_offload_size,
        max_fwd_stash_size=max_fwd_stash_size,
        **options,
    )
    return cast("OffloadActivations", manager)


_lock = threading.Lock()
_stock: Callable[..., Any] | None = None  # TRL's own, while ours is in place


def _put_in_place(function: Callable[..., Any], instead_of: Callable[[object], bool]) -> int:
    """Set ``function`` in each module of TRL that has one to replace: each trainer's module has a name of its own.

    What TRL imports later takes it from its home.
    """
    modules = [module for name, module in sys.modules.items() if name == "trl" or name.startswith("trl.")]
    having = [module for module in modules if instead_of(vars(module).get(_NAME))]
    for module in having:
        setattr(module, _NAME, function)
    return len(having)


class Installation:
    """torchoffload in the place of TRL's own function, until ``remove()`` or the end of a ``with``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def remove(self) -> None:
        """Give TRL its own function back; does nothing after another ``install()``, and the second time.

        Trainers that were made meanwhile keep the context that they have.
        """
        global _stock
        with _lock:
            if _stock is not None and _put_in_place(_stock, lambda value: value is self._function):
                _stock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def install(**options: Unpack[ContextKeywords]) -> Installation:
    """Have the trainers of TRL that are made from now on offload with torchoffload.

    Their ``activation_offloading=True`` remains the switch. Installing again takes the new options.

    Parameters
    ----------
    **options
        The keyword options of ``OffloadActivations``, but for ``model``. Windows and sizes are chosen by torchoffload
        where they are not given.

    Returns
    -------
    Installation
        Undoes it with ``remove()``; or use it in a ``with``.

    Raises
    ------
    ImportError
        TRL is not installed, or is a version without activation offloading.
    TypeError, ValueError, FileNotFoundError, NotADirectoryError, PermissionError
        A wrong option.
    """
    global _stock
    refuse_renamed(options)
    OffloadOptions(**options)
    try:
        importlib.import_module("trl")
    except ModuleNotFoundError as error:
        raise missing_package("trl", "trl", "trl") from error
    try:
        home = importlib.import_module(_HOME)
        own = getattr(home, _NAME)
    except (ModuleNotFoundError, AttributeError) as error:
        version = getattr(sys.modules["trl"], "__version__", "unknown")
        raise ImportError(f"trl {version} has no {_HOME}.{_NAME}: torchoffload works with trl 1.0 and later") from error
    function = functools.partial(
        get_act_offloading_ctx_manager, **({"min_offload_size": None, "max_fwd_stash_size": None} | options)
    )
    quiet_other_ranks()
    with _lock:
        if _stock is None:
            _stock = own
        _put_in_place(function, lambda value: value is not None and value in (_stock, own))
    return Installation(function)
