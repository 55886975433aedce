"""Have clang check the annotations of locks (``csrc/system/thread_annotations.h``) on the floors that include torch.

``python tools/check_thread_safety.py CLANG_TIDY``, with the interpreter whose torch is compiled against. The sources of
a floor are included into one, since most of the time goes into torch's headers: that takes some 10 seconds, and a file
by itself takes as long. The floors without torch are checked by the clang-tidy of ``make lint``.
"""

import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from probe_torch import find_toolkit_for, find_torch_directory, no_torch_sentence, read_torch

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "{Checks: '-*,clang-diagnostic-*,misc-unused-alias-decls', HeaderFilterRegex: 'csrc/', WarningsAsErrors: '*'}"


def floors() -> dict[str, list[Path]]:
    """The sources that are checked together."""
    device = sorted((ROOT / "csrc/device").glob("*.cpp"))
    return {
        "device": [path for path in device if not path.name.startswith("cuda_")],
        "device for CUDA": [path for path in device if path.name.startswith("cuda_")],
        "testing": sorted((ROOT / "csrc/testing").glob("*.cpp")),
        "autograd": sorted((ROOT / "csrc/autograd").glob("*.cpp")),
    }


def main() -> int:
    """Check each floor. Returns 1, and prints what clang says, if one of them breaks a rule."""
    clang_tidy = sys.argv[1]
    directory = find_torch_directory()
    if directory is None:
        print(no_torch_sentence())
        return 1
    torch = read_torch(directory)
    toolkit = find_toolkit_for(torch)
    status = 0
    with tempfile.TemporaryDirectory() as scratch:
        # The one header of c10/cuda that a CPU wheel leaves out.
        macros = Path(scratch) / "c10/cuda/impl/cuda_cmake_macros.h"
        macros.parent.mkdir(parents=True)
        macros.write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
        system = [*torch.include_dirs, Path(sysconfig.get_path("include")), Path(scratch)]
        system += toolkit.include_dirs if toolkit else []
        flags = ["-std=c++20", "-Wthread-safety", "-DTORCHOFFLOAD_TESTING", "-DTORCHOFFLOAD_MODULE_NAME=_C"]
        flags += [f"-I{ROOT / 'csrc'}", *(part for path in system for part in ("-isystem", str(path)))]
        for floor, sources in floors().items():
            if "CUDA" in floor and toolkit is None:
                print(f"{floor}: not checked, since no headers of CUDA were found")
                continue
            together = Path(scratch) / "together.cpp"
            together.write_text("".join(f'#include "{path}"\n' for path in sources))
            command = [clang_tidy, "--quiet", f"--config={CONFIG}", str(together), "--", *flags]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                print(f"{floor}:\n{done.stdout}{done.stderr}")
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
