"""Check that an installed torchoffload works: train a small model with and without offloading to disk.

``python -P tools/training_step.py`` from any directory. Exits with 1 unless gradients are bit-equal and bytes moved.
"""

import sys
import tempfile

import torch

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
    return 0 if same and moved_bytes > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
