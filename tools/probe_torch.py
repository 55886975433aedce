"""Find the torch that torchoffload is to be compiled against, without importing it.

Run it with the interpreter of the target environment as ``python -I tools/probe_torch.py --check`` or
``--cmake FILE``; with ``--for-wheel DIR`` it looks at the torch in that package directory instead. Under pip's build
isolation the build process itself cannot see torch, but an isolated-mode child of the same interpreter can. Nothing is
imported from torch: ``pip install --no-deps torch`` is enough, and the probe takes milliseconds.

On failure it prints one sentence that says what to do, and exits with 1.
"""

import argparse
import ast
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

OLDEST_TORCH = (2, 9)
NEWEST_TORCH = (2, 15)
# The CUDA release whose headers the CUDA backend is compiled with where torch itself has none: for the compile check
# against a CPU torch, and in wheels, where one build serves all major releases of CUDA.
CHECK_CUDA = "13.0"
CPU_LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")
CUDA_LIBRARIES = ("c10_cuda",)
# What c10/cuda/*.h and cuda_runtime_api.h include, one file for each pip package that may be missing.
CUDA_HEADERS = ("cuda_runtime_api.h", "crt/host_defines.h")


class ProbeError(Exception):
    """One sentence for the user: what is wrong and what to do."""


@dataclass(frozen=True)
class CudaToolkit:
    """Where the CUDA run-time's headers and library are: a toolkit's, or those of pip's nvidia packages."""

    include_dirs: list[Path]
    cudart: Path


@dataclass(frozen=True)
class Torch:
    """A torch package on disk, as its own ``version.py`` describes it."""

    directory: Path
    version: str
    cuda: str | None
    hip: str | None
    libraries: list[Path]

    @property
    def include_dirs(self) -> list[Path]:
        """The include directories of ``torch.utils.cpp_extension``."""
        include = self.directory / "include"
        return [include, include / "torch" / "csrc" / "api" / "include"]


def dotted(version: tuple[int, int]) -> str:
    """``(2, 9)`` as ``"2.9"``."""
    return f"{version[0]}.{version[1]}"


def read_version_file(path: Path) -> dict[str, str | None]:
    """Read the constants that ``torch/version.py`` assigns, without running it."""
    values: dict[str, str | None] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        if isinstance(value, ast.Constant):
            for target in targets:
                if isinstance(target, ast.Name):
                    values[target.id] = None if value.value is None else str(value.value)
    return values


def check_platform(platform: str = sys.platform) -> None:
    """Raise ProbeError where torchoffload cannot be built at all."""
    names = {"win32": "Windows", "cygwin": "Windows", "darwin": "macOS"}
    if platform != "linux":
        raise ProbeError(f"torchoffload supports Linux only, not {names.get(platform, platform)}.")


def check_version(values: dict[str, str | None], where: Path) -> str:
    """Return torch's version, or raise ProbeError when this torch is not supported."""
    version = values.get("__version__") or ""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise ProbeError(f"{where} has no version that can be read: reinstall torch.")
    if not OLDEST_TORCH <= (int(match[1]), int(match[2])) <= NEWEST_TORCH:
        raise ProbeError(
            f"torchoffload supports torch {dotted(OLDEST_TORCH)} to {dotted(NEWEST_TORCH)}, "
            f"but {where.parent} is torch {version}: install one of those first."
        )
    return version


def header_version(include_dir: Path) -> int | None:
    """The CUDA major version that ``cuda_runtime_api.h`` in a directory is of, or None."""
    header = include_dir / "cuda_runtime_api.h"
    if not header.is_file():
        return None
    match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", header.read_text(encoding="utf-8", errors="replace"))
    return int(match[1]) // 1000 if match else None


def toolkit_roots() -> list[Path]:
    """Where a CUDA toolkit may be installed, the most explicit place first."""
    nvcc = shutil.which("nvcc")
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    if nvcc:
        candidates.append(str(Path(nvcc).resolve().parents[1]))
    candidates += sorted((str(path) for path in Path("/usr/local").glob("cuda-*")), reverse=True)
    return [Path(path) for path in candidates if path and Path(path).is_dir()]


def first_file(candidates: Iterable[Path]) -> Path | None:
    """The first of `candidates` that exists."""
    return next((path for path in candidates if path.is_file()), None)


def find_pip_toolkit(site_packages: Path, major: int) -> tuple[list[Path], Path | None]:
    """Headers and libcudart from pip's nvidia packages beside torch; the list is empty when headers are missing."""
    found = sorted((site_packages / "nvidia").glob("*/include"))
    runtime = [path for path in found if header_version(path) == major]
    include_dirs = runtime[:1]
    if runtime and not (runtime[0] / CUDA_HEADERS[1]).is_file():
        # CUDA 12 keeps crt/ in the compiler's package. A crt/ of another major version would not fit.
        compilers = [path for path in found if (path / CUDA_HEADERS[1]).is_file() and header_version(path) is None]
        include_dirs = [*runtime[:1], *compilers[:1]] if compilers else []
    name = f"libcudart.so.{major}"
    cudart = first_file([*sorted((site_packages / "nvidia").glob(f"*/lib/{name}")), site_packages / "torch/lib" / name])
    return include_dirs, cudart


def toolkit_packages(cuda: str) -> list[str]:
    """The pip packages that hold the CUDA run-time's headers and library, as requirements."""
    version = ".".join(cuda.split(".")[:2])
    if version.startswith("12."):
        return [f"nvidia-cuda-{name}-cu12=={version}.*" for name in ("runtime", "nvcc")]
    return [f"nvidia-cuda-{name}=={version}.*" for name in ("runtime", "crt", "cccl")]


