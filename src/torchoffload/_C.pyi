"""The compiled core. Private: the public names are re-exported by ``torchoffload``."""

from collections.abc import Callable
from typing import Any, final

import torch

# What this core was built for; compared with the torch at run time by torchoffload/__init__.py.
built_torch_version: str  # torch.__version__ at build time, e.g. "2.13.0+cpu"
built_with_cuda: bool
testing_build: bool  # True only in the test build, which adds the submodule `testing`

@final
class Context:
    """One offloading context: options, and the tapes it has open. Light: a new one each step grows nothing."""

    def __init__(
        self,
        *,
        tier: str,  # "host" | "disk"
        use_pin_memory: bool,
        use_streams: bool,
        min_offload_bytes: int,
        offload_window_bytes: int | None,  # None: chosen from what was seen
        offload_window_records: int | None,  # max_fwd_stash_size
        reload_window_bytes: int | None,
        disk_dir: str | None,  # absolute path for tier="disk", else None
        host_budget_bytes: int | None,  # None: the default of host_memory()
        raise_on_full: bool,
        warn: Callable[[str], None],  # called at most once per kind of warning, with the text
    ) -> None: ...
    def pack(self, tensor: torch.Tensor, /) -> object: ...
    def enter(self) -> None:
        """RuntimeError: no accelerator with tier="host"; nested in a context of another tier."""
    def exit(self) -> None:
        """RuntimeError: left more often than entered on this thread."""
    def exempt(self, tensor: torch.Tensor, /) -> None:
        """Never move anything on this tensor's storage under this context (``model``'s parameters and buffers)."""

def unpack(handle: object, /) -> torch.Tensor: ...
def noop_pack(tensor: torch.Tensor, /) -> object:
    """A handle that keeps the tensor, detached; ``unpack`` gives it back."""

def never_offload(tensor: torch.Tensor, /) -> None: ...
def stats() -> dict[str, Any]:
    """Totals since reset_stats() and a list of rows under "tapes"; keys are the fields of ``OffloadStats``."""

def reset_stats() -> None: ...
def trim() -> int:
    """Give idle pinned memory and spill-file ranges back. Returns bytes."""

def host_memory() -> dict[str, int | None]:
    """Bytes: total, available, limit, limit_used, limit_inactive_file, default_budget."""

def accelerator_available() -> bool:
    """A device with an engine for tier="host" (CUDA, or a simulated device in the test build)."""
