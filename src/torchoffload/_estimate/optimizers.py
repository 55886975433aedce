"""Optimizers: the bytes that they keep for each parameter, and those that their step takes besides."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

import torch

__all__ = ["OPTIMIZERS", "Optimizer", "find_optimizer"]


@dataclass(frozen=True)
class Optimizer:
    """The memory of an optimizer.

    Attributes
    ----------
    states : int
        How many tensors it keeps of the parameter's size and dtype.
    bytes_each : float
        The bytes that it keeps besides for each number of the parameter.
    is_factored : bool
        Whether it keeps one row and one column of float32 in place of a matrix.
    scratch : int
        How many tensors of the parameter's size its step makes: PyTorch's optimizers take all parameters at once.
    """

    states: int = 0
    bytes_each: float = 0.0
    is_factored: bool = False
    scratch: int = 0

    def state_bytes(self, parameters: Iterable[torch.Tensor]) -> int:
        """Return the bytes that it keeps from step to step."""
        total = 0.0
        for each in parameters:
            total += self.states * each.numel() * each.element_size() + self.bytes_each * each.numel()
            if self.is_factored:
                matrix = each.dim() > 1
                numbers = each.numel() // each.shape[-1] + each.numel() // each.shape[-2] if matrix else each.numel()
                total += 4 * numbers
        return int(total)

    def scratch_bytes(self, parameters: Iterable[torch.Tensor]) -> int:
        """Return the bytes that its step takes besides."""
        return self.scratch * sum(each.numel() * each.element_size() for each in parameters)


# torch 2.13, the default on CUDA, which is foreach. "adamw-fp32": beside bfloat16 weights, which it keeps once more.
OPTIMIZERS = {
    "adamw": Optimizer(states=2, scratch=1),
    "adam": Optimizer(states=2, scratch=1),
    "adamw-fused": Optimizer(states=2),
    "adamw-fp32": Optimizer(bytes_each=12.0),
    "adamw-8bit": Optimizer(bytes_each=2.0 * (1 + 4 / 256)),
    "adafactor": Optimizer(is_factored=True, scratch=1),
    "lion": Optimizer(states=1, scratch=1),
    "sgd": Optimizer(),
    "sgd-momentum": Optimizer(states=1),
    "none": Optimizer(),
}
"""The optimizers that ``estimate`` knows by name."""


def find_optimizer(optimizer: object) -> Optimizer:
    """Return the optimizer of a name, or one that keeps so many bytes for each number of the parameters.

    Raises
    ------
    TypeError, ValueError
        There is no such optimizer; the message names one that it resembles.
    """
    if optimizer is None:
        return OPTIMIZERS["none"]
    if isinstance(optimizer, (int, float)) and not isinstance(optimizer, bool):
        if not 0 <= optimizer < float("inf"):
            raise ValueError(f"optimizer: the bytes for each parameter must be at least 0, got {optimizer}")
        return Optimizer(bytes_each=float(optimizer))
    if not isinstance(optimizer, str):
        raise TypeError(
            f"optimizer must be a name or the bytes that it keeps for each parameter, got {type(optimizer).__name__}"
        )
    name = optimizer.lower().replace("_", "-")
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    near = difflib.get_close_matches(name, OPTIMIZERS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"optimizer: {optimizer!r} is not known.{hint} The optimizers: {', '.join(OPTIMIZERS)}; or a number, the bytes "
        "that it keeps for each parameter."
    )
