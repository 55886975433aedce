"""Choosing, checking and importing the compiled core. No other module imports it directly.

``core`` is ``torchoffload._C``, or under ``TORCHOFFLOAD_TESTING=1`` the test build ``torchoffload._C_testing``.
The ABI of libtorch changes with each minor release. So a core that was built for another torch is refused before it is
loaded: loading it would fail with an undefined symbol or, worse, would succeed.

A build from source has one core, in the package's own directory. A wheel has many, in directories such as
``_compiled/torch-2.13-cuda``, one for the CPU builds and one for the CUDA builds of each minor release of torch.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import torchoffload

__all__ = ["BuildInfo", "build_info", "core"]

_PACKAGE_DIR = Path(__file__).parent
_WHEEL_CORES = "_compiled"
# A core of a wheel takes CUDA's functions from the libcudart that torch has loaded. It calls only such as are the same
# in these major releases.
_WHEEL_CUDA_MAJORS = ("12", "13")
_PIP_COMMAND = "python -m pip install --force-reinstall --no-deps --no-cache-dir <the source of torchoffload>"


@dataclass(frozen=True)
class BuildInfo:
    """The versions and backends that the compiled core was built for.

    Attributes
    ----------
    version : str
        The version of torchoffload.
    torch_version : str
        ``torch.__version__`` at build time, such as ``"2.13.0+cpu"``.
    cuda_version : str or None
        ``torch.version.cuda`` at build time; None for a CPU build of torch. In a wheel, the CUDA release whose headers
        were used, such as ``"13.0"``.
    hip_version : str or None
        ``torch.version.hip`` at build time; None unless torch was built for ROCm.
    """

    version: str
    torch_version: str
    cuda_version: str | None
    hip_version: str | None = None


def _rebuild_command() -> str:
    checkout = _PACKAGE_DIR.parent.parent
    if not (checkout / "CMakeLists.txt").is_file():
        return _PIP_COMMAND
    if Path(sys.prefix) == checkout / ".venv":
        return "make build"
    return f"make site PYTHON={sys.executable} OUT=build/site (then run with PYTHONPATH=build/site)"


def _variant(cuda_version: str | None, hip_version: str | None = None) -> str:
    if hip_version:
        return f"ROCm {hip_version}"
    return f"CUDA {cuda_version}" if cuda_version else "CPU"


def _minor(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]


def _cuda_major(cuda_version: str | None) -> str | None:
    return cuda_version.split(".")[0] if cuda_version else None


def check_platform(platform: str, hip_version: str | None, generic_backend: str | None) -> None:
    """Refuse systems on which torchoffload cannot run, and builds of torch on which it has never run.

    PyTorch shows GPUs of ROCm as CUDA devices. A core for ROCm has no CUDA backend, so the generic one has to be asked
    for by name, as on CUDA. It knows nothing of the memory of CUDA graphs.

    Parameters
    ----------
    platform : str
        The value of ``sys.platform``.
    hip_version : str or None
        The value of ``torch.version.hip``; None unless torch was built for ROCm.
    generic_backend : str or None
        The value of ``TORCHOFFLOAD_GENERIC_BACKEND`` in the environment.

    Raises
    ------
    ImportError
        The system is not Linux, or torch was built for ROCm and the generic backend was not asked for.
    """
    if platform != "linux":
        name = {"win32": "Windows", "cygwin": "Windows", "darwin": "macOS"}.get(platform, platform)
        raise ImportError(f"torchoffload supports Linux only, not {name}.")
    if hip_version and generic_backend != "1":
        raise ImportError(
            f"torchoffload has never been run on ROCm (this torch is built for HIP {hip_version}). Its generic backend "
            "may serve it: set TORCHOFFLOAD_GENERIC_BACKEND=1 to try, run python -m torchoffload.selftest first, and "
            'please send what it prints in an issue. Do not use torch.compile(mode="reduce-overhead") with it.'
        )


def _minors_in(cores: Path) -> list[str]:
    """The minor releases of torch that a wheel serves, in their order."""
    found = {directory.name.split("-")[1] for directory in cores.glob("torch-*-*")}
    return sorted(found, key=lambda minor: [int(number) for number in minor.split(".")])


def find_core(package_dir: Path, torch_version: str, cuda_version: str | None, hip_version: str | None = None) -> Path:
    """Find the directory of the core that is for the running torch.

    Parameters
    ----------
    package_dir : Path
        The directory of the package torchoffload.
    torch_version : str
        The running ``torch.__version__``.
    cuda_version : str or None
        The running ``torch.version.cuda``; None for a CPU build of torch.
    hip_version : str or None
        The running ``torch.version.hip``; None unless torch was built for ROCm, for which there are no wheels.

    Returns
    -------
    Path
        In a wheel the core's directory in ``_compiled``. In a build from source `package_dir`, whatever torch that is
        for.

    Raises
    ------
    ImportError
        It is a wheel, and it has no core for this torch.
    """
    cores = package_dir / _WHEEL_CORES
    if not cores.is_dir():
        return package_dir
    directory = cores / f"torch-{'.'.join(_minor(torch_version))}-{'cuda' if cuda_version else 'cpu'}"
    if not hip_version and directory.is_dir() and _cuda_major(cuda_version) in (None, *_WHEEL_CUDA_MAJORS):
        return directory
    raise ImportError(
        f"This wheel of torchoffload serves torch {', '.join(_minors_in(cores))} (CPU, CUDA "
        f"{' and '.join(_WHEEL_CUDA_MAJORS)}), but this is torch {torch_version} "
        f"({_variant(cuda_version, hip_version)}). Install one of those, look for a newer torchoffload, or build it "
        f"from source for this torch, which takes a C++20 compiler: {_PIP_COMMAND}"
    )


def read_build_info(path: Path) -> BuildInfo:
    """Read the file that the build wrote beside the core.

    Raises
    ------
    ImportError
        There is no such file, so the core was never built.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ImportError(f"torchoffload's compiled core is not built. Build it with: {_rebuild_command()}") from None
    hip_version = values.get("hip_version") or None
    return BuildInfo(values["version"], values["torch_version"], values["cuda_version"] or None, hip_version)


