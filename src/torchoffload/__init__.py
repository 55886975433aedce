"""torchoffload: activation offloading for PyTorch.

Autograd saves tensors during forward and needs them again in backward. Inside ``OffloadActivations`` most of these
tensors leave the device during forward, for pinned host memory or a file on disk, and are back in time for backward.
Gradients are equal bit for bit. ``docs/api.md`` describes every public name.

Examples
--------
>>> with torchoffload.OffloadActivations():
...     loss = model(batch).loss
>>> loss.backward()
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from torchoffload._checkpoint.selective import selective_checkpoint_context_fn
from torchoffload._compile.partition import compile_options, partition_fn
from torchoffload._contexts.offload_activations import (
    NoOpManager,
    OffloadActivations,
    get_act_offloading_ctx_manager,
    never_offload,
    trim,
)
from torchoffload._contexts.options import OffloadOptions
from torchoffload._core import build_info as _build_info
from torchoffload._modules.offload_modules import OffloadedModules, offload_modules
from torchoffload._observe.host_memory import HostMemory, host_memory
from torchoffload._observe.module_stats import ModuleStats
from torchoffload._observe.plot import plot_memory
from torchoffload._observe.profile import Profile, profile
from torchoffload._observe.report import report
from torchoffload._observe.stats import OffloadStats, TapeStats, reset_stats, stats
from torchoffload._observe.timing import EntryKind, ProfileEntry, TapeTiming, Timing, Transfers

if _TYPE_CHECKING:
    from torchoffload._estimate.cards import Card
    from torchoffload._estimate.estimate import estimate
    from torchoffload._estimate.result import Estimate, StepEstimate
    from torchoffload._fit.model.describe import FrontierPoint
    from torchoffload._fit.model.fit import FitPlan, Fitted, fit
else:
    # fit and estimate are half of the package, and most programs call neither: their modules are imported when they are
    # first asked for.
    _LATER = {
        "Card": "_estimate.cards",
        "Estimate": "_estimate.result",
        "FitPlan": "_fit.model.fit",
        "Fitted": "_fit.model.fit",
        "FrontierPoint": "_fit.model.describe",
        "StepEstimate": "_estimate.result",
        "estimate": "_estimate.estimate",
        "fit": "_fit.model.fit",
    }

    def __getattr__(name: str) -> _Any:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(_importlib.import_module(f"torchoffload.{_LATER[name]}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__version__ = _build_info.version

__all__ = [
    "Card",
    "EntryKind",
    "Estimate",
    "FitPlan",
    "Fitted",
    "FrontierPoint",
    "HostMemory",
    "ModuleStats",
    "NoOpManager",
    "OffloadActivations",
    "OffloadOptions",
    "OffloadStats",
    "OffloadedModules",
    "Profile",
    "ProfileEntry",
    "StepEstimate",
    "TapeStats",
    "TapeTiming",
    "Timing",
    "Transfers",
    "__version__",
    "compile_options",
    "estimate",
    "fit",
    "get_act_offloading_ctx_manager",
    "host_memory",
    "never_offload",
    "offload_modules",
    "partition_fn",
    "plot_memory",
    "profile",
    "report",
    "reset_stats",
    "selective_checkpoint_context_fn",
    "stats",
    "trim",
]
