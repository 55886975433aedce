"""Finding the modules of a model that the user means: by name, glob, type, predicate, or the module itself.

Names are those that the author of the model gave. Wrappers around modules (``torch.compile``, checkpoint wrappers,
FSDP1) and around the whole model (DDP and similar) have no part in them. A wrapped module is chosen together with its
wrapper, since the model calls the wrapper.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchoffload._contexts.options import check_module, described, short
from torchoffload._pytorch.module_wrappers import COMPILED, INNER_NAMES, INNER_NAMES_OF_MODELS

__all__ = ["Chosen", "Selector", "choose", "compiled_with_more", "outermost", "without_last"]

Selector = str | type[nn.Module] | nn.Module | Callable[[str, nn.Module], bool]

_NAMES_SHOWN = 12
_ALLOWED = (
    "a name or glob (str), an nn.Module subclass, a module of the model, a predicate taking (name, module), or a list "
    "of these"
)


@dataclass(frozen=True)
class Chosen:
    """A chosen module and its name in the model. The name of the model itself is the name of its type."""

    name: str
    module: nn.Module


class _Tree:
    """The modules of a model by their names, with wrappers left out of the names."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: list[tuple[str, str, nn.Module]] = []  # name, name with wrappers, module; parents first
        self._outermost: dict[int, nn.Module] = {}
        self._names: dict[int, str] = {}
        self._walk(model, "", "", None, frozenset())

    def _walk(
        self, module: nn.Module, name: str, full_name: str, wrapper: nn.Module | None, above: frozenset[int]
    ) -> None:
        outermost = module if wrapper is None else wrapper
        self._outermost.setdefault(id(module), outermost)
        self._names.setdefault(id(module), name)
        self.modules.append((name, full_name, module))
        wrapped_names: tuple[str, ...] = INNER_NAMES
        if name == "" and len(module._modules) == 1 and not any(True for _ in module.parameters(recurse=False)):
            wrapped_names = INNER_NAMES_OF_MODELS
        for child_name, child in module._modules.items():
            if child is None or id(child) in above:
                continue
            is_wrapped = child_name in wrapped_names
            self._walk(
                child,
                name if is_wrapped else f"{name}.{child_name}".lstrip("."),
                f"{full_name}.{child_name}".lstrip("."),
                outermost if is_wrapped else None,
                above | {id(module)},
            )

    def outermost(self, module: nn.Module) -> nn.Module | None:
        """Return the outermost wrapper around ``module``, or ``module``; None if it is not a module of the model."""
        return self._outermost.get(id(module))

    def name(self, module: nn.Module) -> str:
        """Return the name of ``module``; for the model itself, the name of its type."""
        return self._names[id(module)] or type(self.model).__name__


def _pattern(glob: str) -> re.Pattern[str]:
    """Compile a glob of names. ``*`` and ``?`` match within one level, ``**`` matches any number of levels."""
    levels = (r"(?:[^.]+\.)*" if level == "**" else _level(level) + r"\." for level in glob.split("."))
    return re.compile("".join(levels))


def _level(glob: str) -> str:
    wild = {"*": "[^.]*", "?": "[^.]"}
    parts = re.split(r"(\*|\?|\[\w-]+\])", glob)
    return "".join(wild.get(part, part if part.startswith("[") else re.escape(part)) for part in parts)


