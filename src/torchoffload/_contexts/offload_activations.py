"""OffloadActivations and its kin: the contexts that a training loop enters."""

import contextlib
import os
import threading
import weakref
from typing import Any, Never, Unpack

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from torchoffload._contexts import heads
from torchoffload._contexts.disabling import is_disabled
from torchoffload._contexts.keywords import ContextKeywords, OnFull, Tier
from torchoffload._contexts.options import OffloadOptions, check_bool, check_module, refuse_renamed
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
    """Move what autograd saves out of device memory until backward needs it.

    Gradients are the same bit for bit. Enter it around forward; backward may run inside or after it. One context may be
    entered any number of times, nested, and by several threads.

    Parameters
    ----------
    use_pin_memory : bool
        Rest in pinned host memory. False: plain memory and blocking copies.
    use_streams : bool
        Copy on streams of our own, beside the compute stream. False: on the compute stream itself.
    max_fwd_stash_size : int, optional
        The offload window as a count, at least 1, of the tape's largest record. Not together with
        ``offload_window_bytes``.
    min_offload_size : int, optional
        Bytes of storage below which a saved tensor is kept. Default: 64 KiB for the host tier, 1 MiB for the disk tier.
    model : torch.nn.Module, optional
        Its parameters and buffers are never moved; read at the first entry. Parameters are recognised without it,
        buffers are not. Held weakly.
    tier : {"host", "disk"}
        Where records rest. ``"host"`` serves CUDA tensors, ``"disk"`` CPU tensors.
    disk_dir : str or os.PathLike, optional
        The directory of the spill file, for ``tier="disk"`` only. Default: the directory of ``tempfile``.
    budget_bytes : int, optional
        The most bytes that saved tensors of this context may take on the tier: of pinned host memory, or of the spill
        file. Default: see ``host_memory()``; a spill file has none.
    on_full : {"keep", "error"}
        Over budget, or with the tier full: keep the tensor and warn once, or raise RuntimeError.
    offload_window_bytes, reload_window_bytes : int, optional
        Bytes in flight each way, with what is kept because of what was learned; 0 means least memory. Default: chosen
        from what was seen.
    learn : bool
        Let one step teach the next: which saved tensors are not worth moving, and how large the windows should be.

    Raises
    ------
    TypeError, ValueError, FileNotFoundError, NotADirectoryError, PermissionError
        A wrong option; the text names it, what was given and what is allowed.

    Notes
    -----
    Entering raises RuntimeError without an accelerator under ``tier="host"``, and inside a context of another tier.
    Copying and pickling give a new context with equal options; a pickle leaves ``model`` out.
    ``TORCHOFFLOAD_DISABLE=1``, read at each entry, makes every context a no-op.

    Examples
    --------
    >>> with torchoffload.OffloadActivations():
    ...     loss = model(batch).loss
    >>> loss.backward()
    """

    @is_not_traced
    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        *,
        max_fwd_stash_size: int | None = None,
        min_offload_size: int | None = None,
        model: nn.Module | None = None,
        tier: Tier = "host",
        disk_dir: str | os.PathLike[str] | None = None,
        budget_bytes: int | None = None,
        on_full: OnFull = "keep",
        offload_window_bytes: int | None = None,
        reload_window_bytes: int | None = None,
        learn: bool = True,
        **unknown: Never,
    ) -> None:
        refuse_renamed(unknown)
        if unknown:
            raise TypeError(f"{type(self).__name__} got an unknown option: {', '.join(sorted(unknown))}")
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
        self._context = core.Context(**self.options.for_core(), warn=warn_user)
        super().__init__(self._context.pack, core.unpack)

    def __enter__(self) -> None:
        if is_disabled():
            hook_stack.push(self, hook_stack.Role.CONTEXT, None)
            return
        self._open()
        try:
            hook_stack.push(self, hook_stack.Role.CONTEXT, self)
        except BaseException:
            self._context.exit()
            raise

    def __exit__(self, *exception: object) -> None:
        entry = hook_stack.pop(self)
        if entry.hooks is not None:
            self._context.exit()

    def _open(self) -> core.Context:
        """Open a tape at the next saved tensor of this thread, whoever pushes the hooks; ``exit()`` closes it."""
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
        """Take the hooks away that ``get_act_offloading_ctx_manager`` put on the heads of this context's model.

        Every context made for the model shares them, so all of them lose the exemption.

        Returns
        -------
        int
            The number of heads that had hooks; 0 when there is no model, or nothing was left to remove.
        """
        model = self._live_model()
        return 0 if model is None else heads.remove_head_hooks(model)

    def _again(self, model: nn.Module | None) -> "OffloadActivations":
        return type(self)(model=model, **self.options.as_keywords())

    def __copy__(self) -> "OffloadActivations":
        return self._again(self._live_model())

    def __deepcopy__(self, memo: dict[int, Any]) -> "OffloadActivations":
        # Copying the context alone must not copy the model's weights; copied along with its model, it follows it.
        model = self._live_model()
        return self._again(memo.get(id(model), model))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.options.as_keywords())

    def __repr__(self) -> str:
        fields = OffloadOptions.__dataclass_fields__
        given = {name: value for name, value in self.options.as_keywords().items() if value != fields[name].default}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"


