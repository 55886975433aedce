"""The contexts that a training loop enters, and the functions that go with them: never_offload() and trim()."""

import contextlib
import threading
import weakref
from typing import Any, Never, Self, Unpack

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from torchoffload._contexts import heads
from torchoffload._contexts.disabling import is_disabled
from torchoffload._contexts.keywords import ContextKeywords, DiskDir, OnFull, Tier
from torchoffload._contexts.options import (
    OffloadOptions,
    check_bool,
    check_module,
    keywords_for_core,
    refuse_unknown,
)
from torchoffload._contexts.signatures import shows_options
from torchoffload._core import core
from torchoffload._pytorch import hook_stack
from torchoffload._pytorch.tensor_subclasses import plain_tensors
from torchoffload._pytorch.tracing import is_not_traced
from torchoffload._warnings import warn_user

__all__ = [
    "NoOpManager",
    "OffloadActivations",
    "get_act_offloading_ctx_manager",
    "never_offload",
    "trim",
]

_TRL_HINT = "TRL's order of arguments is in torchoffload.integrations.trl.get_act_offloading_ctx_manager"


class OffloadActivations(saved_tensors_hooks):
    """Move the tensors that autograd saves out of device memory, until backward needs them.

    Enter it around forward; backward may run inside it or after it. Gradients are equal bit for bit to those without
    it, for tensors of any shape and dtype. One context may be entered any number of times, nested in itself, and by
    several threads.

    Parameters
    ----------
    use_pin_memory : bool, default True
        Store the tensors in pinned (page-locked) host memory. With False they are stored in pageable memory, and copies
        block the host.
    use_streams : bool, default True
        Copy on streams of torchoffload's own, beside the compute stream. With False copies run on the compute stream.
    max_fwd_stash_size : int, optional
        The size of the offload window, as a multiple of the largest record that was saved; at least 1. It excludes
        ``offload_window_bytes``, which sets the same window.
    min_offload_size : int, optional
        A saved tensor stays on the device if its storage has fewer bytes than this. Default: 64 KiB with
        ``tier="host"``, 1 MiB with ``tier="disk"``.
    model : torch.nn.Module, optional
        A model whose parameters and buffers are never moved. Parameters are recognised without it, buffers are not. The
        context reads them when it is first entered, and holds only a weak reference to the model.
    tier : {"host", "disk"}, default "host"
        The place the tensors move to. ``"host"`` moves tensors of CUDA and other accelerators to host memory.
        ``"disk"`` moves CPU tensors to a file, and those of accelerators as well, by way of at most 1 GiB of host
        memory.
    disk_dir : str, os.PathLike, or a list or tuple of them, optional
        The directory in which that file is made, for ``tier="disk"`` and ``on_full="disk"`` only. Several directories,
        best on several disks, share the bytes of CUDA tensors; CPU tensors use the first one. Default:
        ``tempfile.gettempdir()``.
    budget_bytes : int, optional
        The most bytes that saved tensors of this context may occupy on the tier. Default: for host memory,
        ``host_memory().default_budget_bytes``, shared by all contexts; for the file, no limit. With ``on_full="disk"``
        it is how much host memory is used before the disk is, by all contexts of the same directories together, and
        may be 0. If they have different budgets, that of the context which saves counts.
    on_full : {"keep", "error", "disk"}, default "keep"
        The behaviour when the budget, host memory or the disk is used up: ``"keep"`` leaves the tensor on the device
        and warns once, ``"error"`` raises RuntimeError, and ``"disk"`` has the tensors that were saved first go on from
        host memory to a file in ``disk_dir``, and keeps tensors if that is full as well.
    offload_window_bytes : int, optional
        The most bytes that may be on their way out while their device memory is still occupied. The compute stream
        waits when the window is full. 0 uses the least memory. Default: chosen from the sizes and times of earlier
        steps.
    reload_window_bytes : int, optional
        The most bytes that are brought back before backward asks for them. 0 uses the least memory. Default: chosen
        from the sizes and times of earlier steps.
    learn : bool, default True
        Let each step teach the next one which saved tensors are not worth moving, and how large the windows should be.
        Tensors that stay for this reason count towards both windows while they are alive.

    Attributes
    ----------
    options : OffloadOptions
        The options, checked.

    Raises
    ------
    TypeError, ValueError, FileNotFoundError, NotADirectoryError, PermissionError
        An option is wrong. The message names the option, the value given, and the values allowed.

    Notes
    -----
    Entering the context raises RuntimeError if ``tier="host"`` and there is no accelerator, or if a context of another
    tier is open on this thread. Copying or pickling the context gives a new one with equal options; a pickle leaves
    ``model`` out. ``TORCHOFFLOAD_DISABLE=1`` in the environment, which is read at each entry, makes every context a
    no-op.

    Examples
    --------
    >>> with torchoffload.OffloadActivations():
    ...     loss = model(batch).loss
    >>> loss.backward()
    """

    @is_not_traced
    @shows_options()
    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        *,
        max_fwd_stash_size: int | None = None,
        min_offload_size: int | None = None,
        model: nn.Module | None = None,
        tier: Tier = "host",
        disk_dir: DiskDir | None = None,
        budget_bytes: int | None = None,
        on_full: OnFull = "keep",
        offload_window_bytes: int | None = None,
        reload_window_bytes: int | None = None,
        learn: bool = True,
        **unknown: Never,
    ) -> None:
        refuse_unknown(type(self).__name__, unknown, (*OffloadOptions.__dataclass_fields__, "model"))
        for name, value in (("use_pin_memory", use_pin_memory), ("use_streams", use_streams)):
            check_bool(name, value, "; did you mean model=model?" if isinstance(value, nn.Module) else "")
        self.options = OffloadOptions(
            use_pin_memory=use_pin_memory,
            use_streams=use_streams,
            max_fwd_stash_size=max_fwd_stash_size,
            min_offload_size=min_offload_size,
            tier=tier,
            disk_dir=disk_dir,
            budget_bytes=budget_bytes,
            on_full=on_full,
            offload_window_bytes=offload_window_bytes,
            reload_window_bytes=reload_window_bytes,
            learn=learn,
        )
        if model is not None:
            check_module("model", model)
        self._model = None if model is None else weakref.ref(model)
        self._model_lock = threading.Lock()
        self._model_was_read = model is None
        self._context = core.Context(**keywords_for_core(self.options), warn=warn_user)
        super().__init__(self._context.pack, core.unpack)

    def __enter__(self) -> Self:  # type: ignore[override]  # torch's returns None
        if is_disabled():
            hook_stack.push(self, hook_stack.Role.CONTEXT, None)
            return self
        self._open()
        try:
            hook_stack.push(self, hook_stack.Role.CONTEXT, self)
        except BaseException:
            self._context.exit()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        entry = hook_stack.pop(self)
        if entry.hooks is not None:
            self._context.exit()

    def _open(self) -> core.Context:
        """Let the next saved tensor of this thread open a tape, whoever pushes the hooks; ``exit()`` closes it."""
        if not self._model_was_read:
            self._read_model()
        self._context.enter()
        return self._context

    def _read_model(self) -> None:
        with self._model_lock:
            model = self._live_model()
            if model is not None and not self._model_was_read:
                for tensor in (*model.parameters(), *model.buffers()):
                    if not nn.parameter.is_lazy(tensor):
                        for plain in plain_tensors(tensor.detach()):
                            self._context.exempt(plain)
            self._model_was_read = True

    def _live_model(self) -> nn.Module | None:
        return None if self._model is None else self._model()

    def remove_head_hooks(self) -> int:
        """Remove the hooks that ``get_act_offloading_ctx_manager`` put on the output heads of this context's model.

        All contexts that were made for the model share these hooks, so the heads are moved under each of them
        afterwards.

        Returns
        -------
        int
            The number of heads that had hooks; 0 if the context has no model, or the hooks were removed before.
        """
        model = self._live_model()
        return 0 if model is None else heads.remove_head_hooks(model)

    def _again(self, model: nn.Module | None) -> "OffloadActivations":
        return type(self)(model=model, **self.options.as_keywords())

    def __copy__(self) -> "OffloadActivations":
        return self._again(self._live_model())

    def __deepcopy__(self, memo: dict[int, Any]) -> "OffloadActivations":
        # A context that is copied alone must not copy the weights of its model. One that is copied together with its
        # model belongs to the copy of the model.
        model = self._live_model()
        return self._again(memo.get(id(model), model))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.options.as_keywords())

    def __repr__(self) -> str:
        defaults = {name: field.default for name, field in OffloadOptions.__dataclass_fields__.items()}
        given = {name: value for name, value in self.options.as_keywords().items() if value != defaults.get(name)}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"


