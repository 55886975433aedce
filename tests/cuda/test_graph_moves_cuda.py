"""Values that move inside of compiled graphs, on a GPU: the memory at the loss, and buffers that are used again."""

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import torchoffload

pytestmark = [pytest.mark.cuda, pytest.mark.slow]

WIDTH, ROWS, DEPTH = 2048, 8192, 8


class Stack(nn.Module):
    """Layers whose values of 32 MiB each are cheap to make twice, saved, and dead early."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))
        self.downs = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            hidden = nn.functional.gelu(up(nn.functional.layer_norm(x, (WIDTH,))))
            x = x + nn.functional.dropout(down(hidden), 0.1)
        return x


def trained(options: dict[str, Any] | None, context: Any) -> tuple[list[torch.Tensor], int]:
    """The gradients after three steps, and the bytes that the third one holds at the loss beyond those before it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Stack().to(torch.bfloat16)
        x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    step = torch.compile(model, fullgraph=True, options=options)
    held_bytes = 0
    for number in range(3):
        torch.manual_seed(number)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with context:
            loss = step(x).float().square().mean()
        held_bytes = torch.cuda.memory_allocated() - before
        loss.backward()
    return [parameter.grad for parameter in model.parameters()], held_bytes


@pytest.mark.parametrize("window_bytes", [0, 128 << 20])
def test_a_whole_compiled_model_holds_less_at_the_loss_with_the_same_bits(window_bytes: int):
    stock, stock_bytes = trained(None, contextlib.nullcontext())
    again, _ = trained(None, contextlib.nullcontext())
    assert all(map(torch.equal, stock, again)), "not bit-stable without us"
    context = torchoffload.OffloadActivations(learn=False, offload_window_bytes=window_bytes, reload_window_bytes=0)
    ours, our_bytes = trained(torchoffload.compile_options(), context)
    assert all(map(torch.equal, stock, ours))
    assert our_bytes < 0.4 * stock_bytes
