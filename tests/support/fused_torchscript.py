"""fused_torchscript.py: a model of TorchScript functions that run as one kernel each, as on a GPU, under fit.

    python fused_torchscript.py before DIRECTORY     # the functions were called before fit, and are fused
    python fused_torchscript.py within DIRECTORY     # they are fused in the survey

PyTorch fuses them on a GPU by itself, and on a CPU if it is told to. Their kernels read memory by its address, and
PyTorch's dispatcher does not see what they compute.
"""

import sys
import warnings
from typing import Any

import torch
from torch import nn

import torchoffload


def new_function() -> Any:
    """Return a function that was never called: PyTorch fuses its operators after two calls."""

    def gated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * y + x) * torch.sigmoid(y)

    return torch.jit.script(gated)


class Block(nn.Module):
    def __init__(self, gated: Any) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(64, 16)
        self.gated = [gated]  # no attribute of its own, so that it is not copied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(torch.exp(torch.tanh(self.gated[0](self.first(x), self.second(x)))))


def is_fused(gated: Any) -> bool:
    x, y = (torch.randn(8, 64, requires_grad=True) for _ in range(2))
    return "TensorExprGroup" in str(gated.graph_for(x, y))


def trained(directory: str | None, steps: int, before: int) -> tuple[list[Any], str]:
    torch.manual_seed(0)
    gated = new_function()
    model = nn.Sequential(*(Block(gated) for _ in range(4)))
    x = torch.randn(8, 16)
    for _ in range(before):
        model(x).square().mean().backward()
    assert before == 0 or is_fused(gated)
    model.zero_grad()
    seen, report, fitted = [], "", None
    if directory is not None:
        fitted = torchoffload.fit(model, 1 << 40, tier="disk", disk_dir=directory)
    for step in range(steps):
        if fitted is not None and fitted.phase == "settled" and step == steps // 2:
            fitted.replan(fitted.frontier()[0].memory_bytes * 2)
        loss = model(x).square().mean()
        loss.backward()
        seen += [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]
        model.zero_grad()
    assert is_fused(gated)
    if fitted is not None:
        report = fitted.report()
        fitted.remove()
    return seen, report


def main(name: str, directory: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch._C._jit_override_can_fuse_on_cpu(True)
    torch._C._jit_set_te_must_use_llvm_cpu(False)
    torch._C._jit_set_texpr_fuser_enabled(True)
    before = 4 if name == "before" else 0
    stock, _ = trained(None, 20, before)
    ours, report = trained(directory, 20, before)
    assert len(stock) == len(ours) > 0
    for one, other in zip(stock, ours, strict=True):
        # The dry run is a call, too: within the survey the operators are fused earlier than in stock.
        torch.testing.assert_close(one, other, **({"rtol": 0, "atol": 0} if before else {}))
    assert not before or "a dry run of the model failed" in report, report
    print("right")


if __name__ == "__main__":
    main(*sys.argv[1:])
