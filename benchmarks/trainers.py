r"""Each integration on one training run, without and with torchoffload: memory at the loss, step time, bit for bit.

    PYTHONPATH=build/gpu python3 benchmarks/trainers.py --json trainers.json         # after: make site OUT=build/gpu
    python benchmarks/trainers.py --tier disk --trainer transformers accelerate \
        --workload A:hidden=64,intermediate=256,layers=2,batch=4,tokens=64,heads=8,kv_heads=4,vocabulary=512

| trainer | what runs |
|---|---|
| transformers | Hugging Face's Trainer, `OffloadActivationsCallback` |
| peft | the same on a model with LoRA adapters |
| trl | TRL's SFTTrainer with LoRA, `activation_offloading=True` after `install()` |
| lightning | Lightning's Trainer, `OffloadActivationsCallback` |
| accelerate | a loop over what Accelerate prepared, `offload_prepared` |
| loop | a plain loop, `get_act_offloading_ctx_manager` |

A Llama made from a configuration, in 32 bits under bf16 autocast, or as the trainer has it; random tokens; SGD. Both
runs start from the same seed, under deterministic algorithms, and their losses and weights are compared bit for bit. A
trainer whose packages are missing says so in its row. Memory is what PyTorch has allocated beside the weights: as
backward begins, and at most, gradients included; time is from the begin of one forward to that of the next. All are
medians over the steps after the third.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to be deterministic
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # a Trainer spreads each batch over all that it sees

import torch

import torchoffload
from hardware import command_line, hardware
from workloads import Workload, enable_checkpointing, llama_config, parse_workload, random_tokens

MIB = 1 << 20
DEFAULT_WORKLOAD = "A:hidden=1024,intermediate=4096,layers=8,batch=4,tokens=2048,heads=8,kv_heads=4,vocabulary=8192"
IDENTICAL = "identical"
SETTLED_AFTER = 3  # steps: by then what moves is learned
NEEDS = {
    "transformers": ["transformers", "accelerate"],
    "peft": ["transformers", "accelerate", "peft"],
    "trl": ["transformers", "accelerate", "peft", "datasets", "trl"],
    "lightning": ["transformers", "lightning"],
    "accelerate": ["transformers", "accelerate"],
    "loop": ["transformers"],
}


def device_of(arguments: argparse.Namespace) -> torch.device:
    """Where both runs train."""
    return torch.device("cpu" if arguments.tier == "disk" else "cuda")


class Watch:
    """Looks at memory and the clock: as each forward of a model begins, and as each backward is called."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self.steps: list[dict[str, float]] = []
        self._model, self._device = model, device
        self._backward = torch.autograd.backward
        model.register_forward_pre_hook(self._forward_begins)

    def __enter__(self) -> Self:
        torch.autograd.backward = self._backward_begins  # what Tensor.backward calls, in each trainer
        return self

    def __exit__(self, *_: object) -> None:
        torch.autograd.backward = self._backward
        self._end_step()

    def _forward_begins(self, *_: object) -> None:
        self._end_step()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self.steps.append({"begin_s": time.perf_counter()})

    def _backward_begins(self, *arguments: Any, **options: Any) -> None:
        if self._device.type == "cuda":
            self.steps[-1]["at_loss_bytes"] = torch.cuda.memory_allocated(self._device) - self._weights_bytes()
        self._backward(*arguments, **options)

    def _end_step(self) -> None:
        if not self.steps:
            return
        step = self.steps[-1]
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            step["peak_bytes"] = torch.cuda.max_memory_allocated(self._device) - self._weights_bytes()
        step["seconds"] = time.perf_counter() - step["begin_s"]

    def _weights_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._model.parameters())


