"""The mode that shows the operators of a piece of forward to a listener of the core."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from torchoffload._core import core

__all__ = ["OperatorMode"]


class OperatorMode(core.OperatorMode, TorchDispatchMode):  # type: ignore[misc]
    """Shows each operator below autograd and autocast to a listener, while it is entered, on the thread that did.

    It is entered and left as any ``TorchDispatchMode`` is. What it is shown, and what not, is said in
    ``operator_listener.h`` and ``operator_mode.h``. A class below this one may have a method
    ``on_other(func, types, args, kwargs)``, which is called instead of an operator that has no C++ arguments, such as
    ``torch.cond``, and returns its result; without one the listener is shown an opaque region.

    Parameters
    ----------
    listener : capsule
        What the method ``listener`` of a listener's Python object returned.
    """

    # As in PyTorch's own modes for checkpoints: an operator that takes functions is seen as one operator, and a compiled
    # region stays compiled.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled regions compiled."""
        return True

    def __init__(self, listener: object) -> None:  # the core's type has taken it
        super().__init__()  # type: ignore[no-untyped-call]

    def __enter__(self) -> "OperatorMode":
        self._begin()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