def find_toolkit(site_packages: Path, cuda: str) -> CudaToolkit:
    """The CUDA run-time's headers and library of torch's own major version."""
    major = int(cuda.split(".")[0])
    include_dirs, cudart = find_pip_toolkit(site_packages, major)
    for root in toolkit_roots():
        if header_version(root / "include") != major:
            continue
        if not include_dirs and (root / "include" / CUDA_HEADERS[1]).is_file():
            include_dirs = [root / "include"]
        if cudart is None:
            name = f"libcudart.so.{major}"
            cudart = first_file([root / "lib64" / name, *sorted(root.glob(f"targets/*/lib/{name}"))])
    if not include_dirs or cudart is None:
        missing = "headers" if not include_dirs else f"libcudart.so.{major}"
        raise ProbeError(
            f"torch is a CUDA {cuda} build but no CUDA {major} {missing} were found: set CUDA_HOME to a CUDA {major} "
            f"toolkit, or run: python -m pip install {shlex.join(toolkit_packages(cuda))}"
        )
    return CudaToolkit(include_dirs, cudart)


def find_torch_directory() -> Path | None:
    """The package directory of the torch that this interpreter would import, or None."""
    spec = importlib.util.find_spec("torch")
    directory = Path(spec.origin).parent if spec and spec.origin else None
    return directory if directory and (directory / "version.py").is_file() else None


def read_torch(directory: Path, *, as_cpu: bool = False) -> Torch:
    """Describe the torch in a package directory, CUDA's own files aside; ProbeError when it cannot be used.

    With `as_cpu` it is described as a CPU build of that torch. The parts that both builds have are the same. Of a ROCm
    build those parts are all that is needed: its GPUs are served by the generic backend.
    """
    values = read_version_file(directory / "version.py")
    version = check_version(values, directory / "version.py")
    cuda, hip = (None, None) if as_cpu else (values.get("cuda"), values.get("hip"))
    names = CPU_LIBRARIES + (CUDA_LIBRARIES if cuda else ())
    libraries = [directory / "lib" / f"lib{name}.so" for name in names]
    for library in libraries:
        if not library.is_file():
            raise ProbeError(f"torch {version} has no {library}: install a torch that carries its libraries.")
    return Torch(directory, version, cuda, hip, libraries)


def find_toolkit_for(torch: Torch) -> CudaToolkit | None:
    """The CUDA run-time for a CUDA torch; on a CPU torch what a compile check of the CUDA backend needs, or None."""
    if torch.cuda:
        return find_toolkit(torch.directory.parent, torch.cuda)
    if torch.hip:
        return None
    try:
        return find_toolkit(torch.directory.parent, CHECK_CUDA)
    except ProbeError:
        return None


def uses_cxx11_abi(torch: Torch) -> bool:
    """Which std::string torch was compiled with; ours must be the same."""
    return b"__cxx11" in (torch.directory / "lib" / "libc10.so").read_bytes()


def cmake_text(torch: Torch) -> str:
    """The findings as CMake variables."""
    toolkit = find_toolkit_for(torch)
    variables: dict[str, str | list[Path]] = {
        "TORCH_DIR": str(torch.directory),
        "TORCH_VERSION": torch.version,
        "TORCH_CUDA_VERSION": torch.cuda or "",
        "TORCH_HIP_VERSION": torch.hip or "",
        "TORCH_CXX11_ABI": str(int(uses_cxx11_abi(torch))),
        "TORCH_INCLUDE_DIRS": torch.include_dirs,
        "TORCH_LIBRARIES": torch.libraries,
        "TORCH_CUDA_HEADERS_VERSION": (torch.cuda or CHECK_CUDA) if toolkit else "",
        "TORCH_CUDA_INCLUDE_DIRS": toolkit.include_dirs if toolkit else [],
        "TORCH_CUDART_LIBRARY": str(toolkit.cudart) if toolkit else "",
    }
    lines = []
    for name, value in variables.items():
        text = value if isinstance(value, str) else ";".join(str(path) for path in value)
        lines.append(f'set({name} "{text}")\n')
    return "".join(lines)


def no_torch_sentence() -> str:
    """What to do without torch."""
    return (
        "torchoffload is compiled against the torch of the environment that it is installed in, and "
        f"{sys.executable} has none: install torch ({dotted(OLDEST_TORCH)} to {dotted(NEWEST_TORCH)}) there first, and "
        "where the build runs in an environment of its own (uv, python -m build) turn build isolation off as well."
    )


def main() -> int:
    """Command line; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="only say whether torch can be used")
    action.add_argument("--cmake", type=Path, metavar="FILE", help="write CMake variables to FILE")
    parser.add_argument(
        "--for-wheel", type=Path, metavar="DIR", help="take the torch package in DIR, as if it were a CPU build"
    )
    arguments = parser.parse_args()
    try:
        check_platform()
        directory = arguments.for_wheel or find_torch_directory()
        if directory is None and sys.flags.isolated:
            # Isolated mode hides PYTHONPATH and the user's site-packages, where torch may be as well.
            return subprocess.run([sys.executable, __file__, *sys.argv[1:]], check=False).returncode
        if directory is None:
            raise ProbeError(no_torch_sentence())
        text = cmake_text(read_torch(directory, as_cpu=arguments.for_wheel is not None))
        if arguments.cmake:
            arguments.cmake.write_text(text, encoding="utf-8")
    except ProbeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
