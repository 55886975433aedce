"""The compiled core. Private: the public names are re-exported by ``torchoffload``."""

from collections.abc import Callable
from types import CodeType
from typing import Any, final

import torch

built_with_cuda: bool  # whether the torch that this core was built for is a CUDA build

@final
class Context:
    """One offloading context: options, and the tapes it has open. Light: a new one each step grows nothing."""

    def __init__(
        self,
        *,
        tier: str,  # "host" | "disk"
        use_pin_memory: bool,
        use_streams: bool,
        max_fwd_stash_size: int | None,
        min_offload_size: int,  # in bytes; the tier's default is resolved
        offload_window_bytes: int | None,  # None: chosen from what was seen
        reload_window_bytes: int | None,
        learn: bool,
        disk_dir: str | None,  # absolute path for tier="disk", else None
        budget_bytes: int | None,  # None: the default of host_memory(), on disk none
        on_full: str,  # "keep" | "error"
        warn: Callable[[str], None],  # called at most once per kind of warning, with the text
    ) -> None: ...
    def pack(self, tensor: torch.Tensor, /) -> object: ...
    def enter(self) -> None:
        """RuntimeError: no accelerator with tier="host"; nested in a context of another tier."""
    def exit(self) -> None:
        """RuntimeError: left more often than entered on this thread."""
    def exempt(self, tensor: torch.Tensor, /) -> None:
        """Never move anything on this tensor's storage under this context (``model``'s parameters and buffers)."""

    # Of offload_modules:
    def restrict(self, fraction: float, only_inputs: bool, /) -> None: ...
    def set_module(self, number: int, /) -> int:
        """Count what this thread saves from here on for that module; 0 is outside of all. Returns the one before."""
    def admit(self, tensor: torch.Tensor, /) -> None:
        """Under ``only_inputs``, move what this thread saves of this tensor's storage until the exit, or has saved."""
    def forget_modules(self) -> None: ...

def unpack(handle: object, /) -> torch.Tensor: ...
def noop_pack(tensor: torch.Tensor, /) -> object:
    """A handle that keeps the tensor, detached; ``unpack`` gives it back."""

def never_offload(tensor: torch.Tensor, /) -> None: ...
def note_saving_code(code: CodeType, /) -> None:
    """Let what a function saves while a frame of this code is the innermost one move with all of its storage."""

def stats() -> dict[str, Any]:
    """Totals since reset_stats() and a list of rows under "tapes"; keys are the fields of ``OffloadStats``."""

def module_rows(context: Context, /) -> list[dict[str, Any]]:
    """The counts of each number that ``set_module`` was given, in their order; keys are fields of ``ModuleStats``."""

def reset_stats() -> None: ...
def live_saves() -> list[tuple[torch.dtype, tuple[int, ...] | None, int, float]]:
    """Saved tensors that are alive, the newest first: dtype, shape, bytes, age in seconds.

    No shape, and 0 bytes, where asking would run Python.
    """

def start_profile() -> None:
    """Begin to note what happens when, on each device that tells time. RuntimeError: in a CUDA graph capture."""

def stop_profile() -> list[tuple[str, list[tuple[str, float, float, int, int, int, bool, int, int, int]]]]:
    """Wait for what was noted, and return it: for each device that tells time its name and its entries.

    An entry: kind, begin_s, end_s, tape, record, nbytes, is_kept, offload_window_bytes, reload_window_bytes,
    device_bytes; seconds since start_profile(), in the order of the host.
    """

def trim() -> int:
    """Give idle pinned memory and spill-file ranges back. Returns bytes."""

def host_memory() -> dict[str, int | None]:
    """Bytes: total, available, limit, limit_used, limit_inactive_file, default_budget."""

def accelerator_available() -> bool:
    """A device with an engine for tier="host" (CUDA, or a simulated device in the test build)."""
