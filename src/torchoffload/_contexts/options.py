"""OffloadOptions: what an offloading context was asked to do, checked as a whole before anything is entered.

Checking touches no accelerator: a script may build its contexts before it chooses a device.
"""

import os
import reprlib
import stat
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

import torch

from torchoffload._contexts.keywords import OnFull, Tier
from torchoffload._warnings import warn_user

__all__ = [
    "OffloadOptions",
    "check_bool",
    "check_module",
    "default_disk_dir",
    "described",
    "file_system_of",
    "is_in_ram",
    "refuse_renamed",
    "short",
]

_TIERS: tuple[str, ...] = get_args(Tier)
_ON_FULL: tuple[str, ...] = get_args(OnFull)
_DEFAULT_MIN_OFFLOAD_BYTES = {"host": 64 * 1024, "disk": 1024 * 1024}
_LARGEST_BYTES = 2**63 - 1  # the core counts bytes in 64 bits
_RENAMED = {"host_budget_bytes": "budget_bytes", "on_host_full": "on_full"}
_FILE_SYSTEMS_IN_RAM = ("tmpfs", "ramfs", "devtmpfs")
_SHOWN = (bool, int, float, str, bytes, os.PathLike, type(None))  # in errors; of all else, the type alone
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 100


def short(value: object) -> str:
    """``repr(value)``, with the middle left out where it is long."""
    return _short.repr(value)


def described(value: object) -> str:
    """Say in a few words what was given: the text of a model, a tensor or a list of them fills screens."""
    kind = type(value).__name__
    if isinstance(value, _SHOWN):
        return f"{short(value)} ({kind})"
    return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"


def check_bool(name: str, value: object, hint: str = "") -> None:
    """Refuse what is not True or False; 0 and 1 too, as they are byte counts elsewhere. ``hint`` ends the text."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {described(value)}{hint}")


def refuse_renamed(options: Iterable[str]) -> None:
    """Refuse names that options had once, with those that they have now."""
    for name in options:
        if name in _RENAMED:
            raise TypeError(f"{name} was renamed {_RENAMED[name]}: it means the same, of the tier that is used")


def check_module(name: str, value: object) -> None:
    """Refuse what is no module."""
    if not isinstance(value, torch.nn.Module):
        raise TypeError(f"{name} must be a torch.nn.Module, got {type(value).__name__}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    allowed = " or ".join(repr(choice) for choice in choices)
    if not isinstance(value, str):
        raise TypeError(f"{name} must be {allowed}, got {described(value)}")
    if value not in choices:
        raise ValueError(f"{name} must be {allowed}, got {short(value)}")


def _check_count(name: str, value: object, *, least: int, unit: str) -> None:
    """Refuse what is neither a whole number of ``unit`` nor None, which stands for the default."""
    allowed = f"a whole number of {unit} of at least {least}, or None for the default"
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be {allowed}, got {described(value)}")
    if not least <= value <= _LARGEST_BYTES:
        raise ValueError(f"{name} must be {allowed} and at most {_LARGEST_BYTES}, got {short(value)}")


def default_disk_dir() -> str:
    """Say where spill files go when ``disk_dir`` is not given: the directory of Python's ``tempfile``."""
    return tempfile.gettempdir()


@lru_cache(maxsize=16)
def _file_system_of_device(device: int) -> str | None:
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        fields, _, source = line.partition(" - ")  # proc(5): the type is the first field behind the separator
        if fields.split()[2:3] == [number]:
            return source.split()[0]
    return None


def file_system_of(directory: str) -> str | None:
    """Name the type of the file system that holds ``directory``, such as ``"ext4"``; None when Linux does not say."""
    return _file_system_of_device(os.stat(directory).st_dev)


def is_in_ram(directory: str) -> bool:
    """Return whether the file system of ``directory`` rests in memory; False where that cannot be told."""
    try:
        return file_system_of(directory) in _FILE_SYSTEMS_IN_RAM
    except OSError:
        return False


