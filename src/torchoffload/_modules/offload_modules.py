"""offload_modules: offloading only the tensors that are saved inside chosen modules of a model."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self, Unpack

from torch import nn

from torchoffload._contexts.accelerator import require_accelerator
from torchoffload._contexts.heads import find_heads
from torchoffload._contexts.keywords import ContextKeywords, ModuleKeywords
from torchoffload._contexts.offload_activations import OffloadActivations
from torchoffload._contexts.options import OffloadOptions, check_bool, described, refuse_unknown, short
from torchoffload._contexts.signatures import shows_options
from torchoffload._modules.hooks import Offloading, Part, install, uninstall
from torchoffload._modules.selection import Chosen, Selector, choose, without_last
from torchoffload._observe.module_stats import ModuleStats, note_source
from torchoffload._pytorch.tracing import is_not_traced

__all__ = ["OffloadedModules", "install_offloading", "offload_modules"]


class OffloadedModules:
    """The handle that ``offload_modules`` returns: the chosen modules, the bytes they moved, and how to undo it.

    Dropping the handle changes nothing: offloading goes on. Used as a context manager, it removes the hooks at the end
    of the block.

    Attributes
    ----------
    names : tuple of str
        The names of the modules whose saved tensors move.
    options : OffloadOptions
        The options of the context, checked.
    """

    def __init__(self, offloading: Offloading) -> None:
        self._offloading = offloading
        self.names = offloading.names
        self.options: OffloadOptions = offloading.manager.options

    def stats(self) -> tuple[ModuleStats, ...]:
        """Return the bytes and records that each module moved and kept since ``reset_stats()``.

        Returns
        -------
        tuple of ModuleStats
            One for each of ``names``, in that order.
        """
        return self._offloading.stats()

    def remove(self) -> None:
        """Remove the hooks from the model.

        Autograd graphs that are alive stay valid, and calls that are under way still move their saved tensors.
        """
        uninstall(self._offloading)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()

    def __repr__(self) -> str:
        shown = ", ".join(self.names[:4]) + (", ..." if len(self.names) > 4 else "")
        return f"{type(self).__name__}({len(self.names)} of {self._offloading.model_name}: {shown})"


def _check_fraction(fraction: object) -> None:
    allowed = "fraction must be a number above 0 and at most 1, or None for all"
    if fraction is None:
        return
    if not isinstance(fraction, (int, float)) or isinstance(fraction, bool):
        raise TypeError(f"{allowed}, got {described(fraction)}")
    if not 0 < fraction <= 1:
        raise ValueError(f"{allowed}, got {short(fraction)}")


def _parts(model: nn.Module, chosen: list[Chosen], offloading: Offloading) -> list[tuple[nn.Module, Part]]:
    numbers = {each.module: number for number, each in enumerate(chosen, start=1)}
    inside = {module for each in chosen for module in each.module.modules()}
    parts = [(module, Part(offloading, number)) for module, number in numbers.items()]
    if model not in numbers:
        parts.append((model, Part(offloading)))
    # A tied head of torchtune is not a module of the model.
    inside |= set(find_heads(model)) - set(model.modules())
    heads = [head for head in dict.fromkeys(find_heads(model)) if head in inside and head not in numbers]
    return parts + [(head, Part(offloading, is_head=True)) for head in heads]


@is_not_traced
@shows_options(ContextKeywords.__optional_keys__)
def offload_modules(
    model: nn.Module,
    modules: Selector | Sequence[Selector],
    *,
    fraction: float | None = None,
    keep_last: int | None = None,
    only_inputs: bool = False,
    **options: Unpack[ContextKeywords],
) -> OffloadedModules:
    """Move the tensors saved inside chosen modules of ``model``, whenever it is called with gradients enabled.

    Parameters
    ----------
    model : torch.nn.Module
        The module that the training loop calls. Each call of it is one tape, and so is a call of a chosen module
        outside of such a call.
    modules : str, type, torch.nn.Module, callable, or sequence of these
        Which modules. A str is a name (``"layers.0.attention"``) or a glob of names (``"layers.*.attention"``), in
        which ``**`` stands for any number of levels. A type stands for all modules of that class. A callable takes a
        name and a module, and returns whether the module is meant. Names leave out wrappers around modules. A
        ``ModuleList`` stands for the modules in it.
    fraction : float, optional
        Move at most this part of the bytes that could move, above 0 and at most 1, beginning with those that are saved
        first. The total is known from the call before, so the first call moves everything. Default: all.
    keep_last : int, optional
        Leave out this many of the chosen modules at the end of the model, with which backward begins. Default: none.
    only_inputs : bool, default False
        Move only the inputs of the chosen modules. A checkpointed block holds just these until it is computed again.
    **options
        The other keyword options of ``OffloadActivations``, except ``model``.

    Returns
    -------
    OffloadedModules
        A handle. Its ``remove()`` undoes everything, and its ``stats()`` returns the bytes that each module moved.

    Raises
    ------
    TypeError
        An argument has a wrong type, or an option is unknown.
    ValueError
        No module matches, a module is given twice or is offloaded already, or a number is out of its range.
    FileNotFoundError, NotADirectoryError, PermissionError
        ``disk_dir`` cannot be used, as for ``OffloadActivations``.
    RuntimeError
        ``tier="host"`` on a machine without an accelerator. The model itself may still be on the CPU.

    Notes
    -----
    The output head inside a chosen module is exempt, unless it is chosen itself. Modules inside a region of
    ``torch.compile`` cannot be told apart, so compile first and then choose the module that ``torch.compile`` returned.
    A module that ``module.compile()`` compiles in place is chosen as it is.

    Examples
    --------
    >>> handle = torchoffload.offload_modules(model, "model.layers.*.self_attn")
    >>> train(model)
    >>> print(torchoffload.report())
    >>> handle.remove()
    """
    refuse_unknown("offload_modules", options, ModuleKeywords.__optional_keys__)
    _check_fraction(fraction)
    check_bool("only_inputs", only_inputs)
    chosen = without_last(choose(model, modules), keep_last)
    manager = OffloadActivations(model=model, **options)
    require_accelerator(manager.options.tier, "offload_modules")
    manager._context.restrict(1.0 if fraction is None else float(fraction), only_inputs)
    return install_offloading(model, chosen, Offloading(model, chosen, manager, only_inputs=only_inputs))


def install_offloading(model: nn.Module, chosen: list[Chosen], offloading: Offloading) -> OffloadedModules:
    """Give the chosen modules their hooks.

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    chosen : list of Chosen
        Modules of it.
    offloading : Offloading
        The state that the hooks work on.
    """
    try:
        install(_parts(model, chosen, offloading))
    except BaseException:  # such as a TorchScript module, which takes no hooks
        uninstall(offloading)
        raise
    note_source(offloading)
    offloading.warn_of_compiled()
    return OffloadedModules(offloading)
