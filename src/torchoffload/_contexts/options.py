"""The options of an offloading context, checked all together when the context is made.

Checking touches no accelerator, so a script may make its contexts before it chooses a device.
"""

import difflib
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

from torchoffload._contexts.keywords import DiskDir, OnFull, Tier
from torchoffload._warnings import warn_user

__all__ = [
    "OffloadOptions",
    "check_bool",
    "check_module",
    "default_disk_dir",
    "described",
    "file_system_of",
    "is_in_ram",
    "keywords_for_core",
    "refuse_unknown",
    "short",
]

_TIERS: tuple[str, ...] = get_args(Tier)
_ON_FULL: tuple[str, ...] = get_args(OnFull)
_DEFAULT_MIN_OFFLOAD_BYTES = {"host": 64 * 1024, "disk": 1024 * 1024}
_LARGEST_BYTES = 2**63 - 1  # the core counts bytes in signed 64-bit integers
_RENAMED = {"host_budget_bytes": "budget_bytes", "on_host_full": "on_full"}
_FILE_SYSTEMS_IN_RAM = ("tmpfs", "ramfs", "devtmpfs")
# Values of these types are shown in errors. Of all others only the type is shown: the text of a model, a tensor or a
# list of them fills screens.
_SHOWN = (bool, int, float, str, bytes, os.PathLike, type(None))
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 100


def short(value: object) -> str:
    """Return ``repr(value)``, with the middle left out if it is long."""
    return _short.repr(value)


def described(value: object) -> str:
    """Describe in a few words, for an error message, the value that was given."""
    kind = type(value).__name__
    if isinstance(value, _SHOWN):
        return f"{short(value)} ({kind})"
    return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"


def check_bool(name: str, value: object, hint: str = "") -> None:
    """Raise TypeError unless ``value`` is True or False; ``hint`` is appended to the message.

    0 and 1 are refused as well, because other options take byte counts, and the two could be confused.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {described(value)}{hint}")


def refuse_unknown(taker: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError if a name that was given is not known; the message has the known name that it resembles.

    Parameters
    ----------
    taker : str
        The function or class that the options were given to, for the message.
    given, known : iterable of str
        The names that were given, and those that ``taker`` has.
    """
    all_known = set(known)
    unknown = sorted(set(given) - all_known)
    for name in unknown:
        if name in _RENAMED:  # as it was called in an earlier version
            raise TypeError(f"{name} was renamed {_RENAMED[name]}: it means the same, for the tier that is used")
    if "memory" in unknown:
        blocks = ", blocks=modules" if taker == "offload_modules" else ""
        raise TypeError(
            f"{taker} takes no memory=. Call torchoffload.fit(model, memory=...{blocks}, recompute=False) instead: it "
            "keeps what there is room for, and moves the rest"
        )
    names = []
    for name in unknown:
        similar = difflib.get_close_matches(name, all_known, n=1)
        names.append(f"{name} (did you mean {similar[0]}?)" if similar else name)
    if names:
        raise TypeError(f"{taker} got an unknown option: {', '.join(names)}")


