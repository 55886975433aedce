"""The options of fit, checked all together before there is a plan, or even a model."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from torchoffload._contexts.amounts import Amount, check_margin, parse_amount
from torchoffload._contexts.keywords import ContextKeywords, MovingKeywords
from torchoffload._contexts.options import OffloadOptions, check_bool, described, refuse_unknown, short
from torchoffload._fit.machine.allocator import ALLOCATORS

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["DEFAULT_MARGIN", "FitKeywords", "FitOptions"]

DEFAULT_MARGIN = 0.04

_WINDOWS = ContextKeywords.__optional_keys__ - MovingKeywords.__optional_keys__


class FitKeywords(TypedDict, total=False):
    """The options of ``fit`` that no context has, except ``memory`` and ``blocks``."""

    recompute: bool
    move: bool
    margin: float
    plan: str | os.PathLike[str] | None
    on_unfit: Literal["error", "warn"]
    allocator: Literal["expandable", "as it is"]
    group: "ProcessGroup | Literal['auto'] | None"


def _check_plan(plan: object) -> None:
    if not isinstance(plan, (str, os.PathLike)):
        raise TypeError(f"plan must be the path of a file that Fitted.save() wrote, got {described(plan)}")
    if not os.path.isfile(plan):
        raise FileNotFoundError(
            f"there is no file plan={os.fspath(plan)!r}. Leave plan out for the first run, and write the file with "
            "save() of what fit returned"
        )


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """The options of ``fit``, which explains each of them.

    Attributes
    ----------
    memory : Amount or None
        The amount that was given.
    moving : OffloadOptions
        The options of the contexts that move.

    Raises
    ------
    TypeError, ValueError
        An option has a wrong type or value. The message names the option, the value given, and the values allowed.
    FileNotFoundError, NotADirectoryError, PermissionError
        There is no file ``plan``, or a spill file cannot be made in ``disk_dir``.
    """

    memory: Amount | None = None
    recompute: bool = True
    move: bool = True
    margin: float = DEFAULT_MARGIN
    plan: str | os.PathLike[str] | None = None
    on_unfit: Literal["error", "warn"] = "error"
    allocator: Literal["expandable", "as it is"] = "expandable"
    group: "ProcessGroup | Literal['auto'] | None" = "auto"
    moving: OffloadOptions = field(default_factory=OffloadOptions)

    def __post_init__(self) -> None:
        check_bool("recompute", self.recompute)
        check_bool("move", self.move)
        if not self.recompute and not self.move:
            raise ValueError(
                "recompute=False with move=False leaves fit nothing to choose: the step would run as it does without "
                "fit. Give one of them, or leave fit out"
            )
        check_margin(self.margin)
        if self.on_unfit not in ("error", "warn"):
            raise ValueError(f'on_unfit must be "error" or "warn", got {short(self.on_unfit)}')
        if self.allocator not in ALLOCATORS:
            raise ValueError(f'allocator must be "expandable" or "as it is", got {short(self.allocator)}')
        if self.plan is not None:
            _check_plan(self.plan)
        group = self.group
        if group is not None and group != "auto" and not hasattr(group, "rank"):
            raise TypeError(f'group must be a torch.distributed.ProcessGroup, "auto" or None, got {described(group)}')

    @classmethod
    def of(
        cls, taker: str, memory: object, given: Mapping[str, Any], *, also: frozenset[str] = frozenset()
    ) -> "FitOptions":
        """Check the options that a function was given.

        Parameters
        ----------
        taker : str
            The function or class that was given them, for the message.
        memory : int, float, str or None
            As for ``fit``.
        given : mapping of str to value
            The other options, those of the contexts that move among them.
        also : frozenset of str
            Other options that ``taker`` has, for the message about an unknown one.
        """
        windows = sorted(_WINDOWS.intersection(given))
        if windows:
            raise TypeError(f"fit chooses the windows by itself: leave {', '.join(windows)} out")
        own = FitKeywords.__optional_keys__
        moving = MovingKeywords.__optional_keys__
        refuse_unknown(taker, given, own | moving | also | {"memory"})
        return cls(
            memory=None if memory is None else parse_amount(memory),
            moving=OffloadOptions(**{name: value for name, value in given.items() if name in moving}),
            **{name: value for name, value in given.items() if name in own},
        )
