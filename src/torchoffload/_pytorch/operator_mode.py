"""The mode that shows the operators of a piece of forward to a listener of the core."""

import functools
import threading
from typing import Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchoffload._core import core
from torchoffload._pytorch.compiled_regions import make_regions_opaque

__all__ = ["OperatorMode", "obstacle"]


class _Mode(core.OperatorMode, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that does not ask by which way its operators come."""

    # As in PyTorch's own modes for checkpoints: an operator that takes functions is seen as one operator, and a
    # compiled region stays compiled.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled regions compiled."""
        return True

    def __init__(self, listener: object) -> None:  # noqa: ARG002  # the core's type has taken it
        TorchDispatchMode.__init__(self)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        self._begin()
        TorchDispatchMode.__enter__(self)  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        TorchDispatchMode.__exit__(self, *exception)  # type: ignore[no-untyped-call]


class OperatorMode(_Mode):  # type: ignore[no-untyped-call]
    """Shows each operator below autograd and autocast to a listener, while it is entered, on the thread that did.

    It is entered and left as any ``TorchDispatchMode`` is. ``operator_listener.h`` and ``operator_mode.h`` say which
    operators it is shown. A class below this one may have a method ``on_other(func, types, args, kwargs)``, which is
    called instead of an operator that has no C++ arguments, such as ``torch.cond``, and returns its result; without one
    the listener is shown an opaque region.

    Parameters
    ----------
    listener : capsule
        The result of the method ``listener`` of a listener's Python object.
    """

    def __init__(self, listener: object) -> None:
        obstacle()
        super().__init__(listener)


_lock = threading.Lock()


def obstacle() -> str | None:
    """Return why operators come to the modes by way of Python, with this torch; None: they need no Python.

    The first call tries it. It installs the core's delegate of PyTorch's Python interpreter. Then it compares the
    operators that a mode is shown with the expected ones, on a thread of its own, which has none of the caller's modes
    on.
    """
    with _lock:
        return _tested()


@functools.cache
def _tested() -> str | None:
    make_regions_opaque()
    found: list[str | None] = []
    thread = threading.Thread(target=lambda: found.append(_test()), name="torchoffload-self-test")
    thread.start()
    thread.join()
    fault = found[0] if found else "the test ended early"
    if fault is not None:
        core.remove_interpreter_delegate()
        return f"torch {torch.__version__}: operators are seen by way of Python, which takes longer: {fault}"
    return None


def _test() -> str | None:
    """Return why operators cannot do without Python; None if they can, and the delegate is installed then."""
    try:
        values = _program()
        by_python = core.counting_listener()
        with _Mode(by_python):
            _program()
        core.install_interpreter_delegate()
        before = core.operators_by_python()
        alone = core.counting_listener()
        with _Mode(alone):
            shown = _program()
        if core.operators_by_python() != before:
            return f"{core.operators_by_python() - before} operators came that way all the same"
        if core.counted(alone) != core.counted(by_python):
            return f"{core.counted(alone)[0]} operators were seen, and {core.counted(by_python)[0]} by way of Python"
        if not all(torch.equal(one, other) for one, other in zip(values, shown, strict=True)):
            return "the results are other ones"
        return _test_of_errors()
    except Exception as error:  # of whatever kind: a mode that is slower is right
        return f"{type(error).__name__}: {error}"


def _program() -> list[torch.Tensor]:
    """Return values and gradients of operators of several kinds, two of which save their outputs."""
    x = torch.arange(6.0, dtype=torch.float32, device="cpu").reshape(2, 3).requires_grad_()
    y = torch.mm(x, torch.ones(3, 3, dtype=torch.float32, device="cpu")) * 0.5
    y = torch.softmax(y, -1)
    z = torch.cat([y[0], y.t()[1]]).tanh().add(1)
    z.mul_(2).view(-1)[0].zero_()
    low, order = torch.sort(z)
    loss = (low * 3).sum() + order.sum()
    return [z.detach(), loss.detach(), order, *torch.autograd.grad(loss, [x])]


def _test_of_errors() -> str | None:
    counter = core.counting_listener()
    depth = torch._C._len_torch_dispatch_stack()
    with _Mode(counter):
        matrix = torch.zeros(2, 3, dtype=torch.float32, device="cpu")
        try:
            torch.mm(matrix, matrix)
        except RuntimeError:
            before, _ = core.counted(counter)
            torch.neg(matrix)
            if core.counted(counter) != (before + 1, 0):
                return "an operator after one that raised was not seen"
        else:
            return "an operator's error was lost"
    return None if torch._C._len_torch_dispatch_stack() == depth else "the mode was left on"
