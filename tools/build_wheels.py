"""Build wheels that serve several releases of torch: ``python tools/build_wheels.py --pythons python3.11 python3.12``.

One wheel for each Python. It carries the compiled core for each minor release of torch, once for CPU builds of it and
once for CUDA builds; ``torchoffload._core`` picks one at import. Headers and libraries are those of a torch that is
downloaded and unpacked, but not installed: none of the packages that it requires is needed.

Run it with an interpreter beside which cmake, ninja and auditwheel are installed (``make wheels``).
"""

import argparse
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import check_torch
import probe_torch

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheels"
# What a wheel may weigh: it is downloaded by each job that installs it.
LARGEST_WHEEL_BYTES = 15_000_000
# Those that we need, of a CUDA build of torch. They are in the process once torch was imported.
TORCH_LIBRARIES = [f"lib{name}.so" for name in (*probe_torch.CPU_LIBRARIES, *probe_torch.CUDA_LIBRARIES)]
# The tag of torch's own wheels; see cmake/wheel/older_system.cpp for how. On other processors: what fits.
PLATFORM = "manylinux_2_28_x86_64" if platform.machine() == "x86_64" else "auto"
# What of a torch is unpacked.
TORCH_PARTS = re.compile(rf"torch/(version\.py|include/.*|lib/({'|'.join(map(re.escape, TORCH_LIBRARIES))}))")
# What a module for CUDA builds may call of CUDA's run-time. The headers of CUDA 12.6 and 13.0 declare each of these in
# the same words, so that one module serves both; a function that is added here has to be compared as well.
SAME_IN_CUDA_12_AND_13 = {
    *("cudaDeviceGetPCIBusId", "cudaDeviceSynchronize", "cudaEventCreate", "cudaEventCreateWithFlags"),
    *("cudaEventDestroy", "cudaEventElapsedTime", "cudaEventQuery", "cudaEventRecord", "cudaEventSynchronize"),
    *("cudaGetDevice", "cudaGetErrorString", "cudaGetLastError", "cudaHostRegister", "cudaHostUnregister"),
    *("cudaMemcpyAsync", "cudaStreamCreateWithFlags", "cudaStreamIsCapturing", "cudaStreamQuery"),
    *("cudaStreamSynchronize", "cudaStreamWaitEvent", "cudaThreadExchangeStreamCaptureMode"),
}
# How the names of what is in std begin: functions, members, tables and types of them.
STANDARD_LIBRARY = re.compile(r"_Z(N?[KVRO]*St|T[VITS]N?St|N?[KVRO]*S[absiod])")
BUILD = "import sys; from scikit_build_core.build import build_wheel; print(build_wheel(sys.argv[1], {settings!r}))"


WHEN_TOO_NEW = """
This compiler uses what older systems lack and cmake/wheel/older_system.cpp does not have: gcc 12 is known to do.
WHEEL_PLATFORM=auto gives the wheel the oldest tag that fits it."""


def run(*command: str | Path, hint: str = "") -> None:
    """Run a command, whose output is shown as it comes; exit when it fails."""
    words = [str(word) for word in command]
    if subprocess.run(words, check=False, cwd=ROOT).returncode != 0:
        sys.exit(f"failed: {shlex.join(words)}{hint}")


def all_minors() -> list[str]:
    """The minor releases of torch that torchoffload supports, such as ``"2.9"``."""
    (major, oldest), (_, newest) = probe_torch.OLDEST_TORCH, probe_torch.NEWEST_TORCH
    return [f"{major}.{minor}" for minor in range(oldest, newest + 1)]


def pip(python: Path | str, *arguments: str | Path) -> None:
    """Run pip for an interpreter."""
    run(python, "-m", "pip", *arguments, "--disable-pip-version-check")


def fetch_torch(minor: str) -> Path:
    """The package directory of the first release of a minor release, and CUDA's headers beside it.

    Whatever the first release has, the later ones have as well. It is one for the Python that runs this, which serves
    for the others: headers are the same for all, and from the libraries nothing but names is taken.
    """
    site_packages = WORK / f"torch-{minor}"
    directory = site_packages / "torch"
    complete = site_packages / "complete"
    if complete.is_file():
        return directory
    with tempfile.TemporaryDirectory(dir=WORK) as scratch:
        pip(sys.executable, "download", "--no-deps", "--only-binary=:all:", "--dest", scratch, f"torch=={minor}.0")
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as archive:
            parts = [name for name in archive.namelist() if TORCH_PARTS.fullmatch(name)]
            archive.extractall(site_packages, parts)
    headers = probe_torch.toolkit_packages(probe_torch.CHECK_CUDA)
    pip(sys.executable, "install", "--quiet", "--no-deps", "--upgrade", "--target", site_packages, *headers)
    complete.touch()
    return directory


def build_environment(python: str, name: str) -> Path:
    """The interpreter of an environment of that Python that has scikit-build-core, but no torch."""
    directory = WORK / f"{name}-venv"
    interpreter = directory / "bin" / "python"
    if not interpreter.is_file():
        run(python, "-m", "venv", directory)
    requirements = (ROOT / "requirements-build.txt").read_text(encoding="utf-8").splitlines()
    backend = [line for line in requirements if line.startswith("scikit-build-core==")]
    pip(interpreter, "install", "--quiet", *backend)
    return interpreter


