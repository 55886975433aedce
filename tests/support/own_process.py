"""own_process.py: programs that run in a process of their own, whose freed memory is overwritten at once."""

import os
import subprocess
import sys
from pathlib import Path

# The C library fills freed memory with a pattern, so that a use of it ends the process and does not go well by luck.
FREED_MEMORY_IS_FILLED = {"GLIBC_TUNABLES": "glibc.malloc.perturb=165:glibc.malloc.tcache_count=0"}


def assert_prints_right(program: Path, name: str, directory: Path) -> None:
    """Fail unless ``program name directory`` ends well, and prints "right" at its end."""
    done = subprocess.run(
        [sys.executable, str(program), name, str(directory)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | FREED_MEMORY_IS_FILLED,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("right\n")
