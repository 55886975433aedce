"""Trains the same model in several ways, each in a process of its own, and puts time and memory side by side.

``main`` is the whole program. In the parent it starts this same script once for each variant, and prints the table. In
a child (``--variant``) it trains and writes what it measured to ``--result``. The first variant is what the others are
compared with: their losses and gradients must be the same, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import torchoffload
from _memory import RETURN_FREED_MEMORY, PeakMemory, memory_in_use_bytes
from _options import MIB, add_offload_options, device_of, positive
from _text import batches, standard_library_text

TEXT_BYTES = 2 * MIB


@dataclass(frozen=True)
class Variant:
    """One way to train: the loss, and the context around it."""

    model: torch.nn.Module
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (input, target) -> scalar
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext  # called before each forward


@dataclass(frozen=True)
class Outcome:
    """What a child measured. Memory is over the state before the first step, bytes moved are those of one step."""

    device: str
    step_ms: float
    at_loss_bytes: int
    peak_bytes: int
    moved_bytes: int
    digest: str
    report: str


def make_parser(description: str) -> argparse.ArgumentParser:
    """Make the options that the examples with variants have: the tier, and the shape of the GPT that they train."""
    parser = argparse.ArgumentParser(description=description)
    add_offload_options(parser)
    parser.add_argument("--steps", type=positive, default=3, help="optimizer steps of each variant (%(default)s)")
    parser.add_argument("--width", type=positive, default=128, help="features of a token (%(default)s)")
    parser.add_argument("--layers", type=positive, default=8, help="transformer blocks (%(default)s)")
    parser.add_argument("--heads", type=positive, default=4, help="attention heads of a block (%(default)s)")
    parser.add_argument("--batch", type=positive, default=16, help="sequences in a batch (%(default)s)")
    parser.add_argument("--tokens", type=positive, default=256, help="bytes in a sequence (%(default)s)")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)), help="CPU threads of torch")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="which of the ways, the first to compare with")
    parser.add_argument("--report", action="store_true", help="print torchoffload.report() of each variant")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser


def main(parser: argparse.ArgumentParser, names: list[str], make: Callable[[argparse.Namespace, str], Variant]) -> int:
    """Run parent or child. The exit status is 0 only when all variants gave the same bits."""
    arguments = parser.parse_args()
    if arguments.variant is not None:
        arguments.result.write_text(json.dumps(asdict(_train(arguments, make))))
        return 0
    unknown = sorted(set(arguments.variants or []) - set(names))
    if unknown:
        parser.error(f"--variants: no {', '.join(unknown)}; there are {', '.join(names)}")
    with tempfile.TemporaryDirectory() as folder:
        outcomes = {name: _run_in_process(name, Path(folder)) for name in arguments.variants or names}
    print(_table(outcomes, arguments))
    return int(len({outcome.digest for outcome in outcomes.values()}) > 1)


def _train(arguments: argparse.Namespace, make: Callable[[argparse.Namespace, str], Variant]) -> Outcome:
    device = device_of(arguments)
    torch.set_num_threads(arguments.threads)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.manual_seed(0)
    variant = make(arguments, arguments.variant)
    optimizer = torch.optim.SGD(variant.model.parameters(), lr=0.1)
    data = batches(standard_library_text(TEXT_BYTES), arguments.batch, arguments.tokens, 0, device)
    for parameter in variant.model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # there before memory is measured, like the weights

    digest, step_s, at_loss, moved = hashlib.sha256(), [], [], []
    peak = PeakMemory(device)
    for _ in range(arguments.steps):
        inputs, targets = next(data)
        torchoffload.reset_stats()
        start = time.perf_counter()
        with variant.context():
            loss = variant.loss(inputs, targets)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        at_loss.append(memory_in_use_bytes(device) - peak.state_bytes)
        loss.backward()
        optimizer.step()
        digest.update(str(loss.item()).encode())  # waits for the device: the step's time ends here
        step_s.append(time.perf_counter() - start)
        moved.append(torchoffload.stats().bytes_offloaded)
        optimizer.zero_grad(set_to_none=False)
        del loss
    peak_bytes = peak.read()
    for parameter in variant.model.parameters():
        digest.update(_bytes_of(parameter.detach().cpu().contiguous()))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {arguments.threads} threads"
    later = slice(1, None) if arguments.steps > 1 else slice(None)
    return Outcome(
        device=name,
        step_ms=1000 * statistics.median(step_s[later]),
        at_loss_bytes=int(statistics.median(at_loss[later])),
        peak_bytes=peak_bytes,
        moved_bytes=moved[-1],
        digest=digest.hexdigest(),
        report=torchoffload.report(),
    )


def _bytes_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous tensor of the CPU, also where NumPy is not installed."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _run_in_process(name: str, folder: Path) -> Outcome:
    result = folder / "result.json"
    environment = os.environ | RETURN_FREED_MEMORY
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to be deterministic
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    command = [sys.executable, *sys.argv, "--variant", name, "--result", str(result)]
    child = subprocess.run(command, env=environment, check=False)
    if child.returncode != 0:
        raise SystemExit(f"{name}: failed with exit status {child.returncode}")
    return Outcome(**json.loads(result.read_text()))


def _table(outcomes: dict[str, Outcome], arguments: argparse.Namespace) -> str:
    first = next(iter(outcomes.values()))
    width = max(len(name) for name in outcomes) + 2
    lines = [
        f"{arguments.steps} steps on {first.device}; memory over the state before the first step",
        f"{'':{width}}{'step':>10}{'at the loss':>14}{'peak':>12}{'moved':>12}   gradients",
    ]
    for name, outcome in outcomes.items():
        verdict = "identical" if outcome.digest == first.digest else "NOT THE SAME"
        lines.append(
            f"{name:{width}}{outcome.step_ms:>7.0f} ms{outcome.at_loss_bytes / MIB:>10.0f} MiB"
            f"{outcome.peak_bytes / MIB:>8.0f} MiB{outcome.moved_bytes / MIB:>8.0f} MiB   {verdict}"
        )
    if arguments.report:
        lines += [f"\n{name}\n{outcome.report}" for name, outcome in outcomes.items() if outcome.moved_bytes]
    return "\n".join(lines)