def _runnable(module: nn.Module) -> Iterator[nn.Module]:
    """Yield ``module``, or if it is a container that is never called itself, the modules in it."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        for child in module.children():
            yield from _runnable(child)
    else:
        yield module


def _found(tree: _Tree, selector: Selector) -> list[nn.Module]:
    if isinstance(selector, str):
        pattern = _pattern(selector)
        return [
            module for name, full, module in tree.modules if any(pattern.fullmatch(f"{n}.") for n in (name, full) if n)
        ]
    if isinstance(selector, type):
        return [module for _, _, module in tree.modules if isinstance(module, selector)]
    if isinstance(selector, nn.Module):
        return [] if tree.outermost(selector) is None else [selector]
    return [module for name, _, module in tree.modules if selector(name, module)]


def _text(selector: Selector) -> str:
    if isinstance(selector, str):
        return short(selector)
    if isinstance(selector, nn.Module):
        return f"the {type(selector).__name__} that was given"
    return getattr(selector, "__qualname__", None) or described(selector)


def _nothing_matches(tree: _Tree, selector: Selector) -> ValueError:
    model = type(tree.model).__name__
    if isinstance(selector, nn.Module):
        return ValueError(
            f"{_text(selector)} is no module of this {model}: choose one of model.modules(), after the model was "
            "wrapped or changed"
        )
    # Names that differ only in numbers, such as those of the layers, are shown once.
    kinds = {re.sub(r"\d+", "*", name): f"{name} ({type(module).__name__})" for name, _, module in tree.modules if name}
    names = list(kinds.values())
    shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
    hint = "; '*' stands for a part of one level, '**.' for any number of levels" if isinstance(selector, str) else ""
    return ValueError(f"no module of {model} matches {_text(selector)}. There are: {shown or 'none'}{hint}")


def _checked(modules: Any) -> list[Selector]:
    is_list = isinstance(modules, Iterable) and not isinstance(modules, (str, nn.Module, type))
    selectors = list(modules) if is_list else [modules]
    if not selectors:
        raise ValueError(f"modules is empty: give {_ALLOWED}")
    for index, selector in enumerate(selectors):
        is_type = isinstance(selector, type)
        if is_type and not issubclass(selector, nn.Module):
            raise TypeError(f"modules must be {_ALLOWED}; {selector.__name__} is no subclass of nn.Module")
        if not (isinstance(selector, (str, nn.Module)) or is_type or callable(selector)):
            raise TypeError(f"modules must be {_ALLOWED}, got {described(selector)}")
        if any(selector is known or (isinstance(known, str) and selector == known) for known in selectors[:index]):
            raise ValueError(f"modules has {_text(selector)} twice: give it once")
    return selectors


def choose(model: nn.Module, modules: Selector | Sequence[Selector]) -> list[Chosen]:
    """Find the modules that ``modules`` means, each once, in the order of ``model.named_modules()``.

    A ``ModuleList`` or ``ModuleDict`` stands for the modules in it.

    Raises
    ------
    TypeError
        ``model`` is not a module, or a selector is of none of the kinds that ``Selector`` allows.
    ValueError
        A selector matches nothing, or is given twice. The message has names that would match.
    """
    check_module("model", model)
    tree = _Tree(model)
    chosen: set[int] = set()
    for selector in _checked(modules):
        found = [each for module in _found(tree, selector) for each in _runnable(module)]
        if not found:
            raise _nothing_matches(tree, selector)
        chosen |= {id(tree.outermost(module)) for module in found}
    ordered = {id(module): module for _, _, module in tree.modules if id(module) in chosen}
    return [Chosen(tree.name(module), module) for module in ordered.values()]


def compiled_with_more(model: nn.Module, chosen: Iterable[Chosen]) -> list[str]:
    """Return the names of the chosen modules that are part of a compiled region, which traces their hooks away."""
    inside: set[int] = set()
    for module in model.modules():
        if COMPILED in module._modules or module._compiled_call_impl is not None:
            inside |= {id(each) for each in module.modules() if each is not module}
    return [each.name for each in chosen if id(each.module) in inside]


def outermost(chosen: Iterable[Chosen]) -> list[Chosen]:
    """Return the chosen modules that lie inside no other one; a module comes before the modules inside it."""
    inside: set[nn.Module] = set()
    found = []
    for each in chosen:
        if each.module not in inside:
            found.append(each)
            inside.update(each.module.modules())
    return found


def without_last(chosen: list[Chosen], count: object) -> list[Chosen]:
    """Leave out the last ``count`` of the chosen modules, and the chosen modules inside these.

    Only modules that lie inside no other chosen module are counted.

    Parameters
    ----------
    chosen : list of Chosen
        Chosen modules; a module comes before the modules inside it.
    count : int or None
        How many to leave out; None for 0.

    Returns
    -------
    list of Chosen
        The modules that remain.

    Raises
    ------
    TypeError
        ``count`` is neither an int nor None.
    ValueError
        ``count`` is negative, or no module would be left.
    """
    allowed = "keep_last must be a whole number of modules of at least 0, or None for 0"
    if count is None:
        return chosen
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"{allowed}, got {described(count)}")
    if count < 0:
        raise ValueError(f"{allowed}, got {short(count)}")
    found = outermost(chosen)
    if count >= len(found):
        raise ValueError(
            f"keep_last={short(count)} of the {len(found)} chosen modules leaves none that moves: make it smaller, "
            "or do without offload_modules"
        )
    kept = {module for each in found[len(found) - count :] for module in each.module.modules()}
    return [each for each in chosen if each.module not in kept]
