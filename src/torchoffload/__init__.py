"""torchoffload: activation offloading for PyTorch.

Examples
--------
>>> with torchoffload.OffloadActivations():
...     loss = model(batch).loss
>>> loss.backward()
"""

from torchoffload._core import build_info as _build_info
from torchoffload._host import HostMemory, host_memory
from torchoffload._offload import (
    NoOpManager,
    OffloadActivations,
    get_act_offloading_ctx_manager,
    never_offload,
    trim,
)
from torchoffload._report import report
from torchoffload._stats import OffloadStats, TapeStats, reset_stats, stats

__version__ = _build_info.version

__all__ = [
    "HostMemory",
    "NoOpManager",
    "OffloadActivations",
    "OffloadStats",
    "TapeStats",
    "__version__",
    "get_act_offloading_ctx_manager",
    "host_memory",
    "never_offload",
    "report",
    "reset_stats",
    "stats",
    "trim",
]
