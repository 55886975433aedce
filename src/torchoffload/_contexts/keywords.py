"""The keyword options of a context as types, so that editors complete them and type checkers find wrong ones.

``OffloadOptions`` checks the values when the program runs; ``tests/docs/test_option_names.py`` compares the names,
and ``tests/contexts/test_typing.py`` runs mypy over right and wrong calls.
"""

import os
from collections.abc import Sequence
from typing import Literal, TypedDict

__all__ = [
    "ContextKeywords",
    "DiskDir",
    "ModuleKeywords",
    "MovingKeywords",
    "OnFull",
    "OwnKeywords",
    "Tier",
]

Tier = Literal["host", "disk"]
OnFull = Literal["keep", "error", "disk"]
DiskDir = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class SharedKeywords(TypedDict, total=False):
    """The options that torchtune and TRL have under the same names, except that of the offload window."""

    use_pin_memory: bool
    use_streams: bool
    min_offload_size: int | None


class TierKeywords(TypedDict, total=False):
    """The place of the saved tensors, and the ways there: options that torchoffload alone has."""

    tier: Tier
    disk_dir: DiskDir | None
    budget_bytes: int | None
    on_full: OnFull
    learn: bool


class MovingKeywords(SharedKeywords, TierKeywords, total=False):
    """The options of ``fit`` for the tensors that move: those of a context, except the windows, which plans choose."""


class OwnKeywords(TierKeywords, total=False):
    """The options of a context that torchoffload alone has, except ``model``: functions that take these know it."""

    offload_window_bytes: int | None
    reload_window_bytes: int | None


class ContextKeywords(SharedKeywords, OwnKeywords, total=False):
    """The options of ``OffloadActivations``, except ``model``."""

    max_fwd_stash_size: int | None


class ModuleKeywords(ContextKeywords, total=False):
    """The options of ``offload_modules``, with those of the context that it makes."""

    fraction: float | None
    keep_last: int | None
    only_inputs: bool
