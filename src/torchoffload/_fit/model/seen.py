"""The largest steps of a survey, with which later steps are compared."""

from collections import Counter
from typing import Any

from torchoffload._fit.model.clock import FinishedStep, Opener

__all__ = ["Largest", "Seen"]

# So many surveys begin because blocks have new states, and so many because modules are called more often: a program may
# have a new state, or one more call, in each step.
_MOST_SURVEYS = 8


class Largest:
    """The largest step of those that begin with one module.

    Attributes
    ----------
    first_size, size : int
        The bytes that the arguments of its first call had, and the most that those of any call of the same module had.
    blocks_bytes, block_count : int
        The most bytes of arguments, and the most calls, that the blocks of a step had.
    parts : Counter of weakref.ref of nn.Module
        How often such a step has called each module at most.
    """

    def __init__(self, size: int = 0) -> None:
        self.first_size = self.size = size
        self.blocks_bytes = self.block_count = 0
        self.parts: Counter[Opener] = Counter()

    def note_surveyed(self, step: FinishedStep) -> bool:
        """Take notice of a step of the survey. Returns whether no step before it was larger."""
        if step.blocks_bytes > self.blocks_bytes:  # its first call may be smaller than that of a smaller step
            self.first_size = step.first_size
        elif step.blocks_bytes == self.blocks_bytes:
            self.first_size = max(self.first_size, step.first_size)
        self.size = max(self.size, step.size)
        self.blocks_bytes = max(self.blocks_bytes, step.blocks_bytes)
        self.block_count = max(self.block_count, step.block_count)
        self.parts |= step.parts
        return step.size >= self.size and step.blocks_bytes >= self.blocks_bytes

    def share_of(self, step: FinishedStep) -> float:
        """Return the size of a step over that of the largest one, by the bytes of its blocks' arguments."""
        if self.blocks_bytes:
            return step.blocks_bytes / self.blocks_bytes
        return step.size / self.size if self.size else 1.0


class Seen:
    """The largest steps of a survey, by the modules that they begin with, and the states of the blocks.

    Attributes
    ----------
    has_new_state : bool
        Whether a block has since had a state that was not surveyed.
    """

    def __init__(self) -> None:
        self.has_new_state = False
        self._largest: dict[Opener, Largest] = {}
        self._states: set[Any] = set()
        self._state_surveys = 0  # that were begun because of such states
        self._call_surveys = 0  # that were begun because modules were called more often than in any surveyed step

    def of(self, opener: Opener) -> Largest:
        """Return the largest step of those that begin with this module; one of size 0 if there was none."""
        return self._largest.setdefault(opener, Largest())

    def set_size(self, opener: Opener, size: int) -> None:
        """Take notice of the largest step of a plan that was read from a file."""
        self._largest[opener] = Largest(size)

    @property
    def may_survey_calls(self) -> bool:
        """Whether a step that calls a module more often than any surveyed one begins a survey."""
        return self._call_surveys < _MOST_SURVEYS

    def begin_survey(self, *, keeps_sizes: bool = False) -> None:
        """Begin a survey: the next steps tell the sizes. States that were surveyed stay known.

        ``keeps_sizes``: the survey begins because a module was called more often. The sizes and the calls of the former
        steps stay known then. Else two sorts of steps that take turns would begin a survey for each other for ever.
        """
        self._state_surveys += self.has_new_state
        self.has_new_state = False
        if keeps_sizes:
            self._call_surveys += 1
        else:
            self._largest.clear()

    def note_state(self, state: Any, *, is_surveying: bool) -> None:
        """Take notice of the state of a block in a call."""
        if is_surveying:
            self._states.add(state)
        elif self._states and state not in self._states:
            self._states.add(state)
            self.note_new_state()

    def note_new_state(self) -> None:
        """Take notice of a block in a state that was not surveyed."""
        self.has_new_state = self._state_surveys < _MOST_SURVEYS