def _restore(cls: type[OffloadActivations], keywords: dict[str, Any]) -> OffloadActivations:
    return cls(**keywords)


class NoOpManager(saved_tensors_hooks):
    """Keep everything in here where it is, whatever context is open around it.

    What autograd saves inside stays in device memory, detached, so that nothing leaks.

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

    def __enter__(self) -> None:
        hook_stack.push(self, hook_stack.Role.CONTEXT, None if is_disabled() else self)

    def __exit__(self, *exception: object) -> None:
        hook_stack.pop(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "NoOpManager":
        return type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


@is_not_traced
def get_act_offloading_ctx_manager(
    model: nn.Module,
    enable_activation_offloading: bool = True,
    *misplaced: Never,
    warn_if_no_head: bool = True,
    **options: Unpack[ContextKeywords],
) -> OffloadActivations | contextlib.nullcontext[None]:
    """Make the context to enter around ``model``'s forward, with the model's output head exempt.

    The head's saved tensors are the last of forward and the first of backward: moving them frees nothing and stalls.
    Its hooks are installed once per head, whatever the number of calls; ``remove_head_hooks()`` of the context takes
    them away.

    Parameters
    ----------
    model : torch.nn.Module
        The model, wrapped or not (PEFT, DDP, FSDP, ``torch.compile``, checkpoint wrappers).
    enable_activation_offloading : bool
        False: a ``contextlib.nullcontext``, so that the model runs as without torchoffload and hooks of others apply.
    warn_if_no_head : bool
        Warn when no output head is found.
    **options
        The keyword options of ``OffloadActivations``, but for ``model``.

    Raises
    ------
    TypeError
        A wrong argument, or more positional ones: TRL's function of this name has another order, for which there is
        ``torchoffload.integrations.trl``.
    """
    if misplaced:
        raise TypeError(
            "get_act_offloading_ctx_manager takes (model, enable_activation_offloading) and keyword options, got "
            f"{len(misplaced)} more positional arguments. {_TRL_HINT}"
        )
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
    """Mark ``tensor``: no context ever moves what is saved of it.

    Raises
    ------
    TypeError
        ``tensor`` is no tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"never_offload takes a torch.Tensor, got {type(tensor).__name__}")
    for plain in plain_tensors(tensor):
        core.never_offload(plain)


@is_not_traced
def trim() -> int:
    """Give idle pinned memory and idle ranges of spill files back to the system.

    Returns
    -------
    int
        The bytes given back.
    """
    return core.trim()