def version_of(python: str) -> str:
    """The version of an interpreter, such as ``"3.12"``."""
    command = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    try:
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        sys.exit(f"{python} does not run: name the interpreters that are here, as in WHEEL_PYTHONS='python3.11'")


def only_wheel(directory: Path) -> Path:
    """The one wheel in a directory."""
    (wheel,) = directory.glob("*.whl")
    return wheel


def check_cuda_functions(module: Path) -> None:
    """Exit when a module calls a function of CUDA's run-time that may differ between the releases it is to serve."""
    called = {name for name in check_torch.symbols(module, undefined=True) if name.startswith("cuda")}
    if unknown := called - SAME_IN_CUDA_12_AND_13:
        sys.exit(f"{module} calls {', '.join(sorted(unknown))}: see SAME_IN_CUDA_12_AND_13 in {__file__}")


def check_standard_library(module: Path) -> None:
    """Exit when a module takes part of libstdc++ from torch.

    torch exports what of it older systems lack, in each release something else. Such a symbol has no version.
    """
    symbols = check_torch.run("nm", "--dynamic", "--undefined-only", module).split()
    if borrowed := [name for name in symbols if STANDARD_LIBRARY.match(name) and "@" not in name]:
        sys.exit(f"{module} needs {', '.join(borrowed)}: see cmake/wheel/older_system.cpp")


def check_modules(directory: Path, torches: list[Path]) -> None:
    """Exit when a module in an unpacked wheel needs a symbol that its torch does not have.

    The libcudart is that of `CHECK_CUDA`. Where a torch is a CPU build, it has no libc10_cuda to look into.
    """
    for torch_dir in torches:
        version = probe_torch.read_torch(torch_dir, as_cpu=True).version
        cudart = probe_torch.find_toolkit(torch_dir.parent, probe_torch.CHECK_CUDA).cudart
        libraries = [path for name in TORCH_LIBRARIES if (path := torch_dir / "lib" / name).is_file()]
        cores = directory / "torchoffload" / "_compiled"
        (cpu,) = (cores / f"{torch_dir.parent.name}-cpu").glob("_C.*.so")
        check_torch.check_symbols(cpu, libraries[: len(probe_torch.CPU_LIBRARIES)], version)
        (cuda,) = (cores / f"{torch_dir.parent.name}-cuda").glob("_C.*.so")
        check_cuda_functions(cuda)
        check_standard_library(cpu)
        check_standard_library(cuda)
        if len(libraries) == len(TORCH_LIBRARIES):
            check_torch.check_symbols(cuda, [*libraries, cudart], version)


def build(python: str, name: str, torches: list[Path], tag: str, out: Path) -> Path:
    """Compile and pack the wheel of one Python, and give it its platform tag."""
    interpreter = build_environment(python, name)
    settings = {
        "build-dir": str(WORK / name),
        "cmake.define.TORCHOFFLOAD_WHEEL_TORCHES": ";".join(map(str, torches)),
    }
    with tempfile.TemporaryDirectory(dir=WORK) as scratch:
        built = Path(scratch) / "built"
        run(interpreter, "-c", BUILD.format(settings=settings), built)
        repair: list[str | Path] = [sys.executable, "-m", "auditwheel", "repair", "--plat", tag]
        repair += ["--wheel-dir", Path(scratch) / "repaired"]
        for library in TORCH_LIBRARIES:
            repair += ["--exclude", library]
        run(*repair, only_wheel(built), hint=WHEN_TOO_NEW)
        wheel = only_wheel(Path(scratch) / "repaired")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(Path(scratch) / "unpacked")
        check_modules(Path(scratch) / "unpacked", torches)
        return wheel.replace(out / wheel.name)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", nargs="+", metavar="PYTHON", required=True, help="interpreters, one wheel each")
    parser.add_argument("--torches", nargs="+", metavar="MINOR", default=all_minors(), help="such as 2.9; default: all")
    parser.add_argument("--platform", default=PLATFORM, help="their tag, or auto: what fits; default: %(default)s")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist")
    arguments = parser.parse_args()
    if unknown := set(arguments.torches) - set(all_minors()):
        parser.error(f"not supported: torch {', '.join(sorted(unknown))}; there are {', '.join(all_minors())}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    WORK.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    names = {python: f"python{version_of(python)}" for python in arguments.pythons}
    torches = []
    for minor in arguments.torches:
        print(f"=== torch {minor}", flush=True)
        torches.append(fetch_torch(minor))
    for python, name in names.items():
        print(f"=== wheel for {name}", flush=True)
        started = time.monotonic()
        wheel = build(python, name, torches, arguments.platform, arguments.out)
        size = wheel.stat().st_size
        print(f"=== {wheel.name}: {size / 1e6:.1f} MB, built in {time.monotonic() - started:.0f} s", flush=True)
        if size > LARGEST_WHEEL_BYTES:
            sys.exit(f"a wheel may have {LARGEST_WHEEL_BYTES / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
