"""What both examples share: train plain, offloaded and fitted, each in its own process, then compare bit for bit.

``main`` is the whole program. In the parent it starts this same script once for each run, reads what the three wrote,
prints the table and draws the picture. In a child (``--run``) it trains and writes its result to ``--result``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import torchoffload
from _memory import RETURN_FREED_MEMORY, MemorySampler, PeakMemory
from _options import MIB, add_offload_options, device_of, positive, tier_options
from _runs import FIT, OFFLOADED, PLAIN, Fit, Run, draw, table
from _text import batches, standard_library_text

TEXT_BYTES = 8 * MIB
FIT_SHARE = 0.5


@dataclass(frozen=True)
class Task:
    """What an example trains, and how it asks for offloading."""

    model: torch.nn.Module
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (input, target) -> scalar
    offload: Callable[[], AbstractContextManager[Any]]  # called in the offloaded run only, before each forward


def make_parser(description: str) -> argparse.ArgumentParser:
    """Make the options that both examples have. Each adds its model's shape."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=positive, default=30, help="optimizer steps of each run (%(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="AdamW's learning rate (%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="for the weights and for the order of the text (%(default)s)"
    )
    parser.add_argument(
        "--threads",
        type=positive,
        default=len(os.sched_getaffinity(0)),
        help="CPU threads of torch (here %(default)s)",
    )
    add_offload_options(parser)
    parser.add_argument(
        "--fit-memory-mib",
        type=float,
        default=None,
        help="what torchoffload.fit is given: on CUDA what PyTorch may reserve, on a CPU the weights, their gradients "
        f"and what blocks save (default: the weights, and {FIT_SHARE:g} of what the plain run took besides)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(sys.argv[0]).with_suffix(".png"),
        help="the picture of memory over one step, and of the times that fit predicts (%(default)s)",
    )
    parser.add_argument("--report", action="store_true", help="print the reports of the offloaded run and of fit")
    parser.add_argument("--run", choices=(PLAIN, OFFLOADED, FIT), help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    # For the tests: changes one bit of one parameter of this run, which the comparison has to find.
    parser.add_argument("--perturb", choices=(OFFLOADED, FIT), help=argparse.SUPPRESS)
    return parser


def main(parser: argparse.ArgumentParser, make_task: Callable[[argparse.Namespace], Task]) -> int:
    """Run parent or child. The exit status is 0 only when all runs' parameters are the same, bit for bit."""
    arguments = parser.parse_args()
    if arguments.run is None:
        return _compare(arguments)
    _train(arguments, make_task).save(arguments.result)
    return 0


# The child: one training run.


def _train(arguments: argparse.Namespace, make_task: Callable[[argparse.Namespace], Task]) -> Run:
    device = device_of(arguments)
    torch.set_num_threads(arguments.threads)
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory first would cost time, and is for programs that read what they never wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.manual_seed(arguments.seed)
    task = make_task(arguments)
    memory_bytes = int((arguments.fit_memory_mib or 0) * MIB)
    fitted: torchoffload.Fitted | None = None
    if arguments.run == FIT:
        fitted = torchoffload.fit(task.model, memory_bytes, on_unfit="warn", **tier_options(arguments))
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=arguments.lr)
    data = batches(standard_library_text(TEXT_BYTES), arguments.batch, arguments.tokens, arguments.seed, device)
    _load_what_torch_loads_late(device)

    step_s, losses, phases, course = [], [], [], []
    peak = PeakMemory(device)
    for step in _with_progress(arguments):
        inputs, targets = next(data)
        is_last = step == arguments.steps - 1
        sampler = MemorySampler(device) if is_last else None
        with sampler or contextlib.nullcontext():
            start = time.perf_counter()
            with task.offload() if arguments.run == OFFLOADED else contextlib.nullcontext():
                loss = task.loss(inputs, targets)
            phases.append("settled" if fitted is None else fitted.phase)  # a plan changes as the model is called
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())  # waits for the device: the step's time ends here
            step_s.append(time.perf_counter() - start)
        if sampler is not None:
            course = [(second, in_use - peak.state_bytes) for second, in_use in sampler.points]
        peak.note_step()
        del loss
    peak_bytes = peak.read()

    parameters = {name: parameter.detach().cpu() for name, parameter in task.model.named_parameters()}
    if arguments.perturb == arguments.run:
        next(iter(parameters.values())).view(torch.uint8).view(-1)[0] ^= 1
    weight_bytes = sum(parameter.nbytes for parameter in parameters.values())
    is_cuda = device.type == "cuda"
    return Run(
        device=torch.cuda.get_device_name(device) if is_cuda else f"CPU, {arguments.threads} threads",
        step_s=step_s,
        steady_from=_steady_from(phases),
        peak_bytes=peak_bytes,
        needed_bytes=torch.cuda.max_memory_reserved(device) if is_cuda else weight_bytes + peak_bytes,
        weight_bytes=weight_bytes,
        losses=losses,
        parameters=parameters,
        course=course,
        report=torchoffload.report() if fitted is None else fitted.report(),
        fit=None if fitted is None else _fit(fitted, memory_bytes),
    )


