"""noted_operators.py: a mode in Python and a listener of the core, which note what they are shown."""

import threading
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchoffload._core import core


class InPython(TorchDispatchMode):
    """Notes the operators, and the calls of what is none, as a mode of ours should."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.others: list[str] = []
        self._thread = threading.get_ident()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if threading.get_ident() != self._thread or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE):
            return func(*args, **(kwargs or {}))
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY):
            return func(*args, **(kwargs or {}))
        if types and all(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented
        if types:  # a fake tensor, or a saved output
            return func(*args, **(kwargs or {}))
        noted = self.names if isinstance(func, torch._ops.OpOverload) else self.others
        noted.append(func.name())
        return func(*args, **(kwargs or {}))


def make_listener(**options: object) -> Any:
    listener = core.testing.NotingListener()
    for name, value in options.items():
        setattr(listener, name, value)
    return listener
