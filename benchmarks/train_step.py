"""One training step, forward and backward, under each offloader: time, memory, and the same gradients or not.

    python benchmarks/train_step.py                                  # workloads A and B
    python benchmarks/train_step.py --workload C --offloader none torchoffload
    python benchmarks/train_step.py --workload A:layers=4,tokens=2048 --json result.json

Each offloader runs in a process of its own. That process first proves its gradients, then takes its times:

1. Two steps under ``torch.use_deterministic_algorithms(True)``. Stock ("none", always run, always first) must agree
   with itself, and writes the loss and every gradient to a file; each other offloader is compared with that file, bit
   for bit. PyTorch's flash attention sums in no fixed order outside this mode, so stock could not agree with itself.
2. Warm-up steps and timed steps in PyTorch's default mode, the one that people train in. The gradients are zeroed,
   and the device synchronised, between steps.

Memory is torch.cuda.memory_allocated() less weights and gradients: right after forward ("at loss"), and at the peak.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from hardware import hardware
from offloaders import OFFLOADERS, MakeContext
from saved_bytes import SavedBytes
from workloads import Workload, build_model, parse_workload, random_tokens

GIB = 1 << 30
VERIFIED_STEP_COUNT = 2
STOCK = "none"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Time and memory of one training step under each offloader, gradients compared bit for bit.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--workload",
        nargs="+",
        default=["A", "B"],
        help="A, B, C or D, each with changes if wanted: A:layers=4,tokens=2048 (see workloads.py)",
    )
    parser.add_argument("--offloader", nargs="+", choices=list(OFFLOADERS), default=list(OFFLOADERS))
    parser.add_argument("--warm-up", type=int, default=3, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=5, help="timed steps, of which the median is taken")
    parser.add_argument(
        "--tier", choices=("host", "disk"), default="host", help="torchoffload's tier; disk: on the CPU"
    )
    parser.add_argument("--offload-window-mib", type=float, default=None, help="torchoffload's option, in MiB")
    parser.add_argument("--reload-window-mib", type=float, default=None, help="torchoffload's option, in MiB")
    parser.add_argument("--json", type=Path, default=None, help="where hardware, versions and raw numbers go")
    parser.add_argument(
        "--scratch", type=Path, default=None, help="directory for stock's gradients; default: /dev/shm if they fit"
    )
    parser.add_argument("--run", choices=list(OFFLOADERS), help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser


def main() -> int:
    arguments = make_parser().parse_args()
    try:
        workloads = {text: parse_workload(text) for text in arguments.workload}
    except ValueError as error:
        raise SystemExit(f"train_step.py: {error}") from error
    if arguments.run is not None:
        _run_child(arguments, next(iter(workloads.values())))
        return 0
    return _run_parent(arguments, workloads)


# The child: one workload under one offloader.


class Trainer:
    """One model with its batch, and the step that is measured."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = build_model(workload, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        self.tokens = random_tokens(workload, device)
        self.state_bytes = self.allocated_bytes()  # weights, gradients, and the batch of token numbers

    def allocated_bytes(self) -> int:
        """Tell the allocator's bytes in use; 0 on a CPU, whose memory this benchmark does not measure."""
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def synchronize(self) -> None:
        """Wait on the host for all that was asked of the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def step(self, make_context: MakeContext) -> dict[str, Any]:
        """Run forward and backward into zeroed gradients, and measure."""
        self.model.zero_grad(set_to_none=False)
        self.synchronize()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        start = time.perf_counter()
        with make_context():
            loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        at_loss_bytes = self.allocated_bytes() - self.state_bytes
        loss.backward()
        self.synchronize()
        seconds = time.perf_counter() - start
        peak_bytes = torch.cuda.max_memory_allocated(self.device) - self.state_bytes if self.state_bytes else 0
        return {"ms": 1000 * seconds, "at_loss_bytes": at_loss_bytes, "peak_bytes": peak_bytes, "loss": loss.detach()}

    def outcome(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        """Collect what has to be the same: the loss and every gradient."""
        gradients = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        return {"loss": loss, **{name: gradient for name, gradient in gradients.items() if gradient is not None}}


def different_bits(outcome: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that are not the reference's, bit for bit."""
    if outcome.keys() != reference.keys():
        return sorted(outcome.keys() ^ reference.keys())

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().view(-1).view(torch.uint8)

    return [
        name for name, mine in outcome.items() if not torch.equal(bits(mine), bits(reference[name].to(mine.device)))
    ]


