"""The layouts of the results of the operators by which compiled graphs save, as a compiler has to know them.

The operators are in the compiled core, and Note [Operators of compiled graphs] there explains them.
"""

from typing import Any

import torch

from torchoffload._core import core  # noqa: F401  (the core defines the operators)

__all__ = ["TOKEN_TYPE", "keep", "pack", "release", "unpack"]

TOKEN_TYPE = torch.float8_e5m2fnuz

_operators: Any = torch.ops.torchoffload
keep = _operators.keep.default
pack = _operators.pack.default
release = _operators.release.default
unpack = _operators.unpack.default


def _token_of(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=TOKEN_TYPE, device="cpu")


def _pack(x: torch.Tensor, index: int) -> torch.Tensor:  # noqa: ARG001
    return _token_of(x)


def _release(token: torch.Tensor, x: torch.Tensor, after: torch.Tensor | None) -> torch.Tensor:  # noqa: ARG001
    return _token_of(x)


def _keep(xs: list[torch.Tensor]) -> torch.Tensor:  # noqa: ARG001
    return torch.empty(1, dtype=torch.uint8, device="cpu")


def _unpack(token: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(token.size(), token.stride(), dtype=dtype, device=device)


for _name, _layout in (("keep", _keep), ("pack", _pack), ("release", _release), ("unpack", _unpack)):
    torch.library.register_fake(f"torchoffload::{_name}", _layout)
