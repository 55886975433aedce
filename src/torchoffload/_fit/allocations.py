"""What the allocator of a device did in the steps of a fitted model."""

from torchoffload._fit.meter import Meter

__all__ = ["Allocations"]


class Allocations:
    """Watches the allocator's counters from step to step.

    Parameters
    ----------
    meter : Meter
        The device's.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._known_ooms = meter.oom_count()
        self._most_bytes = 0

    @property
    def have_failed(self) -> bool:
        """Whether an allocation found no memory since ``forget_failures``."""
        return self._meter.oom_count() > self._known_ooms

    def forget_failures(self) -> None:
        """Count failed allocations from now on."""
        self._known_ooms = self._meter.oom_count()

    def note_reserved(self) -> None:
        """Note what is reserved now, at the end of a backward: the loop may empty the cache behind it."""
        self._most_bytes = max(self._most_bytes, self._meter.reserved_bytes())

    def take_reserved(self) -> int:
        """Return the most that was reserved when it was noted, or is now, and begin anew."""
        self.note_reserved()
        taken, self._most_bytes = self._most_bytes, 0
        return taken
