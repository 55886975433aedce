"""PyTorch's collectives, as a dispatch mode sees them."""

from typing import Any

__all__ = ["communicates"]

_NAMESPACES = frozenset(("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"))


def communicates(operator: Any) -> bool:
    """Return whether the operator is one of PyTorch's collectives. Its output may be on its way still."""
    return getattr(operator, "namespace", "") in _NAMESPACES
