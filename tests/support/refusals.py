"""refusals.py: a script of benchmarks/ that refuses its options, in this process, which has imported torch already."""

import contextlib
import io
import os
import runpy
import sys
from unittest import mock

from places import BENCHMARKS

__all__ = ["refusal"]


def refusal(script: str, *options: str) -> tuple[int, str]:
    """Run a script that is to end before it measures anything.

    Returns
    -------
    int, str
        The exit status of the script as a program, and the text on its standard error.
    """
    path, errors = BENCHMARKS / script, io.StringIO()
    before = set(sys.modules)
    with (
        mock.patch.object(sys, "argv", [str(path), *options]),
        mock.patch.object(sys, "path", [str(BENCHMARKS), *sys.path]),
        mock.patch.dict(os.environ),
        contextlib.redirect_stderr(errors),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            if isinstance(end.code, str):
                return 1, f"{errors.getvalue()}{end.code}\n"
            return end.code or 0, errors.getvalue()
        finally:
            _forget(before)
    return 0, errors.getvalue()


def _forget(before: set[str]) -> None:
    """Drop the modules of benchmarks/ that were imported since, whose names other modules may have."""
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(f"{BENCHMARKS}{os.sep}"):
            del sys.modules[name]