def _verify(trainer: Trainer, make_context: MakeContext, reference_path: Path, is_stock: bool) -> list[str]:
    """Names of the tensors that differ from stock's file, which stock writes first and then has to meet itself."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    different: set[str] = set()
    for step in range(VERIFIED_STEP_COUNT):
        outcome = trainer.outcome(trainer.step(make_context)["loss"])
        if is_stock and step == 0:
            torch.save(outcome, reference_path)
        else:
            different |= set(different_bits(outcome, torch.load(reference_path, mmap=True, map_location="cpu")))
    torch.use_deterministic_algorithms(False)
    return sorted(different)


def _offload_options(arguments: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {"tier": arguments.tier}
    if arguments.offload_window_mib is not None:
        options["offload_window_bytes"] = int(arguments.offload_window_mib * (1 << 20))
    if arguments.reload_window_mib is not None:
        options["reload_window_bytes"] = int(arguments.reload_window_mib * (1 << 20))
    return options


def _run_child(arguments: argparse.Namespace, workload: Workload) -> None:
    device = torch.device("cpu" if arguments.tier == "disk" else "cuda")
    trainer = Trainer(workload, device)
    is_stock = arguments.run == STOCK
    make_context = OFFLOADERS[arguments.run](trainer.model, _offload_options(arguments))
    different = _verify(trainer, make_context, arguments.result.with_name("stock.pt"), is_stock)

    steps = []
    label = f"{arguments.workload[0].partition(':')[0]} {arguments.run}"
    for number in tqdm(range(arguments.warm_up + arguments.steps), desc=f"{label:>16}", unit="step", mininterval=1):
        if arguments.run == "torchoffload" and number == arguments.warm_up:
            _reset_stats()
        step = trainer.step(make_context)
        step["loss"] = step["loss"].item()
        steps.append(step)

    result: dict[str, Any] = {
        "different": different,
        "steps": steps,
        "timed_step_count": arguments.steps,
        "state_bytes": trainer.state_bytes,
        "hardware": hardware(device),
    }
    if device.type == "cuda":
        result["reserved_bytes"] = torch.cuda.memory_reserved(device)
    if is_stock:
        saved = SavedBytes(trainer.model)
        trainer.step(saved.hooks)
        result["saved"] = {"unique_bytes": saved.unique, "summed_bytes": saved.summed}
        if device.type == "cuda":
            result["link_bytes_per_s"] = _link_rates(device)
    if arguments.run == "torchoffload":
        result |= _torchoffload_facts()
    arguments.result.write_text(json.dumps(result))


def _reset_stats() -> None:
    import torchoffload

    torchoffload.reset_stats()


def _torchoffload_facts() -> dict[str, Any]:
    """stats() since the warm-up's end, and the report's text."""
    import dataclasses

    import torchoffload

    return {"stats": dataclasses.asdict(torchoffload.stats()), "report": torchoffload.report()}


def _link_rates(device: torch.device) -> dict[str, float]:
    """Bytes a second of large copies through pinned memory, each way: the rate that no offloader can pass."""
    size_bytes, repeat_count = 256 << 20, 10
    pinned = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    rates = {}
    for name, target, source in (("out", pinned, on_device), ("in", on_device, pinned)):
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(repeat_count):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        rates[name] = size_bytes * repeat_count / (time.perf_counter() - start)
    return rates


# The parent: a process for each offloader, one table for each workload.


def _scratch_directory(arguments: argparse.Namespace) -> Path:
    """Where stock's gradients rest: in memory when at least 16 GiB are free there."""
    if arguments.scratch is not None:
        return arguments.scratch
    shared_memory = Path("/dev/shm")
    if shared_memory.is_dir() and shutil.disk_usage(shared_memory).free > 16 * GIB:
        return shared_memory
    return Path(tempfile.gettempdir())


