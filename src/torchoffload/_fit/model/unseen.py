"""Blocks of which a survey has seen no call, with the cause and the cure, in words."""

from collections.abc import Iterable, Mapping

from torch import nn

from torchoffload._fit.block.blocks import why_left_alone

__all__ = ["shown", "unseen_blocks"]

_SHOWN = 3
_NOT_CALLED = (
    "no call of them was seen. A call as block(x) is seen; block.forward(x) is not, and neither is that of a class "
    "with a __call__ of its own, or of a copy of the block"
)


def shown(names: list[str]) -> str:
    """Return the first few of the names of blocks, for a text."""
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def unseen_blocks(names: Mapping[nn.Module, str], called: Iterable[nn.Module]) -> tuple[str, bool] | None:
    """Return which blocks fit leaves alone and why, and whether that is worth a warning; None if there are none.

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
    some = shown([names[each] for each in unseen])
    text = f"fit does nothing in {len(unseen)} of {len(names)} blocks ({some}): {causes[0] if causes else _NOT_CALLED}."
    # A forward may skip a block now and then, for good reasons.
    return text, bool(causes) or 2 * len(unseen) > len(names)
