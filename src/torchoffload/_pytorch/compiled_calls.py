"""Modules whose call is a region of torch.compile, or several if its graph breaks."""

from collections.abc import Iterator

from torch import nn

from torchoffload._pytorch.module_wrappers import COMPILED, COMPILED_FROM

__all__ = ["called_modules", "is_compiled"]


def is_compiled(module: nn.Module) -> bool:
    """Return whether a call of the module runs what torch.compile made of it: no hook in it runs, or it is traced."""
    if module._compiled_call_impl is not None or COMPILED in module._modules:
        return True
    forward = module.__dict__.get("forward", type(module).forward)
    return hasattr(forward, COMPILED_FROM)


def called_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a model whose calls can be seen, each once: none that lies inside of a compiled one."""
    waiting, seen = [model], set()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        yield module
        if not is_compiled(module):
            waiting += reversed(list(module.children()))
