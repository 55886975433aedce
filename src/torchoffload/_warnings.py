"""Warnings, shown at the line of the user's code that led to them."""

import sys
import warnings

__all__ = ["warn_user"]

# Frames of these packages lie between the user's code and the warning; they are not its cause.
_OWN_PACKAGES = ("torchoffload", "torch")


def warn_user(text: str) -> None:
    """Give a UserWarning with ``text``, placed at the nearest frame outside of torch and torchoffload.

    The compiled core calls this as well, from inside pack and unpack. The line shown is then the line of the model that
    ran the operator.
    """
    stacklevel = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _OWN_PACKAGES:
        frame = frame.f_back
        stacklevel += 1
    warnings.warn(text, UserWarning, stacklevel=stacklevel)
