"""The plan of a fitted model, in numbers for its user."""

from dataclasses import dataclass

__all__ = ["FitPlan"]


@dataclass(frozen=True, kw_only=True)
class FitPlan:
    """The plan that a fitted model follows.

    Attributes
    ----------
    predicted_s, measured_s : float or None
        How long forward and backward take together, in seconds: as predicted, and as measured when the plan was tried.
        None if nothing was measured.
    predicted_peak_bytes : int
        The most memory that is allocated on the device, as predicted.
    reserved_bytes : int
        The most that PyTorch had reserved on the device under the plan; 0 if this cannot be asked for.
    recompute_s : float
        How much of the predicted time is spent on computing again, in seconds.
    kept_bytes, moved_bytes : int
        The bytes that the blocks keep on the device, and the bytes that they move.
    window_bytes : int
        The most that the offload window or the reload window of any block has, in bytes.
    """

    predicted_s: float
    measured_s: float | None
    predicted_peak_bytes: int
    reserved_bytes: int
    recompute_s: float
    kept_bytes: int
    moved_bytes: int
    window_bytes: int