class Run:
    """One training run: the model, what it trains on, and what came of it."""

    def __init__(self, arguments: argparse.Namespace, offloaded: bool) -> None:
        from transformers import LlamaForCausalLM

        workload: Workload = arguments.workload
        self.offloaded, self.steps = offloaded, arguments.steps
        self.batch, self.tokens = workload.batch, workload.tokens
        self.device = device_of(arguments)
        self.options: dict[str, Any] = {"tier": arguments.tier}
        if arguments.tier == "disk":
            self.options["min_offload_size"] = 1 << 14
        torch.manual_seed(0)
        no_tokens = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
        self.model: Any = LlamaForCausalLM(llama_config(workload, **no_tokens))
        if workload.checkpointed:
            enable_checkpointing(self.model)
        drawn = random_tokens(replace(workload, batch=self.steps * workload.batch), torch.device("cpu"))
        self.rows = [{"input_ids": row, "labels": row} for row in drawn]
        self.losses: list[torch.Tensor] = []
        self.model.register_forward_hook(lambda _model, _inputs, output: self.losses.append(output.loss.detach()))

    def hf_arguments(self, directory: str) -> dict[str, Any]:
        """Keyword arguments of TrainingArguments and its kin."""
        return {
            "output_dir": directory,
            "use_cpu": self.device.type == "cpu",
            "bf16": self.device.type == "cuda",
            "max_steps": self.steps,
            "per_device_train_batch_size": self.batch,
            "optim": "sgd",
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "seed": 0,
            "gradient_checkpointing": False,
        }


def add_adapters(run: Run) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(run.model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))


def by_transformers(run: Run, adapters: bool = False) -> None:
    from transformers import Trainer, TrainingArguments

    from torchoffload.integrations.transformers import OffloadActivationsCallback

    trained = add_adapters(run) if adapters else run.model
    callbacks = [OffloadActivationsCallback(**run.options)] if run.offloaded else []
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            trained, TrainingArguments(**run.hf_arguments(directory)), train_dataset=run.rows, callbacks=callbacks
        )
        trainer.train()


def by_trl(run: Run) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import ByT5Tokenizer
    from trl import SFTConfig, SFTTrainer

    import torchoffload.integrations.trl

    rows = [{"input_ids": row["input_ids"].tolist()} for row in run.rows]
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as directory, torchoffload.integrations.trl.install(**run.options):
        options = SFTConfig(**run.hf_arguments(directory), max_length=run.tokens, activation_offloading=run.offloaded)
        torch.manual_seed(0)
        trainer = SFTTrainer(
            model=run.model,
            args=options,
            train_dataset=Dataset.from_list(rows),
            processing_class=ByT5Tokenizer(),  # bytes: it has no files
            peft_config=adapters,
        )
        trainer.train()


