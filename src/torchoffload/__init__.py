"""torchoffload: activation offloading for PyTorch.

Examples
--------
>>> with torchoffload.OffloadActivations():
...     loss = model(batch).loss
>>> loss.backward()
"""

from torchoffload._checkpoint import selective_checkpoint_context_fn
from torchoffload._core import build_info as _build_info
from torchoffload._host import HostMemory, host_memory
from torchoffload._module_stats import ModuleStats
from torchoffload._modules import OffloadedModules, offload_modules
from torchoffload._offload import (
    NoOpManager,
    OffloadActivations,
    get_act_offloading_ctx_manager,
    never_offload,
    trim,
)
from torchoffload._plot import plot_memory
from torchoffload._profile import Profile, profile
from torchoffload._report import report
from torchoffload._stats import OffloadStats, TapeStats, reset_stats, stats
from torchoffload._timing import EntryKind, ProfileEntry, TapeTiming, Timing, Transfers

__version__ = _build_info.version

__all__ = [
    "EntryKind",
    "HostMemory",
    "ModuleStats",
    "NoOpManager",
    "OffloadActivations",
    "OffloadStats",
    "OffloadedModules",
    "Profile",
    "ProfileEntry",
    "TapeStats",
    "TapeTiming",
    "Timing",
    "Transfers",
    "__version__",
    "get_act_offloading_ctx_manager",
    "host_memory",
    "never_offload",
    "offload_modules",
    "plot_memory",
    "profile",
    "report",
    "reset_stats",
    "selective_checkpoint_context_fn",
    "stats",
    "trim",
]
