"""Amounts of memory as users write them."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from torchoffload._contexts.options import described, short

__all__ = ["Amount", "amount_text", "check_margin", "parse_amount"]

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
          "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}  # fmt: skip
_MOST_BYTES = 1 << 62  # more than any device has; sums of it fit the core's integers
_ALLOWED = 'a number of bytes, a text such as "40GiB", a fraction of the device above 0 and at most 1, or None'


@dataclass(frozen=True)
class Amount:
    """An amount of memory that was checked.

    Attributes
    ----------
    given : int, float or str
        The amount as the user wrote it.
    nbytes : int or None
        The bytes; None for a fraction, which is resolved against a device's memory.
    has_unit : bool
        Whether the user wrote a unit, so that the number cannot have been meant in another one.
    """

    given: float | str
    nbytes: int | None
    has_unit: bool

    def in_bytes(self, total_bytes: Callable[[], int]) -> int:
        """Return the amount in bytes; ``total_bytes`` is asked only if the amount is a fraction."""
        return self.nbytes if self.nbytes is not None else max(1, int(float(self.given) * total_bytes()))


def _refusal(memory: float | str) -> ValueError:
    return ValueError(f"memory must be {_ALLOWED}, got {short(memory)}")


def _of_text(text: str) -> Amount:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)(%?)\s*", text)
    if found is None:
        raise _refusal(text)
    number, unit, percent = found.groups()
    if percent:
        raise ValueError(
            f"memory={short(text)} is a percentage: write a fraction, memory={float(number) / 100:g}. A CPU has no "
            'total to take a fraction of: there, write an amount, such as memory="8GiB"'
        )
    if unit.lower() not in _UNITS:
        full = f"{unit[0].upper()}iB"
        is_cut = len(unit) <= 2 and full.lower() in _UNITS
        advice = f'"{number}{full}"' if is_cut else 'one of "KiB", "MiB", "GiB", "TiB", "KB", "MB", "GB" and "TB"'
        raise ValueError(f"memory={short(text)} has an unknown unit, {short(unit)}: write {advice}")
    nbytes = int(min(float(number) * _UNITS[unit.lower()], _MOST_BYTES))
    if nbytes < 1:
        raise _refusal(text)
    return Amount(text, nbytes, has_unit=bool(unit))


def _of_float(fraction: float) -> Amount:
    if 0 < fraction <= 1:
        return Amount(fraction, None, has_unit=True)
    if not 1 < fraction < _MOST_BYTES:
        raise _refusal(fraction)
    are_bytes = fraction >= 1 << 20
    advice = f"bytes write an int, memory={int(fraction)}" if are_bytes else f'GiB write memory="{fraction:g}GiB"'
    raise ValueError(
        f"memory={fraction} is above 1, and a float is a fraction of what the process can have on the device: for "
        f"{advice}"
    )


def parse_amount(memory: object) -> Amount:
    """Return an amount of memory, checked.

    Raises
    ------
    TypeError, ValueError
        It is no amount. The message names the forms that are allowed.
    """
    if isinstance(memory, bool) or not isinstance(memory, (int, float, str)):
        raise TypeError(f"memory must be {_ALLOWED}, got {described(memory)}")
    if isinstance(memory, str):
        return _of_text(memory)
    if isinstance(memory, float):
        return _of_float(memory)
    if memory < 1:
        raise _refusal(memory)
    return Amount(memory, min(memory, _MOST_BYTES), has_unit=False)


def amount_text(nbytes: int) -> str:
    """Return a text that means an amount of at least ``nbytes``, as a user would write it, such as ``"8.6MiB"``."""
    power, unit = next(
        ((power, unit) for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if nbytes >= 1 << power), (10, "KiB")
    )
    return f"{math.ceil(10 * nbytes / (1 << power)) / 10:g}{unit}"


def check_margin(margin: object) -> None:
    """Raise TypeError or ValueError unless ``margin`` is a number from 0 to below 0.5."""
    if isinstance(margin, bool) or not isinstance(margin, (int, float)):
        raise TypeError(f"margin must be a number from 0 to below 0.5, got {described(margin)}")
    if not 0 <= margin < 0.5:
        raise ValueError(f"margin must be a number from 0 to below 0.5, got {short(margin)}")