def check_torch(built: BuildInfo, torch_version: str, cuda_version: str | None, hip_version: str | None = None) -> None:
    """Refuse a running torch that the core was not built for.

    Parameters
    ----------
    built : BuildInfo
        The versions and backends that the core was built for.
    torch_version : str
        The running ``torch.__version__``.
    cuda_version : str or None
        The running ``torch.version.cuda``; None for a CPU build of torch.
    hip_version : str or None
        The running ``torch.version.hip``; None unless torch was built for ROCm.

    Raises
    ------
    ImportError
        The minor version of torch or the major version of CUDA differs, or one of the two is for ROCm.
    """
    same_torch = _minor(built.torch_version) == _minor(torch_version)
    same_variant = bool(built.hip_version) == bool(hip_version)
    if same_torch and same_variant and _cuda_major(built.cuda_version) == _cuda_major(cuda_version):
        return
    raise ImportError(
        f"torchoffload was built for torch {built.torch_version} ({_variant(built.cuda_version, built.hip_version)}), "
        f"but this is torch {torch_version} ({_variant(cuda_version, hip_version)}). Rebuild it for this one with: "
        f"{_rebuild_command()}"
    )


check_platform(sys.platform, torch.version.hip, os.environ.get("TORCHOFFLOAD_GENERIC_BACKEND"))
_core_dir = find_core(_PACKAGE_DIR, torch.__version__, torch.version.cuda, torch.version.hip)
build_info = read_build_info(_core_dir / "_build_info.json")
if _core_dir == _PACKAGE_DIR:
    check_torch(build_info, torch.__version__, torch.version.cuda, torch.version.hip)
else:
    # The core has the same name everywhere, torchoffload._C: the package looks for its modules there as well.
    torchoffload.__path__.append(str(_core_dir))

if TYPE_CHECKING:
    from torchoffload import _C as core
elif os.environ.get("TORCHOFFLOAD_TESTING") == "1":
    from torchoffload import _C_testing as core
else:
    from torchoffload import _C as core
