"""The environment variable that turns every context into a no-op."""

import contextlib
import os
from collections.abc import Iterator

__all__ = ["disabled", "is_disabled"]

_VARIABLE = "TORCHOFFLOAD_DISABLE"


def is_disabled() -> bool:
    """Return whether the environment turns all offloading off.

    Raises
    ------
    ValueError
        The variable is set to something other than 0 or 1.
    """
    value = os.environ.get(_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{_VARIABLE} must be 1 (every context is a no-op), 0 or unset, got {value!r}")
    return value == "1"


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Turn all offloading of this process off inside the ``with`` block, and restore the variable after it."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
