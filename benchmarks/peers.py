"""Other libraries' offloaders, each loaded from its own PyPI package, without what that package needs for other things.

A package is looked for in a directory of wheels or of unpacked packages (``--peers``), then where Python looks anyway.
torchtune and TRL import half of their field in their ``__init__``; the module that offloads needs little of it. So the
packages are entered without running their ``__init__``, and what that one module imports and hardly uses has a
stand-in here where it is not installed. Nothing of theirs is changed.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import types
from importlib.machinery import PathFinder
from importlib.metadata import distributions
from pathlib import Path


class CannotRun(Exception):
    """An offloader that cannot run here; the text says why, and stands in its row."""


def search_path(directory: Path | None) -> list[str]:
    """Where packages are looked for: ``directory``, the wheels in it, then Python's own path."""
    if directory is None:
        return sys.path
    return [str(directory), *map(str, sorted(directory.glob("*.whl"))), *sys.path]


def version_of(package: str, search: list[str]) -> str | None:
    """Tell the version of ``package`` that ``search`` finds first."""
    return next((found.version for found in distributions(name=package, path=search)), None)


def load_torchtune(search: list[str]) -> types.ModuleType:
    """``torchtune.training._activation_offloading``: its ``OffloadActivations`` and the function that makes one."""
    _enter_package("torchtune", search)
    _enter_package("torchtune.training", search)
    # Its two uses of the rest of torchtune: isinstance on a tied head, which no Llama of transformers has, and a log.
    _put("torchtune.modules", TiedLinear=type("TiedLinear", (), {}))
    _put("torchtune.utils", get_logger=lambda _level: logging.getLogger("torchtune"))
    # NF4Tensor is asked for only when a copy fails, and later versions of torchao have it elsewhere.
    _stand_in("torchao", __version__="0", __path__=[])
    _stand_in("torchao.dtypes", __path__=[])
    _stand_in("torchao.dtypes.nf4tensor", NF4Tensor=type("NF4Tensor", (), {}))
    _stand_in_for_psutil()
    return importlib.import_module("torchtune.training._activation_offloading")


def load_trl(search: list[str]) -> types.ModuleType:
    """``trl.models.activation_offloading``: its ``OffloadActivations`` and the function that makes one."""
    _enter_package("trl", search)
    _enter_package("trl.models", search)
    if _is_installed("accelerate"):
        # Its loggers raise before this, and TRL logs a warning when host memory is more than 60% full.
        importlib.import_module("accelerate").PartialState()
    _stand_in("accelerate", __path__=[])
    _stand_in("accelerate.logging", get_logger=logging.getLogger)
    _stand_in("accelerate.utils", __path__=[])
    # TRL asks whether torch is 2.4 and 2.5 at least; torchoffload needs a later one.
    _stand_in("accelerate.utils.versions", is_torch_version=lambda _operation, _version: True)
    _stand_in_for_psutil()
    return importlib.import_module("trl.models.activation_offloading")


def _stand_in_for_psutil() -> None:
    """Both ask how full the host's memory is, for a warning and nothing else."""
    _stand_in("psutil", virtual_memory=lambda: types.SimpleNamespace(percent=0.0))


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # no such parent; a module that was put there
        return name in sys.modules


def _stand_in(name: str, **content: object) -> None:
    """Make ``import name`` give a module of this content where it is not installed."""
    if not _is_installed(name):
        _put(name, **content)


def _put(name: str, **content: object) -> None:
    module = types.ModuleType(name)
    vars(module).update(content)
    sys.modules[name] = module


def _enter_package(name: str, search: list[str]) -> None:
    """Make the modules of package ``name`` importable without running its ``__init__``."""
    parent, _, last = name.rpartition(".")
    spec = PathFinder.find_spec(name, sys.modules[parent].__path__ if parent else search)
    if spec is None or not spec.submodule_search_locations:
        raise CannotRun(f"{name} was not found: pip download --no-deps {name}, and give the directory as --peers")
    _put(name, __path__=list(spec.submodule_search_locations))
    if parent:
        setattr(sys.modules[parent], last, sys.modules[name])
