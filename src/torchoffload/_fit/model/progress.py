"""The progress of a fitted model, in a few words: for the log, for repr(), and for the logs of trainers."""

import logging
from dataclasses import dataclass

from torchoffload._fit.model.phase import Phase
from torchoffload._fit.plan.trials import Trial
from torchoffload._observe.module_stats import kind_of_name
from torchoffload._observe.units import human_bytes

__all__ = ["Progress", "log_phase", "predicted"]

_KINDS_SHOWN = 4
_logger = logging.getLogger("torchoffload")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a fitted model.

    Attributes
    ----------
    model_name : str
        The class of the model.
    block_count, names : int, tuple of str
        The number of its blocks, and the names of those that are alive.
    phase : Phase
        The phase.
    phase_step : int
        The number of the step of this phase, from 1.
    recomputed_count, moved_count : int or None
        How many calls of blocks compute something again, and how many move something; None while there is no plan.
    """

    model_name: str
    block_count: int
    names: tuple[str, ...]
    phase: Phase
    phase_step: int
    recomputed_count: int | None
    moved_count: int | None

    @property
    def blocks(self) -> str:
        """How many blocks there are, and their names; names that differ only in numbers are one."""
        kinds = list(dict.fromkeys(map(kind_of_name, self.names)))
        shown = ", ".join(kinds[:_KINDS_SHOWN]) + (", ..." if len(kinds) > _KINDS_SHOWN else "")
        return f"{self.block_count} block{'s' if self.block_count != 1 else ''}" + (f" ({shown})" if shown else "")

    @property
    def does(self) -> str:
        """The plan that is followed, in words; empty while there is none."""
        if self.recomputed_count is None or self.moved_count is None:
            return ""
        if not self.recomputed_count and not self.moved_count:
            return "nothing moves and nothing is computed again"
        return f"{self.recomputed_count} calls of blocks compute something again, {self.moved_count} move something"

    def __str__(self) -> str:
        over = self.phase is Phase.REMOVED
        at = self.phase.value + ("" if over else f", step {self.phase_step}")
        return f"{self.model_name}, {self.blocks}, {at}" + (f": {self.does}" if self.does and not over else "")


def predicted(trial: Trial) -> str:
    """Return the time and the memory that are predicted for a plan, in words."""
    return f"predicted {trial.plan.step_s * 1e3:.1f} ms a step and {human_bytes(trial.peak_bytes)} at the peak"


def log_phase(progress: Progress, text: str) -> None:
    """Log one line as a phase begins: to the logger "torchoffload", at the level INFO."""
    _logger.info("fit: %s, %s: %s", progress.model_name, progress.blocks, text)