def check_module(name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is a torch.nn.Module."""
    if not isinstance(value, torch.nn.Module):
        raise TypeError(f"{name} must be a torch.nn.Module, got {type(value).__name__}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    allowed = " or ".join(repr(choice) for choice in choices)
    if not isinstance(value, str):
        raise TypeError(f"{name} must be {allowed}, got {described(value)}")
    if value not in choices:
        raise ValueError(f"{name} must be {allowed}, got {short(value)}")


def _check_count(name: str, value: object, *, least: int, unit: str) -> None:
    """Refuse everything but None, which stands for the default, and integers from ``least`` on that count ``unit``."""
    allowed = f"a whole number of {unit} of at least {least}, or None for the default"
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be {allowed}, got {described(value)}")
    if not least <= value <= _LARGEST_BYTES:
        raise ValueError(f"{name} must be {allowed} and at most {_LARGEST_BYTES}, got {short(value)}")


def default_disk_dir() -> str:
    """Return the directory for spill files if ``disk_dir`` is not given: that of Python's ``tempfile``."""
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
    """Return the type of the file system of ``directory``, such as ``"ext4"``; None if Linux does not tell it.

    Raises
    ------
    OSError
        ``directory`` does not exist, or may not be looked up.
    """
    return _file_system_of_device(os.stat(directory).st_dev)


def is_in_ram(directory: str) -> bool:
    """Return whether the file system of ``directory`` keeps its files in RAM; False if that cannot be told."""
    try:
        return file_system_of(directory) in _FILE_SYSTEMS_IN_RAM
    except OSError:
        return False


def _checked_disk_dir(disk_dir: object) -> str:
    """Return the absolute path of ``disk_dir``, after checking that a spill file can be made in it."""
    if not isinstance(disk_dir, (str, os.PathLike)) or not isinstance(os.fspath(disk_dir), str):
        raise TypeError(
            "disk_dir must be a path (str or os.PathLike), a list or tuple of paths, or None, "
            f"got {described(disk_dir)}"
        )
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
        raise PermissionError(
            f"disk_dir {path!r} cannot be looked up: this process may not search a directory above it"
        ) from None
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


def _checked_disk_dirs(disk_dir: object) -> str | tuple[str, ...]:
    """Return the absolute path of one directory, or those of several as a tuple, after checking each of them."""
    if not isinstance(disk_dir, (list, tuple)):
        return _checked_disk_dir(disk_dir)
    if not disk_dir:
        raise ValueError("disk_dir must name at least one directory, got an empty list")
    checked = tuple(_checked_disk_dir(each) for each in disk_dir)
    if len(set(checked)) < len(checked):
        raise ValueError(f"disk_dir names a directory twice: {short(list(checked))}")
    return checked


@dataclass(frozen=True, kw_only=True)
class OffloadOptions:
    """The checked options of one offloading context. ``OffloadActivations`` explains each of them.

    ``OffloadActivations(...).options`` and ``offload_modules(...).options`` are of this type. Made by itself, it checks
    options before there is a model or a device: ``OffloadActivations(**options.as_keywords())`` takes them as they are.
    Options with equal fields are equal, and the fields cannot be set afterwards.

    The fields have the values that were given, except ``disk_dir``: if a disk is used it is an absolute path, also if
    it was not given, or a tuple of them if several were given. Otherwise it is None.

    Raises
    ------
    TypeError, ValueError
        An option has a wrong type or value. The message names the option, the value given, and the values allowed.
    FileNotFoundError, NotADirectoryError, PermissionError
        A spill file cannot be made in ``disk_dir``.
    """

    use_pin_memory: bool = True
    use_streams: bool = True
    learn: bool = True
    max_fwd_stash_size: int | None = None
    min_offload_size: int | None = None
    tier: Tier = "host"
    disk_dir: DiskDir | None = None
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
        _check_choice("on_full", self.on_full, _ON_FULL)
        goes_on_to_disk = self.on_full == "disk"
        _check_count("budget_bytes", self.budget_bytes, least=0 if goes_on_to_disk else 1, unit="bytes")
        _check_count("offload_window_bytes", self.offload_window_bytes, least=0, unit="bytes")
        _check_count("reload_window_bytes", self.reload_window_bytes, least=0, unit="bytes")
        if self.max_fwd_stash_size is not None and self.offload_window_bytes is not None:
            raise ValueError(
                "max_fwd_stash_size and offload_window_bytes both set the offload window: give one of them, got "
                f"max_fwd_stash_size={self.max_fwd_stash_size} and offload_window_bytes={self.offload_window_bytes}"
            )
        if goes_on_to_disk and self.tier == "disk":
            raise ValueError('on_full="disk" is for tier="host": with tier="disk" everything goes to the disk anyway')
        if goes_on_to_disk or self.tier == "disk":
            disk_dir = default_disk_dir() if self.disk_dir is None else self.disk_dir
            object.__setattr__(self, "disk_dir", _checked_disk_dirs(disk_dir))
        elif self.disk_dir is not None:
            raise ValueError(
                f'disk_dir is for tier="disk" and on_full="disk" only, got {described(self.disk_dir)} with '
                f"tier={self.tier!r} and on_full={self.on_full!r}"
            )

    @property
    def min_offload_bytes(self) -> int:
        """The value of ``min_offload_size`` in bytes, or the default of the tier if it is None."""
        if self.min_offload_size is not None:
            return self.min_offload_size
        return _DEFAULT_MIN_OFFLOAD_BYTES[self.tier]

    def as_keywords(self) -> dict[str, Any]:
        """Return keyword arguments that make equal options, for this class and for every function that takes them."""
        return asdict(self)


def keywords_for_core(options: OffloadOptions) -> dict[str, Any]:
    """Return the keyword arguments for ``Context`` of the compiled core, except ``warn``.

    They have the names of the options. The default of ``min_offload_size`` depends on the tier and is filled in, and
    the directories are a list of bytes, since a path need not be UTF-8.
    """
    given = options.disk_dir
    directories = [given] if isinstance(given, (str, os.PathLike)) else list(given or ())
    return vars(options) | {
        "min_offload_size": options.min_offload_bytes,
        "disk_dir": [os.fsencode(directory) for directory in directories],
    }
