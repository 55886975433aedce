"""Amounts of memory as users write them."""

import re

from torchoffload._contexts.options import described, short

__all__ = ["check_margin", "parse_memory"]

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
          "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}  # fmt: skip
_MOST_BYTES = 1 << 62  # more than any device has; sums of it are within what the core computes with
_ALLOWED = 'a number of bytes, a text such as "40GiB", a fraction of the device above 0 and at most 1, or None'


def parse_memory(memory: object, total_bytes: int | None) -> int:
    """Return an amount of memory in bytes; ``total_bytes`` is what a fraction is a part of.

    Raises
    ------
    TypeError, ValueError
        It is no amount.
    """
    if isinstance(memory, bool) or not isinstance(memory, (int, float, str)):
        raise TypeError(f"memory must be {_ALLOWED}, got {described(memory)}")
    nbytes = None
    if isinstance(memory, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", memory)
        if found is not None and found[2].lower() in _UNITS:
            nbytes = int(min(float(found[1]) * _UNITS[found[2].lower()], _MOST_BYTES))
    elif isinstance(memory, int):
        nbytes = memory
    elif 0 < memory <= 1:
        assert total_bytes is not None
        nbytes = int(memory * total_bytes)
    if nbytes is None or nbytes < 1:
        raise ValueError(f"memory must be {_ALLOWED}, got {short(memory)}")
    return min(nbytes, _MOST_BYTES)


def check_margin(margin: object) -> None:
    """Raise TypeError or ValueError unless ``margin`` is a number from 0 to below 0.5."""
    if isinstance(margin, bool) or not isinstance(margin, (int, float)):
        raise TypeError(f"margin must be a number from 0 to below 0.5, got {described(margin)}")
    if not 0 <= margin < 0.5:
        raise ValueError(f"margin must be a number from 0 to below 0.5, got {short(margin)}")
