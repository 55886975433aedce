"""The largest step of a survey, with which later steps are compared."""

from typing import Any

from torchoffload._fit.model.clock import FinishedStep

__all__ = ["Seen"]

_MOST_STATE_SURVEYS = 8  # because blocks have changed: there may be a change in each step


class Seen:
    """The largest step of a survey, and the states of the blocks in it.

    Attributes
    ----------
    size : int
        The bytes of the arguments of the model's largest call.
    blocks_bytes, block_count : int
        The most bytes of arguments, and the most calls, that the blocks of a step had.
    has_new_state : bool
        Whether a block has since had a state that was not surveyed.
    """

    def __init__(self) -> None:
        self.size = self.blocks_bytes = self.block_count = 0
        self.has_new_state = False
        self._states: set[Any] = set()
        self._state_surveys = 0  # that were begun because of such states

    def forget_sizes(self) -> None:
        """Begin a survey: the next steps tell the sizes. States that were surveyed stay known."""
        self._state_surveys += self.has_new_state
        self.size = self.blocks_bytes = self.block_count = 0
        self.has_new_state = False

    def note_state(self, state: Any, *, is_surveying: bool) -> None:
        """Take notice of the state of a block in a call."""
        if is_surveying:
            self._states.add(state)
        elif self._states and state not in self._states:
            self._states.add(state)
            self.has_new_state = self._state_surveys < _MOST_STATE_SURVEYS

    def note_surveyed(self, step: FinishedStep) -> bool:
        """Take notice of a step of the survey. Returns whether no step before it was larger."""
        self.size = max(self.size, step.size)
        self.blocks_bytes = max(self.blocks_bytes, step.blocks_bytes)
        self.block_count = max(self.block_count, step.block_count)
        return step.size >= self.size and step.blocks_bytes >= self.blocks_bytes

    def share_of(self, step: FinishedStep) -> float:
        """Return the size of a step over that of the largest one, by the bytes of its blocks' arguments."""
        if self.blocks_bytes:
            return step.blocks_bytes / self.blocks_bytes
        return step.size / self.size if self.size else 1.0
