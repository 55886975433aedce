"""places.py: the folders of this repository, for tests that read its files or start its programs."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
EXAMPLES = ROOT / "examples"
BENCHMARKS = ROOT / "benchmarks"
DOCS = ROOT / "docs"


def environment_with_support(*folders: Path) -> dict[str, str]:
    """This process's environment, for a program that imports what is in tests/support, and in `folders` of its own."""
    paths = [*map(str, folders), str(SUPPORT), os.environ.get("PYTHONPATH")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
