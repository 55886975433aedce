"""The plan of one call of a block, and those who are told of the call."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchoffload._fit.block.graph import BlockPlan
    from torchoffload._fit.block.record import BlockRecord

__all__ = ["Watch"]


class Watch:
    """The plan of one call of a block, and those who are told of the call. This class tells nobody.

    Parameters
    ----------
    plan : BlockPlan or None
        The plan that the call follows; None if nothing is computed again.

    Attributes
    ----------
    records : bool
        Whether the call is recorded, and verified: all that it made is made again right after forward, and compared.
    times_operators : bool
        Whether ``timed`` is called.
    keeps_for_later : bool
        Whether the values that the plan keeps from forward stay until the last backward through a retained graph. Else
        the first backward drops them, as that of any other graph does, and the next one makes them again.
    """

    records = False
    times_operators = False
    keeps_for_later = False

    def __init__(self, plan: "BlockPlan | None") -> None:
        self.plan = plan

    def recorded(self, _record: "BlockRecord") -> bool:
        """Tell that forward has returned, with its record. Returns whether the call may be computed again."""
        return False

    def ended(self, output: Any) -> None:
        """Tell that forward has returned this output."""

    def left_plan(self) -> None:
        """Tell that forward called another operator than planned."""

    def begins_again(self) -> None:
        """Tell that the replay begins."""

    def ends_again(self) -> None:
        """Tell that the replay has ended."""

    def now(self) -> Any:
        """Return this moment, if ``times_operators``."""
        raise NotImplementedError

    def timed(self, moments: dict[int, tuple[Any, Any]]) -> None:
        """Tell when each replayed operator began and ended, by its number. Called before ``ends_again``."""

    def inputs_were_written(self) -> None:
        """Tell, in backward, that the program has written to arguments of which the call has copies."""

    def refused(self, message: str) -> None:
        """Tell that the call cannot be computed again in its backward, which raises an error with this message."""
