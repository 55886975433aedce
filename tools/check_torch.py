"""Compile and link torchoffload against one version of torch: ``python tools/check_torch.py 2.9.0``.

torch is installed without its dependencies into a scratch environment, which is enough to build against but not to
import. A module's link leaves symbols open, so each one is looked up in the libraries that will be in the process.
"""

import argparse
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path

import probe_torch

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str | Path) -> str:
    """Run a command and return what it printed; on failure print that, and exit.

    The caller names the version of torch, so a constraint that the machine's pip configuration sets does not apply.
    """
    words = [str(word) for word in command]
    environment = {**os.environ, "PIP_CONSTRAINT": os.devnull}
    done = subprocess.run(
        words, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    if done.returncode != 0:
        print(done.stdout)
        sys.exit(f"failed: {shlex.join(words)}")
    return done.stdout


def symbols(library: Path, *, undefined: bool) -> set[str]:
    """Names of the dynamic symbols that a library defines, or needs (weak ones aside), without their versions."""
    output = run("nm", "--dynamic", "--undefined-only" if undefined else "--defined-only", library)
    fields = (line.split() for line in output.splitlines())
    return {parts[-1].split("@")[0] for parts in fields if not (undefined and parts[0] in "wv")}


def system_libraries(module: Path) -> list[Path]:
    """Those of the system that the module names, and that are loaded with it."""
    lines = run("ldd", module).splitlines()
    paths = [line.partition("=>")[2].split("(")[0].strip() or line.split("(")[0].strip() for line in lines]
    return [Path(path) for path in paths if path.startswith("/")]


def check_symbols(module: Path, libraries: list[Path], torch_version: str) -> None:
    """Exit when the module needs a symbol that nothing in the process would define.

    In the process are the `libraries` of torch and CUDA, and the system's. CPython's symbols are taken as there.
    """
    defined: set[str] = set()
    for library in [*libraries, *system_libraries(module)]:
        defined |= symbols(library, undefined=False)
    missing = {name for name in symbols(module, undefined=True) - defined if not name.startswith(("Py", "_Py"))}
    if missing:
        sys.exit(f"torch {torch_version} lacks what {module} needs:\n  " + "\n  ".join(sorted(missing)))


def check(version: str, scratch: Path) -> None:
    """Install, build and link."""
    started = time.monotonic()
    venv.create(scratch / "venv", with_pip=True)
    python = scratch / "venv" / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")
    run(*pip, f"torch=={version}")
    site_packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    torch = probe_torch.read_torch(Path(site_packages) / "torch")
    if torch.cuda:
        run(*pip, *probe_torch.toolkit_packages(torch.cuda))
    installed_s = time.monotonic() - started
    # Without optimisation, which takes half of the time and leaves more symbols to look up.
    options = (f"-DPython_EXECUTABLE={python}", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0")
    run("cmake", "-S", ROOT, "-B", scratch / "build", "-G", "Ninja", *options)
    run("cmake", "--build", scratch / "build")
    libraries = list(torch.libraries)
    if torch.cuda:
        libraries.append(probe_torch.find_toolkit(torch.directory.parent, torch.cuda).cudart)
    module = scratch / "build" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    check_symbols(module, libraries, torch.version)
    built_s = time.monotonic() - started - installed_s
    variant = f"CUDA {torch.cuda}" if torch.cuda else "CPU"
    print(f"torch {torch.version} ({variant}): installed in {installed_s:.0f} s, built and linked in {built_s:.0f} s")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="a version of torch, such as 2.9.0")
    with tempfile.TemporaryDirectory(prefix="check-torch-") as scratch:
        check(parser.parse_args().version, Path(scratch))


if __name__ == "__main__":
    main()
