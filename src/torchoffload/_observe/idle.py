"""The advice of report() if nothing was saved inside any context."""

from collections.abc import Callable

from torchoffload._contexts.disabling import is_disabled
from torchoffload._observe.module_stats import idle_modules_advice

__all__ = ["advise_if_idle", "idle_advice"]

_DISABLED = "TORCHOFFLOAD_DISABLE=1 is set in the environment and turns all offloading off: unset it, or set it to 0."

_NOTHING_SAVED = "Nothing was saved inside a context. Enter OffloadActivations around forward, with gradients enabled."

_advisers: list[Callable[[], str]] = []


def advise_if_idle(adviser: Callable[[], str]) -> None:
    """Have ``report()`` ask ``adviser`` for advice if nothing was saved; an empty text is no advice.

    Parameters
    ----------
    adviser : callable
        Takes nothing and returns full sentences. It is kept for the process's life.
    """
    _advisers.append(adviser)


def idle_advice() -> str:
    """Return advice, in full sentences, if nothing was saved inside any context."""
    if is_disabled():
        return _DISABLED
    texts = (adviser() for adviser in (*_advisers, idle_modules_advice))
    return next(filter(None, texts), _NOTHING_SAVED)
