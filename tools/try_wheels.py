"""Install wheels into fresh environments and train a step in each: ``python tools/try_wheels.py dist/*.whl``.

For each wheel and each version of torch: a new environment of that wheel's Python, torch with all that it requires,
then the wheel alone, without a compiler in reach; then ``tools/training_step.py``, which compares gradients bit for bit
and moves tensors to disk. No GPU is needed: a CUDA build of torch loads the core for CUDA builds on any machine.
"""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import build_wheels

ROOT = Path(__file__).resolve().parent.parent
TORCHES = ["2.9.0", "2.11.0", "2.13.0", "2.15.0"]
SHOW_CORE = """
import torch, torchoffload
from torchoffload._core import core
print(f"torch {torch.__version__}: core {core.__file__}, with CUDA: {core.built_with_cuda}")
"""


def run(*command: str | Path, cwd: Path, path: str | None = None) -> None:
    """Run a command, with `path` as PATH where that is given; exit when it fails."""
    words = [str(word) for word in command]
    environment = None if path is None else {"PATH": path, "HOME": str(cwd)}
    if subprocess.run(words, check=False, cwd=cwd, env=environment).returncode != 0:
        sys.exit(f"failed: {shlex.join(words)}")


def python_version(wheel: Path) -> str:
    """The version of Python that a wheel is for, such as ``"3.12"``."""
    match = re.search(r"-cp(\d)(\d+)-", wheel.name)
    if match is None:
        sys.exit(f"{wheel.name} is not for one release of CPython")
    return f"{match[1]}.{match[2]}"


def try_wheel(wheel: Path, python: str, torch: str, scratch: Path) -> None:
    """Install torch and the wheel into an environment of their own, and train."""
    environment = scratch / "venv"
    run(python, "-m", "venv", environment, cwd=scratch)
    interpreter = environment / "bin" / "python"
    pip = (interpreter, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    run(*pip, "--no-compile", f"torch=={torch}", cwd=scratch)
    started = time.monotonic()
    # With this PATH there is no compiler, and so no way but to take the wheel as it is.
    run(*pip, "--no-index", wheel.resolve(), cwd=scratch, path=str(environment / "bin"))
    installed_s = time.monotonic() - started
    run(interpreter, "-P", "-c", SHOW_CORE, cwd=scratch, path=str(environment / "bin"))
    run(interpreter, "-P", ROOT / "tools" / "training_step.py", cwd=scratch, path=str(environment / "bin"))
    print(f"=== {wheel.name} with torch {torch}: installed in {installed_s:.1f} s, trained", flush=True)
    shutil.rmtree(environment)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--torches", nargs="+", metavar="VERSION", default=TORCHES, help="default: of four releases")
    parser.add_argument("--pythons", nargs="+", default=[], help="interpreters; default: python3.12 and so on")
    arguments = parser.parse_args()
    interpreters = {build_wheels.version_of(python): python for python in arguments.pythons}
    for wheel in arguments.wheels:
        version = python_version(wheel)
        python = interpreters.get(version, f"python{version}")
        for torch in arguments.torches:
            with tempfile.TemporaryDirectory(prefix="try-wheel-") as scratch:
                try_wheel(wheel, python, torch, Path(scratch))


if __name__ == "__main__":
    main()
