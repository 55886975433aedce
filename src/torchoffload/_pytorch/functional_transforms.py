"""``torch.func.grad`` and its kin inside of a block: they forbid saved-tensor hooks, so those of blocks step aside."""

import functools
from collections.abc import Generator
from typing import Any

from torch.autograd import graph

from torchoffload._pytorch import hook_stack

__all__ = ["let_transforms_run"]


def let_transforms_run() -> None:
    """Have the hooks of modules taken off PyTorch's stack for as long as somebody forbids saved-tensor hooks.

    PyTorch forbids them by ``torch.autograd.graph.disable_saved_tensors_hooks``, which raises an error if there are
    any. Dynamo knows that function by its identity. So it stays the same one, and the function inside it is wrapped
    once more. If a version of torch has it in another form, nothing changes: transforms inside of blocks raise
    PyTorch's error.
    """
    helper: Any = graph.disable_saved_tensors_hooks
    cells = dict(zip(helper.__code__.co_freevars, helper.__closure__ or (), strict=False))
    cell = cells.get("func")
    if cell is None or getattr(cell.cell_contents, "steps_aside", False):
        return
    original = cell.cell_contents

    @functools.wraps(original)
    def disabled(*args: Any, **kwargs: Any) -> Generator[None, None, None]:
        with hook_stack.stepped_aside():
            yield from original(*args, **kwargs)

    disabled.steps_aside = True  # type: ignore[attr-defined]
    cell.cell_contents = disabled
