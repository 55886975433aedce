"""TRL: letting torchoffload carry out ``activation_offloading=True`` of TRL's trainers.

The function that takes the place of TRL's own has the same names and the same order of arguments. It works without TRL.

Examples
--------
>>> torchoffload.integrations.trl.install()  # before the trainer is made
>>> trainer = SFTTrainer(model, args=SFTConfig(activation_offloading=True), train_dataset=data)
"""

import functools
import importlib
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Self, Unpack, cast

from torch import nn

import torchoffload
from torchoffload import OffloadActivations
from torchoffload._contexts.disabling import is_disabled
from torchoffload._contexts.keywords import ContextKeywords, OwnKeywords
from torchoffload._contexts.options import OffloadOptions, check_bool, refuse_unknown
from torchoffload._fit.model.fit import Fitted
from torchoffload._fit.model.options import FitOptions
from torchoffload._observe.idle import advise_if_idle
from torchoffload.integrations._fitting import ContextOrFitKeywords, SurveyWatch, fit_inner_model, fit_options
from torchoffload.integrations._trainers import missing_package, quiet_other_ranks

__all__ = ["FittedContext", "Installation", "get_act_offloading_ctx_manager", "install"]

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
    """Make a context as ``torchoffload.get_act_offloading_ctx_manager`` does, with TRL's signature.

    The defaults are those of TRL: tensors move from 1 KiB on, and the offload window is 5 times the largest record.
    With None for either, torchoffload chooses, which is usually faster.

    Parameters
    ----------
    model : torch.nn.Module
        The model. The tensors that its output head saves stay on the device.
    use_pin_memory, use_streams : bool, default True
        As for ``OffloadActivations``.
    min_offload_size : int or None, default 1024
        As for ``OffloadActivations``, in bytes.
    max_fwd_stash_size : int or None, default 5
        As for ``OffloadActivations``, in records.
    warn_if_no_head : bool, default True
        Give a UserWarning if no output head is found.
    **options
        The other keyword options of ``OffloadActivations``, such as ``tier="disk"``.

    Returns
    -------
    OffloadActivations
        The context to enter around the forward of ``model``.

    Raises
    ------
    TypeError, ValueError, FileNotFoundError, NotADirectoryError, PermissionError
        An argument is wrong.
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


class FittedContext:
    """The context that a trainer of TRL enters around each training step if ``install`` was given ``memory``.

    It calls ``torchoffload.fit`` when the first step begins, since the model is on its device then. The model stays
    fitted until ``remove()``, or until the trainer that holds this context is gone.

    Attributes
    ----------
    fitted : Fitted or None
        The handle of ``fit``; None before the first step.
    """

    def __init__(self, model: nn.Module, modules: Any, options: FitOptions, note: Callable[[Fitted], None]) -> None:
        self.fitted: Fitted | None = None
        self._model = model
        self._fit = functools.partial(fit_inner_model, modules=modules, options=options)
        self._note = note
        self._survey = SurveyWatch()
        self._is_removed = False

    def __enter__(self) -> Self:
        is_fitted = self.fitted is not None and self.fitted.phase != "removed"  # by another trainer of this model
        if not is_fitted and not self._is_removed and not is_disabled():
            self.fitted = self._fit(self._model)
            self._note(self.fitted)
            weakref.finalize(self, self.fitted.remove).atexit = False
        return self

    def __exit__(self, *exception: object) -> None:
        if self.fitted is not None:
            self._survey.step_ended(self.fitted)

    def remove(self) -> None:
        """Remove the hooks from the model for good. A second call does nothing."""
        self._is_removed = True
        if self.fitted is not None:
            self.fitted.remove()


class _OffloadingFunction:
    """The function that takes the place of TRL's own.

    Attributes
    ----------
    func : callable
        The function that it calls.
    was_called : bool
        Whether a trainer has asked for a context.
    fitted : Fitted or None
        With ``memory``, the handle of ``fit`` for the trainer that began last.
    """

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func
        self.was_called = False
        self.fitted: Fitted | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.was_called = True
        return self.func(*args, **kwargs)


def _fitting(modules: Any, options: FitOptions) -> _OffloadingFunction:
    """Return the function for ``install`` with ``memory``."""

    def make(model: nn.Module) -> FittedContext:
        return FittedContext(model, modules, options, note)

    def note(fitted: Fitted) -> None:
        function.fitted = fitted

    function = _OffloadingFunction(make)
    return function


_lock = threading.Lock()
_stock: Callable[..., Any] | None = None  # TRL's own function, while ours is in its place
_in_place: _OffloadingFunction | None = None  # ours


def _put_in_place(function: Callable[..., Any], instead_of: Callable[[object], bool]) -> int:
    """Set ``function`` in each module of TRL that has a function to replace, and return how many modules those are.

    Each module of a trainer has imported the function under its own name. Modules that are imported later take it from
    the module that defines it, in which it was replaced too.

    Parameters
    ----------
    function : callable
        The function to set.
    instead_of : callable
        Takes the value that a module has under the name, and returns whether it is to be replaced.
    """
    modules = [module for name, module in sys.modules.items() if name == "trl" or name.startswith("trl.")]
    having = [module for module in modules if instead_of(vars(module).get(_NAME))]
    for module in having:
        setattr(module, _NAME, function)
    return len(having)


class Installation:
    """The handle that ``install`` returns. It lasts until ``remove()``, or the end of a ``with`` block."""

    def __init__(self, function: _OffloadingFunction) -> None:
        self._function = function

    @property
    def fitted(self) -> Fitted | None:
        """With ``memory``, the handle of ``torchoffload.fit`` for the trainer that began last; None before that."""
        return self._function.fitted

    def remove(self) -> None:
        """Give TRL its own function back. A second call, or a call after another ``install()``, does nothing.

        Trainers that were made meanwhile keep the context that they have.
        """
        global _stock, _in_place
        with _lock:
            if _stock is not None and _put_in_place(_stock, lambda value: value is self._function):
                _stock = _in_place = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def install(
    *, memory: float | str | None = None, modules: Any = None, **options: Unpack[ContextOrFitKeywords]
) -> Installation:
    """Let the trainers of TRL that are made from now on offload with torchoffload.

    ``activation_offloading=True`` of their configuration remains the switch. Installing again replaces the options.

    Parameters
    ----------
    memory : int, float, str, optional
        Have ``torchoffload.fit`` choose which tensors are kept, moved or computed again in this much memory of the
        device, as in ``memory="40GiB"``. The trainer's ``gradient_checkpointing`` has to be False. Its model stays
        fitted after training, until the trainer is gone or ``remove()`` of its ``maybe_activation_offload_context``.
    modules : optional
        With ``memory``, the ``blocks`` of ``fit``.
    **options
        The keyword options of ``OffloadActivations``, except ``model``. Sizes and windows that are not given are chosen
        by torchoffload, and do not have the defaults of TRL. With ``memory``, those of ``fit``, such as
        ``recompute=False``; ``plan="plan.json"`` asks for ``fit`` as well.

    Returns
    -------
    Installation
        A handle. Its ``remove()`` undoes the installation, and so does the end of a ``with`` block on it.

    Raises
    ------
    ImportError
        TRL is not installed, or its version has no activation offloading.
    TypeError, ValueError, FileNotFoundError, NotADirectoryError, PermissionError
        An option is wrong.
    """
    global _stock, _in_place
    of_fit = fit_options("install", memory, modules, options)
    if modules is not None and of_fit is None:
        raise TypeError("modules: the blocks of torchoffload.fit, which memory= asks for: give memory=, too")
    if of_fit is None:
        refuse_unknown("install", options, ContextKeywords.__optional_keys__ | {"memory", "modules"})
        OffloadOptions(**cast("ContextKeywords", options))
    try:
        importlib.import_module("trl")
    except ModuleNotFoundError as error:
        raise missing_package("trl", "trl") from error
    try:
        home = importlib.import_module(_HOME)
        own = getattr(home, _NAME)
    except (ModuleNotFoundError, AttributeError) as error:
        version = getattr(sys.modules["trl"], "__version__", "unknown")
        raise ImportError(f"trl {version} has no {_HOME}.{_NAME}: torchoffload works with trl 1.0 and later") from error
    if of_fit is not None:
        function = _fitting(modules, of_fit)
    else:
        ours: dict[str, Any] = {"min_offload_size": None, "max_fwd_stash_size": None}
        given = ours | cast("dict[str, Any]", options)
        function = _OffloadingFunction(functools.partial(get_act_offloading_ctx_manager, **given))
    quiet_other_ranks()
    with _lock:
        if _stock is None:
            _stock = own
        _put_in_place(function, lambda value: value is not None and value in (_stock, own))
        _in_place = function
    return Installation(function)


def _idle_advice() -> str:
    """Return advice if TRL's function was replaced and no trainer has called it."""
    if _in_place is None or _in_place.was_called:
        return ""
    return (
        "torchoffload.integrations.trl.install() is in place, and no trainer of TRL was made since that offloads: set "
        "activation_offloading=True in its configuration, and make the trainer after install()."
    )


advise_if_idle(_idle_advice)