def _restore(cls: type[OffloadActivations], keywords: dict[str, Any]) -> OffloadActivations:
    return cls(**keywords)


class NoOpManager(saved_tensors_hooks):
    """Keep everything that autograd saves inside it on the device, whatever context is open around it.

    The saved tensors are held detached, so that no reference cycle keeps them alive.

    Examples
    --------
    >>> with torchoffload.OffloadActivations():
    ...     hidden = body(batch)
    ...     with torchoffload.NoOpManager():
    ...         loss = head(hidden)
    """

    @is_not_traced
    def __init__(self) -> None:
        super().__init__(core.noop_pack, core.unpack)

    def __enter__(self) -> Self:  # type: ignore[override]  # torch's returns None
        hook_stack.push(self, hook_stack.Role.CONTEXT, None if is_disabled() else self)
        return self

    def __exit__(self, *exception: object) -> None:
        hook_stack.pop(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "NoOpManager":
        return type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


@is_not_traced
@shows_options(ContextKeywords.__optional_keys__)
def get_act_offloading_ctx_manager(
    model: nn.Module,
    enable_activation_offloading: bool = True,
    *misplaced: Never,
    warn_if_no_head: bool = True,
    **options: Unpack[ContextKeywords],
) -> OffloadActivations | contextlib.nullcontext[None]:
    """Make a context for the forward of ``model`` that leaves the model's output head on the device.

    The head's tensors are saved last in forward and needed first in backward, so moving them frees no memory and makes
    backward wait. The head gets hooks that exempt it. They are installed once, however often this function is called,
    and the context's ``remove_head_hooks()`` removes them.

    Parameters
    ----------
    model : torch.nn.Module
        The model, or a wrapper around it: PEFT, DDP, FSDP, ``torch.compile`` or a checkpoint wrapper.
    enable_activation_offloading : bool, default True
        With False the result is a ``contextlib.nullcontext``: the model runs as if torchoffload were not there.
    warn_if_no_head : bool, default True
        Give a UserWarning if no output head is found.
    **options
        The other keyword options of ``OffloadActivations``, except ``model``.

    Returns
    -------
    OffloadActivations or contextlib.nullcontext
        The context to enter around the forward of ``model``.

    Raises
    ------
    TypeError
        An argument has a wrong type, or there are more than two positional ones. TRL's function of this name has
        another order of arguments; ``torchoffload.integrations.trl`` has a function with that order.
    ValueError, FileNotFoundError, NotADirectoryError, PermissionError
        An option is wrong, as for ``OffloadActivations``.
    """
    if misplaced:
        raise TypeError(
            "get_act_offloading_ctx_manager takes (model, enable_activation_offloading) and keyword options, got "
            f"{len(misplaced)} more positional arguments. {_TRL_HINT}"
        )
    refuse_unknown("get_act_offloading_ctx_manager", options, (*OffloadOptions.__dataclass_fields__, "warn_if_no_head"))
    check_module("model", model)
    try:
        check_bool("enable_activation_offloading", enable_activation_offloading)
    except TypeError as error:
        raise TypeError(f"{error}. {_TRL_HINT}") from None
    check_bool("warn_if_no_head", warn_if_no_head)
    if not enable_activation_offloading:
        return contextlib.nullcontext()
    manager = OffloadActivations(model=model, **options)
    if heads.install_head_hooks(model) == 0 and warn_if_no_head:
        warn_user(
            f"torchoffload: no output head was found in {type(model).__name__}. If it has one, what that saves is "
            "moved too, which costs time and frees little: name the head `output`, `lm_head` or `head`, or give the "
            "model a `get_output_embeddings()`. If it has none, pass warn_if_no_head=False."
        )
    return manager


@is_not_traced
def never_offload(tensor: torch.Tensor) -> None:
    """Mark ``tensor`` so that no context ever moves it, nor anything else on its storage.

    Parameters
    ----------
    tensor : torch.Tensor
        A tensor of any shape and dtype. Of a wrapper subclass, such as DTensor, the tensors inside it are marked.

    Raises
    ------
    TypeError
        ``tensor`` is not a torch.Tensor.
    RuntimeError
        ``tensor`` has no plain storage, such as a sparse one. It is never moved anyway.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"never_offload takes a torch.Tensor, got {type(tensor).__name__}")
    for plain in plain_tensors(tensor):
        core.never_offload(plain)


@is_not_traced
def trim() -> int:
    """Give idle pinned host memory and idle ranges of spill files back to the system.

    Returns
    -------
    int
        The number of bytes given back.
    """
    return core.trim()
