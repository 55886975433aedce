"""ranks_program.py: one rank of training runs that test_transformers_ranks.py starts: stock, offloaded, and fitted.

Prints one line of JSON: whether losses and weights are the same bits, bytes moved, warnings, and what a plan does.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

import torchoffload
from devices import Device
from fitted_models import options_of
from gradients import Run
from hf_trainings import arguments, trainer_of
from torchoffload.integrations.transformers import OffloadActivationsCallback
from trainings import ROOM_FOR_ALL, STEPS_TO_SETTLE, assert_was_fitted, memory_of, options, tiny_llama


def train(
    device: Device, directory: Path, callback: TrainerCallback | None, steps: int = 3
) -> tuple[list[Any], dict[str, torch.Tensor], Any]:
    """The losses, the weights, and the trainer."""
    model = tiny_llama(Run(device, stock=callback is None, context=None))
    args = arguments(directory, device, ddp_backend="gloo", max_steps=steps)
    trainer = trainer_of(model, args, [] if callback is None else [callback])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.model.state_dict(), trainer


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


def fitted(device: Device, directory: Path) -> dict[str, Any]:
    """What a training does in which each rank makes a plan of its own, for another amount of memory."""
    stock_losses, stock_weights, _ = train(device, directory, None, STEPS_TO_SETTLE)
    room = OffloadActivationsCallback(memory=ROOM_FOR_ALL, **options_of(device))
    _, _, _trainer = train(device, directory, room, STEPS_TO_SETTLE)
    memory = memory_of(room.fitted, 0.3 if os.environ["RANK"] == "0" else 0.6)
    ours = OffloadActivationsCallback(memory=memory, **options_of(device))
    losses, weights, _trainer = train(device, directory, ours, STEPS_TO_SETTLE)
    assert_was_fitted(ours.fitted)
    return {"losses": losses == stock_losses, "weights": same(weights, stock_weights)}


def main() -> None:
    directory = Path(sys.argv[1])
    device = Device("disk", directory)
    torch.set_num_threads(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stock_losses, stock_weights, trainer = train(device, directory, None)
        callback = OffloadActivationsCallback(enabled=os.environ["RANK"] == "0", **options(device))
        losses, weights, _ = train(device, directory, callback)
        bytes_offloaded = torchoffload.stats().bytes_offloaded
        # A model of which the callback's modules save nothing: each rank notices.
        unused = tiny_llama(Run(device, stock=False, context=None))
        unused.unused = torch.nn.Identity()
        callback = OffloadActivationsCallback("unused", **options(device))
        trainer_of(unused, arguments(directory, device, ddp_backend="gloo"), [callback]).train()
    said = {
        "losses": losses == stock_losses and len(losses) == 3,
        "weights": same(weights, stock_weights),
        "wrapped": isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel),
        "bytes_offloaded": bytes_offloaded,
        "warnings": [str(each.message) for each in caught if "torchoffload" in str(each.message)],
        "fitted": fitted(device, directory),
    }
    print(json.dumps(said))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
