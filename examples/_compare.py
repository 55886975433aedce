"""What both examples share: train plain and offloaded, each in a process of its own, then compare bit for bit.

``main`` is the whole program. In the parent it starts this same script once for each run, reads what the two wrote,
prints the table and draws the picture. In a child (``--run``) it trains and writes its result to ``--result``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from _memory import RETURN_FREED_MEMORY, MemorySampler, PeakMemory
from _options import MIB, add_offload_options, device_of, positive
from _text import batches, standard_library_text

WARM_UP_STEP_COUNT = 2
TEXT_BYTES = 8 * MIB
PLAIN, OFFLOADED = "plain", "offloaded"


@dataclass(frozen=True)
class Task:
    """What an example trains, and how it asks for offloading."""

    model: torch.nn.Module
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (input, target) -> scalar
    offload: Callable[[], AbstractContextManager[Any]]  # called in the offloaded run only, before each forward


@dataclass(frozen=True)
class Run:
    """One run's outcome, as it crosses from the child's process to the parent's."""

    device: str
    step_s: list[float]
    peak_bytes: int
    losses: list[float]
    parameters: dict[str, torch.Tensor]
    course: list[tuple[float, int]]  # (seconds since the step began, bytes over the state before the first step)
    report: str

    @property
    def step_ms(self) -> float:
        """Median, without the warm-up and without the last step, which was sampled and so slowed down."""
        timed = self.step_s[WARM_UP_STEP_COUNT:-1] or self.step_s
        return 1000 * statistics.median(timed)


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
        "--out",
        type=Path,
        default=Path(sys.argv[0]).with_suffix(".png"),
        help="the picture of memory over one step (%(default)s)",
    )
    parser.add_argument("--report", action="store_true", help="print torchoffload.report() of the offloaded run")
    parser.add_argument("--run", choices=(PLAIN, OFFLOADED), help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    # For the tests: changes one bit of one parameter of the offloaded run, which the comparison has to find.
    parser.add_argument("--perturb", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(parser: argparse.ArgumentParser, make_task: Callable[[argparse.Namespace], Task]) -> int:
    """Run parent or child. The exit status is 0 only when the two runs' parameters are the same, bit for bit."""
    arguments = parser.parse_args()
    if arguments.run is None:
        return _compare(arguments)
    torch.save(vars(_train(arguments, make_task)), arguments.result)
    return 0


# The child: one training run.


def _train(arguments: argparse.Namespace, make_task: Callable[[argparse.Namespace], Task]) -> Run:
    import torchoffload

    device = device_of(arguments)
    torch.set_num_threads(arguments.threads)
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory first would cost time, and is for programs that read what they never wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.manual_seed(arguments.seed)
    task = make_task(arguments)
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=arguments.lr)
    data = batches(standard_library_text(TEXT_BYTES), arguments.batch, arguments.tokens, arguments.seed, device)
    _load_what_torch_loads_late(device)

    step_s, losses, course = [], [], []
    peak = PeakMemory(device)
    for step in tqdm(range(arguments.steps), desc=f"{arguments.run:>9}", unit="step", mininterval=1):
        inputs, targets = next(data)
        is_last = step == arguments.steps - 1
        sampler = MemorySampler(device) if is_last else None
        with sampler or contextlib.nullcontext():
            start = time.perf_counter()
            with task.offload() if arguments.run == OFFLOADED else contextlib.nullcontext():
                loss = task.loss(inputs, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())  # waits for the device: the step's time ends here
            step_s.append(time.perf_counter() - start)
        if sampler is not None:
            course = [(second, in_use - peak.state_bytes) for second, in_use in sampler.points]
        del loss
    peak_bytes = peak.read()

    parameters = {name: parameter.detach().cpu() for name, parameter in task.model.named_parameters()}
    if arguments.perturb and arguments.run == OFFLOADED:
        next(iter(parameters.values())).view(torch.uint8).view(-1)[0] ^= 1
    report = torchoffload.report() if arguments.run == OFFLOADED else ""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {arguments.threads} threads"
    return Run(name, step_s, peak_bytes, losses, parameters, course, report)


def _load_what_torch_loads_late(device: torch.device) -> None:
    """One step of a throw-away layer: the modules and pools that torch loads on first use are no step's memory."""
    layer = torch.nn.Linear(64, 64, device=device)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(64, 64, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


# The parent: two children, one table, one picture.


def _run_in_process(label: str, folder: Path) -> Run:
    result = folder / f"{label}.pt"
    environment = os.environ | RETURN_FREED_MEMORY
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to be deterministic
    # A thread that spins while it waits keeps its core from the spill file's threads, and from whoever else is there.
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    child = subprocess.run(
        [sys.executable, *sys.argv, "--run", label, "--result", str(result)], env=environment, check=False
    )
    if child.returncode != 0:
        raise SystemExit(f"the {label} run failed with exit status {child.returncode}")
    return Run(**torch.load(result, weights_only=True))


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
    with tempfile.TemporaryDirectory(prefix="torchoffload-example-") as folder:
        plain = _run_in_process(PLAIN, Path(folder))
        offloaded = _run_in_process(OFFLOADED, Path(folder))
    different = different_parameters(plain.parameters, offloaded.parameters)
    print(_table(plain, offloaded, different))
    if arguments.report:
        print(f"\n{offloaded.report}")
    try:
        _draw(plain, offloaded, arguments.out)
        print(f"memory over one step: {arguments.out}")
    except ImportError:
        print("no picture: matplotlib is not installed")
    return 1 if different else 0


def _table(plain: Run, offloaded: Run, different: list[str]) -> str:
    value_count = sum(parameter.numel() for parameter in plain.parameters.values())
    if different:
        verdict = f"NOT THE SAME: {len(different)} of {len(plain.parameters)} differ, the first is {different[0]}"
    else:
        verdict = f"identical: {len(plain.parameters)} parameters, {value_count:,} values, compared bit for bit"
    rows = [
        ("", PLAIN, OFFLOADED, ""),
        (
            "step time",
            f"{plain.step_ms:.0f} ms",
            f"{offloaded.step_ms:.0f} ms",
            _percent(offloaded.step_ms, plain.step_ms),
        ),
        (
            "peak memory",
            f"{plain.peak_bytes / MIB:.0f} MiB",
            f"{offloaded.peak_bytes / MIB:.0f} MiB",
            _percent(offloaded.peak_bytes, plain.peak_bytes),
        ),
        ("last loss", f"{plain.losses[-1]:.6f}", f"{offloaded.losses[-1]:.6f}", ""),
    ]
    lines = [f"{name:<12}{left:>14}{right:>14}   {note}".rstrip() for name, left, right, note in rows]
    heading = f"{len(plain.losses)} steps on {plain.device}; memory over the state before the first step"
    return "\n".join(["", heading, *lines, f"{'parameters':<12}  {verdict}"])


def _percent(value: float, reference: float) -> str:
    return f"{value / reference:.0%} of plain" if reference > 0 else ""


def _draw(plain: Run, offloaded: Run, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for label, run, color in ((PLAIN, plain, "tab:gray"), (OFFLOADED, offloaded, "tab:blue")):
        milliseconds = [1000 * second for second, _ in run.course]
        mebibytes = [in_use / MIB for _, in_use in run.course]
        axes.plot(milliseconds, mebibytes, label=label, color=color)
        axes.fill_between(milliseconds, mebibytes, color=color, alpha=0.15)
    axes.set(
        title=f"Memory over one training step, {plain.device}",
        xlabel="ms since the step began",
        ylabel="MiB over the state before the first step",
    )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
