"""Check that an installed torchoffload works: train a small model with and without offloading to disk.

``python -P tools/training_step.py`` from any directory. Exits with 1 unless gradients are bit-equal and bytes moved,
and unless the graph of a compiled model follows a plan in less memory than that of PyTorch takes. It needs no compiler.
"""

import functools
import sys
import tempfile
import warnings

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import nop

import torchoffload


def gradients(disk_dir: str | None) -> list[torch.Tensor]:
    """Gradients after three steps of one seed, with offloading to `disk_dir`; None trains without offloading."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.LayerNorm(256), torch.nn.Linear(256, 8)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        batch = torch.randn(512, 64)
        context = (
            torchoffload.OffloadActivations(tier="disk", disk_dir=disk_dir, min_offload_size=0, offload_window_bytes=0)
            if disk_dir
            else torchoffload.NoOpManager()
        )
        with context:
            loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def planned_differences() -> str:
    """Plan the graph of a compiled model. Return how it differs from the model without a plan; empty if it does not."""
    torch.manual_seed(0)
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in range(4)
    ]
    model, batch = torch.nn.Sequential(*blocks), torch.randn(512, 64)
    expected = torch.autograd.grad(model(batch).square().mean(), list(model.parameters()))
    for memory in ("1GiB", "4MiB"):
        torch._dynamo.reset()
        partition = functools.partial(torchoffload.partition_fn, memory=memory)
        backend = aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=partition)
        loss = torch.compile(model, backend=backend)(batch).square().mean()
        found = torch.autograd.grad(loss, list(model.parameters()))
        if not all(map(torch.equal, expected, found)):
            return f"gradients of a graph with memory={memory} are not the same"
    lines = [line for line in torchoffload.report().splitlines() if "compiled graph" in line]
    if len(lines) != 2:
        return f"report() knows {len(lines)} plans of graphs and not 2"
    return "" if "computed again" in torchoffload.report() else "nothing is computed again in little memory"


def main() -> int:
    """Return the exit status."""
    with tempfile.TemporaryDirectory() as disk_dir:
        expected = gradients(None)
        torchoffload.reset_stats()
        found = gradients(disk_dir)
    moved_bytes = torchoffload.stats().bytes_offloaded
    same = len(expected) == len(found) and all(map(torch.equal, expected, found))
    print(f"torchoffload {torchoffload.__version__} from {torchoffload.__file__}, torch {torch.__version__}")
    print(f"gradients {'identical' if same else 'NOT THE SAME'}, {moved_bytes} bytes moved to disk")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "torchoffload: torch")  # a partitioner that is not known
        difference = planned_differences()
    print(difference or "a compiled graph follows its plan")
    return 0 if same and moved_bytes > 0 and not difference else 1


if __name__ == "__main__":
    sys.exit(main())