def _run_parent(arguments: argparse.Namespace, workloads: dict[str, Workload]) -> int:
    order = [STOCK, *(name for name in arguments.offloader if name != STOCK)]
    results: dict[str, dict[str, Any]] = {}
    for text, workload in workloads.items():
        results[text] = {"workload": vars(workload), "offloaders": _run_workload(arguments, text, order)}
        print(_table(text, workload, results[text]["offloaders"]))
    if arguments.json is not None:
        command = shlex.join([Path(sys.executable).name, *sys.argv])
        arguments.json.write_text(json.dumps({"command": command, "results": results}, indent=1) + "\n")
    failed = any(run.get("different") != [] for result in results.values() for run in result["offloaders"].values())
    return 1 if failed else 0


def _run_workload(arguments: argparse.Namespace, text: str, order: list[str]) -> dict[str, Any]:
    runs: dict[str, Any] = {}
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ}  # what cuBLAS needs to be deterministic
    with tempfile.TemporaryDirectory(prefix="torchoffload-bench-", dir=_scratch_directory(arguments)) as folder:
        for name in order:
            result = Path(folder) / f"{name}.json"
            # The last --workload counts: the child gets this one alone.
            command = [*sys.argv, "--workload", text, "--run", name, "--result", str(result)]
            child = subprocess.run([sys.executable, *command], env=environment, check=False)
            runs[name] = json.loads(result.read_text()) if child.returncode == 0 else {"exit_status": child.returncode}
            if name == STOCK and runs[name].get("different") != []:
                print(f"{text}: stock failed or does not agree with itself; nothing can be compared", file=sys.stderr)
                break
            if steps := runs[name].get("steps"):
                runs[name]["median_ms"] = statistics.median(step["ms"] for step in steps[arguments.warm_up :])
    return runs


def _moved_bytes(run: dict[str, Any]) -> float | None:
    """Bytes offloaded in one timed step, by torchoffload's own count; None for the others, who keep none."""
    if "stats" not in run:
        return None
    return float(run["stats"]["bytes_offloaded"]) / run["timed_step_count"]


def _bound_ms(stock: dict[str, Any], at_loss_bytes: int) -> float | None:
    """Tell the least time of a step that holds this much at the loss: the link's, both ways, or stock's if longer."""
    if "link_bytes_per_s" not in stock:
        return None
    moved = max(0, stock["saved"]["unique_bytes"] - at_loss_bytes)
    link_s = sum(moved / rate for rate in stock["link_bytes_per_s"].values())
    return max(1000 * link_s, float(stock["median_ms"]))


def _table(text: str, workload: Workload, runs: dict[str, Any]) -> str:
    lines = [f"\n{text}: {workload}"]
    stock = runs[STOCK]
    if "saved" in stock:
        unique, summed = (stock["saved"][key] / GIB for key in ("unique_bytes", "summed_bytes"))
        lines.append(f"saved for backward: {unique:.1f} GiB unique, {summed:.1f} GiB summed")
    if "link_bytes_per_s" in stock:
        out, back = (stock["link_bytes_per_s"][way] / 1e9 for way in ("out", "in"))
        lines.append(f"link: {out:.1f} GB/s out, {back:.1f} GB/s in")
    lines.append(f"{'':14}{'ms/step':>9}{'of stock':>9}{'bound':>9}{'at loss':>10}{'peak':>10}{'moved':>7}  gradients")
    for name, run in runs.items():
        if "steps" not in run:
            lines.append(f"{name:14}failed with exit status {run['exit_status']}")
            continue
        last = run["steps"][-1]
        moved = _moved_bytes(run)
        bound = _bound_ms(stock, last["at_loss_bytes"])
        share = f"{moved / stock['saved']['unique_bytes']:.0%}" if moved is not None else ""
        verdict = "identical" if not run["different"] else f"DIFFERENT: {', '.join(run['different'][:3])}"
        lines.append(
            f"{name:14}{run['median_ms']:9.0f}{run['median_ms'] / stock['median_ms']:9.2f}"
            f"{f'{bound:.0f}' if bound is not None else '':>9}"
            f"{last['at_loss_bytes'] / GIB:6.1f} GiB{last['peak_bytes'] / GIB:6.1f} GiB{share:>7}  {verdict}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
