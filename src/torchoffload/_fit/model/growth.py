"""The bytes that have come to a device since a survey, and stay, as the state of an optimizer."""

from collections.abc import Callable, Iterable

import torch

from torchoffload._fit.machine.operators import unique_bytes

__all__ = ["Growth"]

_LEAST_PART = 0.01  # of the memory: less is left to the memory that plans leave free
_MORE = 1.01  # times the most bytes that a step has left: then the gradients are counted


class Growth:
    """The bytes that were allocated behind a step, beside gradients, over those before the last step of the survey.

    An optimizer makes its state when it steps for the first time. If gradients are accumulated, that may come long
    after the survey.

    Parameters
    ----------
    gradients : callable
        Yields the gradients that the model has. All of them are looked at only after a step that left more bytes than
        any step before it that left gradients, or any that left none.
    """

    def __init__(self, gradients: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._gradients = gradients
        self.begin(0)

    def begin(self, surveyed_bytes: int) -> None:
        """Begin with the bytes, without gradients, from before a step of the survey."""
        self._surveyed_bytes = surveyed_bytes
        self._most_left_bytes = {False: surveyed_bytes, True: surveyed_bytes}  # by whether there were gradients
        self._grown_bytes = 0

    @property
    def grown_bytes(self) -> int:
        """The bytes that have come, and beside which no plan was made, however few."""
        return self._grown_bytes

    def bytes_after(self, left_bytes: int, memory_bytes: int) -> int:
        """Return by how many bytes the memory has grown behind a step; 0 if that is less than 1% of the memory.

        Parameters
        ----------
        left_bytes : int
            The bytes that are allocated as the next step is about to begin; 0 if this cannot be asked for.
        memory_bytes : int
            The memory that plans may take.
        """
        if left_bytes and left_bytes > _MORE * self._most_left_bytes[False]:
            has_gradients = next(iter(self._gradients()), None) is not None
            if left_bytes > _MORE * self._most_left_bytes[has_gradients]:
                self._most_left_bytes[has_gradients] = left_bytes
                own_bytes = left_bytes - unique_bytes(self._gradients())
                self._grown_bytes = max(self._grown_bytes, own_bytes - self._surveyed_bytes)
        return self.bytes_beside(memory_bytes)

    def bytes_beside(self, memory_bytes: int) -> int:
        """Return the bytes that have come, and beside which no plan was made; 0 if less than 1% of the memory."""
        return self._grown_bytes if self._grown_bytes > _LEAST_PART * memory_bytes else 0

    def take(self, grown_bytes: int) -> None:
        """Count bytes as if they had been there in the survey: a plan was made beside them."""
        self._surveyed_bytes += grown_bytes
        self._grown_bytes = 0