def _checked_disk_dir(disk_dir: object) -> str:
    """Return the absolute path of ``disk_dir``, a directory that a spill file can be made in."""
    if not isinstance(disk_dir, (str, os.PathLike)) or not isinstance(os.fspath(disk_dir), str):
        raise TypeError(f"disk_dir must be a path (str or os.PathLike) or None, got {described(disk_dir)}")
    given = os.fspath(disk_dir)
    if not given or "\0" in given:
        raise ValueError(f"disk_dir must be the path of a directory, got {given!r}")
    path = os.path.abspath(given)
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise FileNotFoundError(f"disk_dir {path!r} does not exist: make it, or name a directory that does") from None
    except NotADirectoryError:
        raise NotADirectoryError(f"disk_dir {path!r} leads through a file: name a directory") from None
    except PermissionError:
        raise PermissionError(f"disk_dir {path!r} cannot be looked up: a directory above it is closed to us") from None
    except OSError as error:
        raise ValueError(f"disk_dir {path!r} cannot be used: {error.strerror}") from None
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(f"disk_dir {path!r} is not a directory: name the directory to put spill files in")
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(f"disk_dir {path!r} is not writable: choose another, or change its permissions")
    if is_in_ram(path):
        warn_user(
            f"torchoffload: disk_dir {path!r} is on {file_system_of(path)}, which is RAM: "
            "what is offloaded there frees no memory. Set disk_dir to a directory on a disk."
        )
    return path


@dataclass(frozen=True, kw_only=True)
class OffloadOptions:
    """The options of one offloading context, checked. See ``OffloadActivations`` for what each means.

    ``disk_dir`` holds an absolute path for ``tier="disk"``, else None; every other field is as given.

    Raises
    ------
    TypeError, ValueError
        An option of a wrong type or value; the text names it, what was given and what is allowed.
    FileNotFoundError, NotADirectoryError, PermissionError
        ``disk_dir`` cannot hold a spill file.
    """

    use_pin_memory: bool = True
    use_streams: bool = True
    learn: bool = True
    max_fwd_stash_size: int | None = None
    min_offload_size: int | None = None
    tier: Tier = "host"
    disk_dir: str | os.PathLike[str] | None = None
    budget_bytes: int | None = None
    on_full: OnFull = "keep"
    offload_window_bytes: int | None = None
    reload_window_bytes: int | None = None

    def __post_init__(self) -> None:
        check_bool("use_pin_memory", self.use_pin_memory)
        check_bool("use_streams", self.use_streams)
        check_bool("learn", self.learn)
        _check_count("max_fwd_stash_size", self.max_fwd_stash_size, least=1, unit="saved tensors")
        _check_count("min_offload_size", self.min_offload_size, least=0, unit="bytes")
        _check_choice("tier", self.tier, _TIERS)
        _check_count("budget_bytes", self.budget_bytes, least=1, unit="bytes")
        _check_choice("on_full", self.on_full, _ON_FULL)
        _check_count("offload_window_bytes", self.offload_window_bytes, least=0, unit="bytes")
        _check_count("reload_window_bytes", self.reload_window_bytes, least=0, unit="bytes")
        if self.max_fwd_stash_size is not None and self.offload_window_bytes is not None:
            raise ValueError(
                "max_fwd_stash_size and offload_window_bytes both set the offload window: give one of them, got "
                f"max_fwd_stash_size={self.max_fwd_stash_size} and offload_window_bytes={self.offload_window_bytes}"
            )
        if self.tier == "disk":
            disk_dir = default_disk_dir() if self.disk_dir is None else self.disk_dir
            object.__setattr__(self, "disk_dir", _checked_disk_dir(disk_dir))
        elif self.disk_dir is not None:
            raise ValueError(
                f'disk_dir is for tier="disk" only, got {described(self.disk_dir)} with tier={self.tier!r}'
            )

    @property
    def min_offload_bytes(self) -> int:
        """``min_offload_size``, or the tier's default."""
        if self.min_offload_size is not None:
            return self.min_offload_size
        return _DEFAULT_MIN_OFFLOAD_BYTES[self.tier]

    def as_keywords(self) -> dict[str, Any]:
        """Keyword arguments that make equal options again."""
        return asdict(self)

    def for_core(self) -> dict[str, Any]:
        """Keyword arguments of the compiled core's ``Context``, except ``warn``: the same names, sizes resolved."""
        return vars(self) | {"min_offload_size": self.min_offload_bytes}
