"""The PEP 517 backend: scikit-build-core's, after a look for torch.

Without that look an installer would resolve, and download, a torch of its own before the build could say that one has
to be there first. Source distributions need no torch.
"""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from scikit_build_core import build as _scikit_build
from scikit_build_core.build import build_sdist, get_requires_for_build_sdist

__all__ = [
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_wheel",
]

Settings = Mapping[str, str | list[str]] | None


def _require_torch() -> None:
    probe = Path(__file__).with_name("probe_torch.py")
    found = subprocess.run(
        [sys.executable, "-I", str(probe), "--check"], check=False, stderr=subprocess.PIPE, encoding="utf-8"
    )
    if found.returncode != 0:
        raise SystemExit(found.stderr.strip())


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """What the build needs besides build-system.requires (cmake, ninja); never torch."""
    _require_torch()
    requirements: list[str] = _scikit_build.get_requires_for_build_wheel(config_settings)
    return requirements


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    """Write the metadata. Asked again here, since without build isolation the requirements are not."""
    _require_torch()
    name: str = _scikit_build.prepare_metadata_for_build_wheel(metadata_directory, config_settings)
    return name


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """Compile the core and pack the wheel."""
    _require_torch()
    name: str = _scikit_build.build_wheel(wheel_directory, config_settings, metadata_directory)
    return name
