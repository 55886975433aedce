"""What the saved-tensor hooks cost the CPU: microseconds a saved tensor, each way, over autograd without any.

    python benchmarks/hooks.py                                   # disk tier, 100 to 10,000 saved tensors
    python benchmarks/hooks.py --device cuda --count 1000 100000
    python benchmarks/hooks.py --against build/before            # another build beside this one: see make site

A chain of small operators saves one tensor each, of one class:

    parameter   an nn.Parameter, kept          small   below min_offload_size, kept
    known       one tensor again and again:    moved   each of its own record
                joins the record it has

The cost of pack is forward's time, context entry and exit included, less that of the same chain without hooks; that of
unpack is backward's, release of the handles included. The yardstick are empty Python hooks: what PyTorch itself takes
to call ``saved_tensors_hooks(lambda x: x, lambda x: x)``. The three run interleaved, and the table has medians of the
paired differences. Flat is what costs the same at each count.

On the disk tier the clock is the calling thread's CPU time: waits for the disk are the disk's. On CUDA it is the
host's time to issue forward and backward, with the device idle at the start of each.

Each build is measured in processes of its own, as many as there are rounds, in turns. A process proves by stats() that
each class did what it is named for.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from hardware import command_line, hardware

CLASSES = ("parameter", "small", "known", "moved")
WAYS = ("pack", "unpack")
STOCK, EMPTY, OURS = "stock", "empty", "torchoffload"
LEAST_SAVES = 2000  # of one measurement: fewer are over too soon for a clock
OTHER = "against"

Build = dict[str, Any]
Times = dict[str, float]  # by way, microseconds a saved tensor


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="CPU cost of the saved-tensor hooks: microseconds a saved tensor, over autograd without hooks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--device", choices=("disk", "cuda"), default="disk", help="disk: CPU tensors, the disk tier")
    parser.add_argument("--count", nargs="+", type=int, default=[100, 1000, 10_000], help="saved tensors of one graph")
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=list(CLASSES))
    parser.add_argument("--tensor-bytes", type=int, default=4096, help="of each saved tensor")
    parser.add_argument("--rounds", type=int, default=3, help="processes for each build")
    parser.add_argument("--repeats", type=int, default=5, help="measurements in each process, after one to warm up")
    parser.add_argument(
        "--against",
        type=Path,
        default=None,
        help="a directory with another build of torchoffload, as PYTHONPATH takes it",
    )
    parser.add_argument("--disk-dir", type=Path, default=None, help="where the disk tier writes; default: tempfile's")
    parser.add_argument("--json", type=Path, default=None, help="where hardware, versions and raw numbers go")
    parser.add_argument("--measure", type=Path, default=None, help=argparse.SUPPRESS)  # a child: where its result goes
    return parser


def main() -> int:
    arguments = make_parser().parse_args()
    if min(*arguments.count, arguments.rounds, arguments.repeats, arguments.tensor_bytes // 4) < 1:
        raise SystemExit("hooks.py: --count, --rounds and --repeats are at least 1, --tensor-bytes at least 4")
    if arguments.measure is not None:
        arguments.measure.write_text(json.dumps(_measure(arguments)))
        return 0
    return _run_parent(arguments)


# The child: every class and count, with the build that PYTHONPATH names.


class Chain:
    """A chain of operators, each of which saves one tensor of the class."""

    def __init__(self, kind: str, count: int, arguments: argparse.Namespace) -> None:
        self.kind, self.count = kind, count
        self.device = torch.device("cpu" if arguments.device == "disk" else "cuda")
        size = arguments.tensor_bytes // 4
        self.x = torch.linspace(-1, 1, size, device=self.device).requires_grad_()
        ones = torch.ones(size, device=self.device)
        self.factor = torch.nn.Parameter(ones, requires_grad=False) if kind == "parameter" else ones
        self.gradient = torch.ones(size, device=self.device)
        self.options: dict[str, Any] = {"min_offload_size": 1 << 30 if kind == "small" else 0}
        self.options["tier"] = "disk" if arguments.device == "disk" else "host"
        if arguments.disk_dir is not None:
            self.options["disk_dir"] = arguments.disk_dir

    def forward(self) -> torch.Tensor:
        """Sigmoid saves its result, a new tensor each; a product saves its constant factor, the same each time."""
        y, factor = self.x, self.factor
        if self.kind in ("small", "moved"):
            for _ in range(self.count):
                y = y.sigmoid()
        else:
            for _ in range(self.count):
                y = y * factor
        return y

    def context(self, name: str) -> Any:
        """Make the hooks of one step."""
        if name == EMPTY:
            return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        if name == OURS:
            import torchoffload

            return torchoffload.OffloadActivations(**self.options, **_without_learning())
        return contextlib.nullcontext()

    def prove(self) -> None:
        """Fail unless what one step did is what the class is named for."""
        import torchoffload

        torchoffload.reset_stats()
        self.step(OURS)
        seen = torchoffload.stats()
        moved = {"moved": self.count, "known": 1}.get(self.kind, 0)
        kept = 0 if moved else self.count
        joined = self.count - 1 if self.kind == "known" else 0
        expected = (self.count, moved, kept, joined)
        kept_so = seen.records_kept.get(self.kind, 0)
        counted = (seen.handles, seen.records_offloaded, kept_so, seen.records_deduplicated)
        if counted != expected:
            raise SystemExit(f"hooks.py: {self.kind}: handles, moved, kept, joined: {counted}, not {expected}")

    def step(self, name: str) -> Times:
        """One forward and one backward under the named hooks, in microseconds a saved tensor."""
        clock = time.thread_time if self.device.type == "cpu" else time.perf_counter
        context = self.context(name)
        self.synchronize()
        start = clock()
        with context:
            y = self.forward()
        packed = clock() - start
        self.synchronize()
        start = clock()
        y.backward(self.gradient)
        del y
        unpacked = clock() - start
        self.synchronize()
        return {"pack": packed * 1e6 / self.count, "unpack": unpacked * 1e6 / self.count}

    def synchronize(self) -> None:
        """Wait on the host for all that was asked of the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def measure(self, name: str) -> Times:
        """Take the mean of as many steps as a clock can tell."""
        steps = [self.step(name) for _ in range(max(1, LEAST_SAVES // self.count))]
        return {way: statistics.fmean(step[way] for step in steps) for way in WAYS}


def _without_learning() -> dict[str, bool]:
    """Have each step do what its class is named for, not what the steps before it taught; older builds do not learn."""
    from torchoffload import OffloadActivations

    return {"learn": False} if "learn" in inspect.signature(OffloadActivations.__init__).parameters else {}


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    import torchoffload

    torch.set_num_threads(1)
    where = Path(torchoffload.__file__).resolve()
    if not where.is_relative_to(Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]).resolve()):
        raise SystemExit(f"hooks.py: torchoffload was imported from {where}")
    rows = []
    for kind in arguments.classes:
        for count in arguments.count:
            chain = Chain(kind, count, arguments)
            chain.prove()
            names = (STOCK, EMPTY, OURS)
            for name in names:
                chain.measure(name)
            gc.collect()
            gc.disable()
            taken = [{name: chain.measure(name) for name in names} for _ in range(arguments.repeats)]
            gc.enable()
            rows.append({"class": kind, "count": count, "times_us": taken})
    return {"torchoffload": where.parent.parent.name, "rows": rows, "hardware": hardware(chain.device)}


# The parent: processes in turns, and the table.


def _build_directory() -> Path:
    """Where the torchoffload at hand is imported from."""
    found = importlib.util.find_spec("torchoffload")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("hooks.py: torchoffload cannot be imported; put its directory into PYTHONPATH")
    return Path(next(iter(found.submodule_search_locations))).parent


def _run_parent(arguments: argparse.Namespace) -> int:
    builds = {OURS: _build_directory()}
    if arguments.against is not None:
        if not (arguments.against / "torchoffload").is_dir():
            raise SystemExit(f"hooks.py: there is no torchoffload in {arguments.against}")
        builds[OTHER] = arguments.against
    results: dict[str, list[Build]] = {name: [] for name in builds}
    progress = tqdm(total=arguments.rounds * len(builds), unit="process")
    with tempfile.TemporaryDirectory(prefix="torchoffload-bench-") as folder, progress:
        for number in range(arguments.rounds):
            order = list(builds.items())
            for name, path in order if number % 2 == 0 else reversed(order):
                progress.set_description(name)
                results[name].append(_run_child(path, Path(folder) / "result.json"))
                progress.update()
    medians = {name: _medians(runs) for name, runs in results.items()}
    print(_table(arguments, medians))
    if arguments.json is not None:
        text = json.dumps({"command": command_line(), "medians_us": medians, "processes": results}, indent=1)
        arguments.json.write_text(text + "\n")
    return 0


def _run_child(build: Path, result: Path) -> Build:
    left_out = ("TORCHOFFLOAD_TESTING", "TORCHOFFLOAD_DISABLE")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    path = filter(None, [str(build.resolve()), os.environ.get("PYTHONPATH")])
    environment["PYTHONPATH"] = os.pathsep.join(path)
    command = [sys.executable, *sys.argv, "--measure", str(result)]
    status = subprocess.run(command, env=environment, check=False).returncode
    if status != 0:
        raise SystemExit(f"hooks.py: the measurement of {build} ended with status {status}")
    measured: Build = json.loads(result.read_text())
    return measured


def _medians(runs: list[Build]) -> list[dict[str, Any]]:
    """For each class and count: stock's time, and what each kind of hooks takes above it, in each measurement."""
    rows = []
    for same in zip(*(run["rows"] for run in runs), strict=True):
        taken = [times for row in same for times in row["times_us"]]
        row: dict[str, Any] = {"class": same[0]["class"], "count": same[0]["count"]}
        for way in WAYS:
            stock = statistics.median(times[STOCK][way] for times in taken)
            above = {
                name: statistics.median(times[name][way] - times[STOCK][way] for times in taken)
                for name in (EMPTY, OURS)
            }
            row[way] = {STOCK: stock, **above}
        rows.append(row)
    return rows


def _table(arguments: argparse.Namespace, medians: dict[str, list[dict[str, Any]]]) -> str:
    other = medians.get(OTHER)
    columns = [STOCK, f"+{EMPTY}", "+ours", *(["+other", "ratio"] if other else [])]
    where = "the disk tier, CPU time" if arguments.device == "disk" else "CUDA, host time"
    lines = [
        f"us a saved tensor of {arguments.tensor_bytes} bytes, on {where}; + is above stock",
        f"{'':19}" + "".join(f"{way:>{8 * len(columns)}}" for way in WAYS),
        f"{'class':10}{'count':>9}" + "".join(f"{column:>8}" for _ in WAYS for column in columns),
    ]
    for index, row in enumerate(medians[OURS]):
        cells = []
        for way in WAYS:
            cells += [row[way][name] for name in (STOCK, EMPTY, OURS)]
            if other:
                before = other[index][way][OURS]
                cells += [before, row[way][OURS] / before if before > 0 else float("nan")]
        lines.append(f"{row['class']:10}{row['count']:9}" + "".join(f"{cell:8.2f}" for cell in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
