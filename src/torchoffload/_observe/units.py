"""Formatting numbers for people."""

__all__ = ["human_bytes"]


def human_bytes(count: int) -> str:
    """Format a number of bytes in the largest binary unit in which it is at least 1, such as ``"1.5 GiB"``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
