"""Telling the modes that show operators of the regions that inductor compiled."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence

from torchoffload._core import core

__all__ = ["make_regions_opaque"]

_MODULE = "torch._inductor.output_code"
_CLASSES = ("CompiledFxGraph", "CompiledAOTI")


def make_regions_opaque() -> None:
    """Have each call of a compiled region be one opaque region of the modes that are on.

    Inside of a region a mode would see the operators that inductor calls, and not those that it has fused. Inductor is
    slow to import, so its classes are changed now if they are there, and otherwise once somebody imports them.
    """
    module = sys.modules.get(_MODULE)
    if module is not None:
        _change(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _change(module: types.ModuleType) -> None:
    for name in _CLASSES:
        called = vars(getattr(module, name, object)).get("__call__")
        if isinstance(called, types.FunctionType):  # and not ours
            getattr(module, name).__call__ = core.opaque_method(called, f"a compiled region ({name})")


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing by itself; has the module be changed as soon as it has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MODULE:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Loads as another loader does, and then changes the module."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        _change(module)

    def __getattr__(self, name: str) -> object:  # get_source and the like, for whoever shows the module's source
        return getattr(self._loader, name)
