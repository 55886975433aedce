"""Blocks of which a survey has seen no call, with the cause and the cure, in words."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import nn

from torchoffload._fit.block.blocks import why_left_alone

__all__ = ["Unseen", "shown", "unseen_blocks"]

_SHOWN = 3
_NOT_CALLED = (
    "no call of them was seen. If they are called later, they keep as little as they can, unless the plan keeps all "
    "saved tensors. A call as block(x) is seen; block.forward(x) is not, and neither is a call of a class with a "
    "__call__ of its own, or of a copy of the block"
)


def shown(names: list[str]) -> str:
    """Return the first few of the names of blocks, for a text."""
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


class Unseen(NamedTuple):
    """What to tell of blocks of which a survey has seen no call.

    Attributes
    ----------
    text, cause : str
        The whole sentence, and the part of it that is the same for other blocks.
    is_worth_a_warning : bool
        Whether that is worth a warning. A forward may skip a block now and then, for good reasons.
    """

    text: str
    cause: str
    is_worth_a_warning: bool


def unseen_blocks(names: Mapping[nn.Module, str], called: Iterable[nn.Module]) -> Unseen | None:
    """Return what to tell of blocks that fit has no plan for, since no call of them was seen; None if there are none.

    Parameters
    ----------
    names : mapping of nn.Module to str
        The blocks that were chosen.
    called : iterable of nn.Module
        Those whose calls the survey has seen.
    """
    seen = set(called)
    unseen = [module for module in names if module not in seen]
    if not unseen:
        return None
    causes = [why for module in unseen if (why := why_left_alone(module)) is not None]
    some = f"{len(unseen)} of {len(names)} blocks ({shown([names[each] for each in unseen])})"
    if causes:
        return Unseen(f"fit does nothing in {some}: {causes[0]}.", causes[0], True)
    return Unseen(f"fit has no plan for {some}: {_NOT_CALLED}.", _NOT_CALLED, 2 * len(unseen) > len(names))
