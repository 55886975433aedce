"""ranks_program.py: one rank of a training run that test_transformers_ranks.py starts: stock first, then offloaded.

Prints one line of JSON: the losses of both, whether the weights are the same bits, bytes moved, and warnings.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

import torchoffload
from devices import Device
from gradients import Run
from hf_trainings import arguments, trainer_of
from torchoffload.integrations.transformers import OffloadActivationsCallback
from trainings import options, tiny_llama


def train(device: Device, directory: Path, *, stock: bool) -> tuple[list[Any], dict[str, torch.Tensor], bool]:
    """The losses, the weights, and whether DDP was around the model."""
    enabled = os.environ["RANK"] == "0"
    ours = [] if stock else [OffloadActivationsCallback(enabled=enabled, **options(device))]
    model = tiny_llama(Run(device, stock=stock, context=None))
    trainer = trainer_of(model, arguments(directory, device, ddp_backend="gloo"), ours)
    trainer.train()
    is_wrapped = isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.model.state_dict(), is_wrapped


def main() -> None:
    directory = Path(sys.argv[1])
    device = Device("disk", directory)
    torch.set_num_threads(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stock_losses, stock_weights, is_wrapped = train(device, directory, stock=True)
        losses, weights, _ = train(device, directory, stock=False)
        bytes_offloaded = torchoffload.stats().bytes_offloaded
        # A model of which the callback's modules save nothing: each rank notices.
        unused = tiny_llama(Run(device, stock=False, context=None))
        unused.unused = torch.nn.Identity()
        callback = OffloadActivationsCallback("unused", **options(device))
        trainer_of(unused, arguments(directory, device, ddp_backend="gloo"), [callback]).train()
    said = {
        "losses": losses == stock_losses and len(losses) == 3,
        "weights": all(torch.equal(weights[name], stock_weights[name]) for name in stock_weights),
        "wrapped": is_wrapped,
        "bytes_offloaded": bytes_offloaded,
        "warnings": [str(each.message) for each in caught if "torchoffload" in str(each.message)],
    }
    print(json.dumps(said))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
