"""deepspeed_program.py: trainings under DeepSpeed's ZeRO that test_deepspeed.py starts: plain, offloaded, and planned.

Prints one line of JSON: for each stage and each way the losses, the bytes that moved, and a sum over the weights.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch

import torchoffload
from devices import Device
from fitted_models import options_of
from gradients import Run
from models import TinyGpt, tokens_and_labels
from trainings import STEPS_TO_SETTLE, options


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }


def train(device: Device, stage: int, way: str) -> dict[str, Any]:
    run = Run(device, stock=way == "plain", context=None)
    model = run.module(TinyGpt)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(stage))
    torchoffload.reset_stats()
    handle: Any = None
    if way == "modules":
        handle = torchoffload.offload_modules(engine.module, "blocks.*", **options(device))
    elif way == "fit":
        handle = torchoffload.fit(engine, "1MiB", on_unfit="warn", **options_of(device))
    losses = []
    for _ in range(STEPS_TO_SETTLE if way in ("fit", "plain") else 3):
        context = torchoffload.OffloadActivations(**options(device)) if way == "context" else contextlib.nullcontext()
        with context:
            loss = engine(*tokens_and_labels(run))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    moved = torchoffload.stats().bytes_offloaded
    if handle is not None:
        handle.remove()
    return {"losses": losses, "moved": moved}


def main() -> None:
    device = Device("disk", Path(sys.argv[1]))
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    stages = (0, 2, 3)
    ways = ("plain", "context", "modules", "fit")
    print(json.dumps({stage: {way: train(device, stage, way) for way in ways} for stage in stages}))


if __name__ == "__main__":
    main()
