"""The blocks of a model together with their names, by whatever says which they are."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn

from torchoffload._fit.choosing.structure import innermost_blocks
from torchoffload._modules.selection import Chosen, Selector, choose, outermost
from torchoffload._pytorch.module_wrappers import INNER_BY_CLASS, PEFT

__all__ = ["blocks_in_place", "blocks_named", "blocks_of", "computing"]


def blocks_of(model: nn.Module, selectors: Selector | Sequence[Selector]) -> list[Chosen]:
    """Return the modules that are chosen, without those inside of another one.

    Raises
    ------
    TypeError, ValueError
        As ``offload_modules``.
    """
    return [Chosen(each.name, computing(each.module)) for each in outermost(choose(model, selectors))]


def blocks_named(model: nn.Module, names: Iterable[str]) -> list[Chosen]:
    """Return the modules of these names; if the model has none of them, its innermost repeated ones."""
    wanted, own_name = frozenset(names), type(model).__name__
    found = [module for name, module in model.named_modules() if (name or own_name) in wanted]
    return blocks_of(model, (lambda name, _module: (name or own_name) in wanted) if found else innermost_blocks(model))


def blocks_in_place(
    model: nn.Module, blocks: Mapping[nn.Module, str], names: Iterable[str], was_in_model: Callable[[nn.Module], bool]
) -> list[Chosen]:
    """Return the blocks that a model still has, and the modules that have come in the places of the others.

    Parameters
    ----------
    model : nn.Module
        The model.
    blocks : mapping of nn.Module to str
        The names of the blocks, as far as these exist.
    names : iterable of str
        The names of all blocks.
    was_in_model : callable
        Returns whether the model had a module as the blocks were taken: that is no new one, though it may have the name
        of a block by now.
    """
    known = {each for each in model.modules() if each in blocks}
    places = set(names) - {blocks[each] for each in known}
    try:
        return blocks_of(model, lambda name, each: each in known or (name in places and not was_in_model(each)))
    except ValueError:  # there is none
        return []


def computing(module: nn.Module) -> nn.Module:
    """Return the module that computes in a wrapper whose forward prepares for backward or gathers parameters.

    Such a forward must not be called again in backward.
    """
    names = [INNER_BY_CLASS[kind.__name__] for kind in type(module).__mro__ if kind.__name__ in INNER_BY_CLASS]
    return module if not names or names[0] == PEFT else computing(getattr(module, names[0]))