def _with_progress(arguments: argparse.Namespace) -> Iterable[int]:
    """The numbers of the steps, with a bar that shows how many are done where tqdm is installed."""
    steps = range(arguments.steps)
    try:
        from tqdm import tqdm
    except ImportError:
        return steps
    return tqdm(steps, desc=f"{arguments.run:>9}", unit="step", mininterval=1)


def _steady_from(phases: list[str]) -> int:
    """Return the number of the first step from which on fit neither measured nor tried anything."""
    changing = [step for step, phase in enumerate(phases) if phase in {"survey", "trials"}]
    return changing[-1] + 1 if changing else 0


def _fit(fitted: torchoffload.Fitted, memory_bytes: int) -> Fit:
    plan = fitted.plan
    has_measured = fitted.phase not in {"survey", "removed"}
    points = fitted.frontier(24) if has_measured else ()
    return Fit(
        memory_bytes=memory_bytes,
        phase=fitted.phase,
        frontier=[(point.memory_bytes, point.step_s) for point in points],
        plan=None if plan is None else asdict(plan),
    )


def _load_what_torch_loads_late(device: torch.device) -> None:
    """One step of a throw-away layer: the modules and pools that torch loads on first use are no step's memory."""
    layer = torch.nn.Linear(64, 64, device=device)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(64, 64, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


# The parent: three children, one table, one picture.


def _run_in_process(label: str, folder: Path, *options: str) -> Run:
    result = folder / f"{label}.pt"
    environment = os.environ | RETURN_FREED_MEMORY
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to be deterministic
    # A thread that spins while it waits keeps its core from the spill file's threads, and from whoever else is there.
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    # With it PyTorch reserves little more than is allocated; what it reserves is what fit is given.
    environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    command = [sys.executable, *sys.argv, *options, "--run", label, "--result", str(result)]
    child = subprocess.run(command, env=environment, check=False)
    if child.returncode != 0:
        raise SystemExit(f"the {label} run failed with exit status {child.returncode}")
    return Run.load(result)


def different_parameters(plain: dict[str, torch.Tensor], offloaded: dict[str, torch.Tensor]) -> list[str]:
    """Names of the parameters whose bits differ. Bits, not values: -0.0 is not 0.0 here, and NaN equals itself."""
    if plain.keys() != offloaded.keys():
        return sorted(plain.keys() ^ offloaded.keys())

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().view(-1).view(torch.uint8)

    return [
        name
        for name, parameter in plain.items()
        if parameter.shape != offloaded[name].shape
        or parameter.dtype != offloaded[name].dtype
        or not torch.equal(bits(parameter), bits(offloaded[name]))
    ]


def _compare(arguments: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="torchoffload-example-") as name:
        folder = Path(name)
        plain = _run_in_process(PLAIN, folder)
        runs = {PLAIN: plain, OFFLOADED: _run_in_process(OFFLOADED, folder)}
        memory_mib = arguments.fit_memory_mib
        if memory_mib is None:
            memory_mib = (plain.weight_bytes + FIT_SHARE * (plain.needed_bytes - plain.weight_bytes)) / MIB
        runs[FIT] = _run_in_process(FIT, folder, f"--fit-memory-mib={memory_mib}")
    different = {label: different_parameters(plain.parameters, run.parameters) for label, run in runs.items()}
    print(table(runs, different))
    if arguments.report:
        print("", runs[OFFLOADED].report, "", runs[FIT].report, sep="\n")
    try:
        draw(runs, arguments.out)
        print(f"memory over one step, and time against memory: {arguments.out}")
    except ImportError:
        print("no picture: matplotlib is not installed")
    return int(any(different.values()))
