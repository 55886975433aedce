"""Whether a step pays for moving: how long it computes for each GiB that it saves, beside how long the link takes."""

from typing import NamedTuple

__all__ = ["CostOfGib", "cost_line"]

_GIB = 1 << 30
_LEAST_BYTES = 64 << 20  # of a step that saves less, times for a GiB would say little


class CostOfGib(NamedTuple):
    """The measured cost of a GiB in one step.

    Attributes
    ----------
    computing_s : float
        How long the step computes for each GiB that autograd saves, in seconds.
    link_s : float
        How long the link takes for a GiB, out and back.
    """

    computing_s: float
    link_s: float

    @classmethod
    def measured(
        cls, computing_s: float, saved_bytes: int, out_bytes_per_s: float, in_bytes_per_s: float
    ) -> "CostOfGib | None":
        """Return the cost in a step that took ``computing_s`` without waits; None if something was not measured."""
        if saved_bytes < _LEAST_BYTES or min(computing_s, out_bytes_per_s, in_bytes_per_s) <= 0:
            return None
        return cls(computing_s * _GIB / saved_bytes, _GIB / out_bytes_per_s + _GIB / in_bytes_per_s)


def cost_line(cost: CostOfGib, *, is_fitted: bool = False) -> str:
    """Return a sentence on the cost of a GiB, with advice; a fitted model needs none."""
    computing_ms, link_ms = 1e3 * cost.computing_s, 1e3 * cost.link_s
    text = (
        f"The step computes {computing_ms:.0f} ms for each GiB that it saves, and the link takes {link_ms:.0f} ms "
        "for it, out and back"
    )
    if is_fitted:
        return f"{text}."
    if computing_ms >= link_ms:
        return f"{text}: moving all of it costs next to nothing."
    return f"{text}: checkpoint the blocks, or use fit, which moves what is free and computes the rest again."