def by_lightning(run: Run) -> None:
    from lightning.pytorch import LightningModule, Trainer

    from torchoffload.integrations.lightning import OffloadActivationsCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = run.model

        def training_step(self, batch: dict[str, torch.Tensor], _index: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    trainer = Trainer(
        accelerator="cpu" if run.device.type == "cpu" else "gpu",
        devices=1,
        max_steps=run.steps,
        precision="32-true" if run.device.type == "cpu" else "bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[OffloadActivationsCallback(**run.options)] if run.offloaded else [],
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(run.rows, batch_size=run.batch))


def by_accelerate(run: Run) -> None:
    from accelerate import Accelerator

    from torchoffload.integrations.accelerate import offload_prepared

    is_cpu = run.device.type == "cpu"
    accelerator = Accelerator(cpu=is_cpu, mixed_precision="no" if is_cpu else "bf16")
    optimizer = torch.optim.SGD(run.model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(run.rows, batch_size=run.batch)
    model, optimizer, loader = accelerator.prepare(run.model, optimizer, loader)
    offloading = offload_prepared(accelerator, model, enabled=run.offloaded, **run.options)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    offloading.remove()


def by_loop(run: Run) -> None:
    model = run.model.to(run.device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    context = torchoffload.get_act_offloading_ctx_manager(model, run.offloaded, **run.options)
    for batch in torch.utils.data.DataLoader(run.rows, batch_size=run.batch):
        with context, torch.autocast(run.device.type, torch.bfloat16, enabled=run.device.type == "cuda"):
            loss = model(**{name: value.to(run.device) for name, value in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


TRAINERS: dict[str, Callable[[Run], None]] = {
    "transformers": by_transformers,
    "peft": lambda run: by_transformers(run, adapters=True),
    "trl": by_trl,
    "lightning": by_lightning,
    "accelerate": by_accelerate,
    "loop": by_loop,
}


def train(name: str, arguments: argparse.Namespace, offloaded: bool) -> dict[str, Any]:
    """Train once; what was seen, with losses and weights on the host."""
    torchoffload.reset_stats()
    run = Run(arguments, offloaded)
    with contextlib.redirect_stdout(sys.stderr), Watch(run.model, run.device) as watch:
        TRAINERS[name](run)
    weights = {key: value.detach().cpu() for key, value in run.model.state_dict().items()}
    losses = [float(loss) for loss in run.losses]
    moved, report = torchoffload.stats().bytes_offloaded, torchoffload.report()
    steps = watch.steps
    del run, watch
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torchoffload.trim()
    return {"steps": steps, "losses": losses, "weights": weights, "moved_bytes": moved, "report": report}


def compare(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train plain and offloaded, and compare every bit."""
    plain, offloaded = (train(name, arguments, each) for each in (False, True))
    before, after = plain.pop("weights"), offloaded.pop("weights")
    same = plain["losses"] == offloaded["losses"] and before.keys() == after.keys()
    same = same and len(plain["losses"]) > 0 and all(torch.equal(before[key], after[key]) for key in before)
    return {"identical": same, "tensors": len(before), "plain": plain, "offloaded": offloaded}


def settled(run: dict[str, Any], what: str) -> float:
    """Median over the steps after the first few."""
    steps = run["steps"][SETTLED_AFTER:] or run["steps"][-1:]
    return statistics.median(step.get(what, 0) for step in steps)


def verdict(compared: dict[str, Any]) -> str:
    """Equal bits prove nothing where nothing moved."""
    if not compared["identical"]:
        return "DIFFERENT"
    return IDENTICAL if compared["offloaded"]["moved_bytes"] else "NOTHING MOVED"


def row_of(name: str, compared: dict[str, Any]) -> str:
    plain, offloaded = compared["plain"], compared["offloaded"]
    cells = [f"{name:14}", f"{verdict(compared):14}"]
    cells += [
        f"{settled(plain, what) / MIB:9.0f}{settled(offloaded, what) / MIB:8.0f}"
        for what in ("at_loss_bytes", "peak_bytes")
    ]
    cells.append(f"{settled(plain, 'seconds') * 1e3:9.0f}{settled(offloaded, 'seconds') * 1e3:8.0f}")
    return "".join(cells) + f"{offloaded['moved_bytes'] / MIB / len(offloaded['steps']):10.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Train a Llama in each trainer, without and with torchoffload.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--trainer", nargs="+", choices=tuple(TRAINERS), default=list(TRAINERS))
    parser.add_argument("--tier", choices=("host", "disk"), default="host", help="disk: on a CPU")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of each run")
    parser.add_argument("--workload", default=DEFAULT_WORKLOAD, help="as for train_step.py")
    parser.add_argument("--json", type=Path, default=None, help="where hardware, versions and raw numbers go")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        raise SystemExit("trainers.py: --steps is at least 1")
    try:
        arguments.workload = parse_workload(arguments.workload)
    except ValueError as error:
        raise SystemExit(f"trainers.py: {error}") from None
    if arguments.tier == "host" and not torch.cuda.is_available():
        raise SystemExit("trainers.py: there is no CUDA device; --tier disk trains on the CPU")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    results: dict[str, Any] = {}
    titles = f"{'':14}{'bits':14}{'MiB at the loss':>17}{'peak':>17}{'ms a step':>17}{'MiB moved':>10}"
    print(titles + "\n" + " " * 28 + f"{'plain':>9}{'ours':>8}" * 3, flush=True)
    for name in arguments.trainer:
        missing = [package for package in NEEDS[name] if importlib.util.find_spec(package) is None]
        if missing:
            results[name] = {"error": f"not installed: {', '.join(missing)}"}
            print(f"{name:14}{results[name]['error']}", flush=True)
            continue
        results[name] = compare(name, arguments)
        print(row_of(name, results[name]), flush=True)
        if arguments.json is not None:
            about = {"command": command_line(), "hardware": hardware(device_of(arguments)), "trainers": results}
            arguments.json.write_text(json.dumps(about, indent=1) + "\n")
    return int(any(verdict(each) != IDENTICAL for each in results.values() if "error" not in each))


if __name__ == "__main__":
    sys.exit(main())
