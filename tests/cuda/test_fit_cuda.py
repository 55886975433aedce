"""fit on a GPU: the memory that was given is kept to, step after step."""

import pytest
import torch
from torch import nn

import torchoffload

pytestmark = pytest.mark.cuda

WIDTH = 1024


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def test_the_memory_that_was_given_is_kept_to():
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.Sequential(*(Block() for _ in range(8)))
        x = torch.randn(16, 512, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with torchoffload.fit(model, 1.0) as handle:
        while handle.phase != "settled":
            train(model, optimizer, x)
        stock = handle.plan
        assert stock.moved_bytes == stock.recompute_s == 0
        points = handle.frontier()
        low, high = points[0].memory_bytes, points[-1].memory_bytes
        memory = (low + high) // 2
        handle.replan(memory)
        for _ in range(40):
            train(model, optimizer, x)
            if handle.phase == "settled":
                break
        torch.cuda.reset_peak_memory_stats()
        for _ in range(10):
            train(model, optimizer, x)
        assert handle.phase == "settled", handle.report()
        assert handle.plan.moved_bytes + handle.plan.recompute_s > 0
        assert torch.cuda.max_memory_reserved() <= memory, handle.report()
        assert stock.predicted_peak_bytes > memory
        measured = torch.cuda.max_memory_allocated()
        assert measured <= 1.02 * handle.plan.predicted_peak_bytes, handle.report()


def test_running_out_of_memory_is_survived():
    """The step that runs out of memory raises PyTorch's error, and later ones take less."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.Sequential(*(Block() for _ in range(4)))
        x = torch.randn(16, 512, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torchoffload.fit(model, 1.0) as handle:
        while handle.phase != "settled":
            train(model, optimizer, x)
        hog = torch.empty(0, dtype=torch.uint8, device="cuda")
        free, _ = torch.cuda.mem_get_info()
        with pytest.raises(torch.cuda.OutOfMemoryError):
            hog = torch.empty(free * 2, dtype=torch.uint8, device="cuda")
        del hog
        train(model, optimizer, x)
        assert handle.phase != "survey"
        assert "ran out of memory" in handle.report() or handle.phase == "trials"
        for _ in range(30):
            train(model, optimizer, x)
        assert handle.phase == "settled", handle.report()
