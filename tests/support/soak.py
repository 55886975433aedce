"""A long run of a small model that is never the same twice, or of short steps that each make something anew.

    python tests/support/soak.py --device disk --steps 10000
    python tests/support/soak.py --device disk --steps 20000 --churn directories

Each step draws its shapes, depth and context, and how its graph ends: by a backward inside or after the context, by a
backward twice, dropped, after an exception in forward or in backward, or as one of several micro-batches whose
backwards come in any order. Checked steps have the gradient of the same step without offloading, bit for bit.

Handles, records, slots, tapes and pinned or spilled capacity must be exactly what they were at step 100, and over the
last 80% of the run resident memory may grow by at most 8 MiB (device memory by nothing). Exit status 1 if not.

For memory to be comparable, malloc has one arena and gives blocks of 64 KiB and more back when they are freed; the
program starts itself again with MALLOC_ARENA_MAX=1 and MALLOC_MMAP_THRESHOLD_=65536, and calls malloc_trim(0) before
each measurement. The simulated device keeps what is freed in pools for as long as it runs: it gets a new simulation
each 100 steps.

With ``--churn`` (see churns.py) the memory that malloc has given out is compared, too, and from 10,000 steps on the
processor's time of a step: of each 100 steps those with the least of it, in the second fifth and in the last one. The
time may grow by a half, and the memory by 64 bytes for each thing that no step had before (``malloc_limit_bytes``) and
that came between the two, and by 128 KiB at all: a run on a busy machine has one or two jumps of 48 KiB, early or late,
however long it is. On CUDA the driver and PyTorch's allocator grow by themselves: ``--stock`` runs the same steps
without offloading and says by how much, which ``--stock-growth`` adds to the limit.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import os
import pathlib
import random
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

from churns import CHURNS, Churn

MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
PHASE_STEPS = 100
CHECKED_EVERY = 50
GROWTH_LIMIT_BYTES = 8 << 20
SLOWDOWN_LIMIT = 1.5
JUMPS_BYTES = 128 << 10
TIMED_STEPS = 10_000  # in shorter runs the machine's load changes the time of a step more than a leak would
CAPACITIES = ("pinned_bytes", "spill_bytes")  # a churn gives them back now and then


class PlantedErr(Exception):
    """Raised by a step, and caught by it."""


def restart_with_malloc_settings() -> None:
    if any(os.environ.get(name) != value for name, value in MALLOC.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | MALLOC)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=["disk", "simulated", "cuda"], default="disk")
    parser.add_argument("--churn", choices=CHURNS, help="what each step makes anew; default: the model that varies")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stock", action="store_true", help="with a churn: the same steps without offloading")
    parser.add_argument("--stock-growth", type=float, default=0.0, help="the malloc_growth of stock")
    parser.add_argument("--quiet", action="store_true", help="no progress, the result alone")
    options = parser.parse_args(arguments)
    if options.steps < 3 * PHASE_STEPS:
        parser.error(f"--steps must be at least {3 * PHASE_STEPS}: the first {PHASE_STEPS} are compared with the last")
    if options.churn and options.device not in CHURNS[options.churn].devices:
        parser.error(f"--churn {options.churn} is not for --device {options.device}")
    return options


class Soak:
    """The model, and the steps that train it."""

    def __init__(self, device: Any, seed: int) -> None:
        import torch

        self.torch, self.device, self.rng = torch, device, random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.weights = [
            torch.nn.Parameter(torch.randn(64, 64, generator=generator).div_(8).to(device.torch_device))
            for _ in range(6)
        ]
        self.shared = [device.context(), device.context(reload_window_bytes=0), device.context(max_fwd_stash_size=3)]
        self.waiting: list[Any] = []  # losses of micro-batches whose backward is still to come
        self.counts: dict[str, int] = {}
        self.differing = self.offloaded_bytes = 0
        self.simulation: Any = None

    def forward(self, rows: int, depth: int, *, raising: bool = False, failing: bool = False) -> Any:
        torch = self.torch
        x = torch.linspace(-1, 1, rows * 64, device=self.device.torch_device).reshape(rows, 64).requires_grad_()
        y = x
        for layer in range(depth):
            y = torch.nn.functional.gelu(y @ self.weights[layer % len(self.weights)])
            y = y + y.t().sigmoid().t() if layer % 2 else torch.nn.functional.layer_norm(y, (64,))
            if raising and layer == depth // 2:
                raise PlantedErr
        if failing:
            y.register_hook(self._fail)
        return (y * x).sum()

    @staticmethod
    def _fail(gradient: Any) -> None:
        raise PlantedErr

    def context(self) -> Any:
        drawn = self.rng.randrange(6)
        if drawn < len(self.shared):
            return self.shared[drawn]
        if drawn == 3:
            return self.device.context(offload_window_bytes=self.rng.choice([0, 20_000, 1 << 20]))
        if drawn == 4:
            return self.device.context(budget_bytes=200_000, on_full="keep")
        return self.device.context(min_offload_size=self.rng.choice([0, 5_000, 1 << 30]))

    def step(self, number: int) -> None:
        rng = self.rng
        rows, depth = rng.randrange(8, 160), rng.randrange(1, 9)
        kind = rng.choice(["after", "inside", "twice", "dropped", "raising", "failing", "micro-batch", "nested"])
        self.counts[kind] = self.counts.get(kind, 0) + 1
        with contextlib.suppress(PlantedErr):
            if kind == "micro-batch":
                with self.context():
                    self.waiting.append(self.forward(rows, depth))
                if len(self.waiting) > 4:
                    self.waiting.pop(rng.randrange(len(self.waiting))).backward()
            else:
                self._train(kind, rows, depth, self.context())
        for weight in self.weights:
            weight.grad = None
        if number % CHECKED_EVERY == 0:
            self._check(rows, depth)

    def _train(self, kind: str, rows: int, depth: int, context: Any) -> None:
        with context:
            loss = self.forward(rows, depth, raising=kind == "raising", failing=kind == "failing")
            if kind == "nested":
                with self.context():
                    loss = loss + self.forward(rows, depth)
            if kind == "inside":
                loss.backward()
        if kind == "twice":
            loss.backward(retain_graph=True)
        if kind not in ("inside", "dropped"):
            loss.backward()

    def _check(self, rows: int, depth: int) -> None:
        offloaded, stock = (
            self.torch.autograd.grad(self._loss_under(context, rows, depth), self.weights[:1])
            for context in (self.shared[0], contextlib.nullcontext())
        )
        self.differing += not self.torch.equal(offloaded[0], stock[0])

    def _loss_under(self, context: Any, rows: int, depth: int) -> Any:
        with context:
            return self.forward(rows, depth)

    def settle(self) -> None:
        """Ends the micro-batches, and waits for what is on its way."""
        while self.waiting:
            self.waiting.pop().backward()
        for weight in self.weights:
            weight.grad = None


def resident_bytes() -> int:
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm", encoding="ascii") as sizes:
        return int(sizes.read().split()[1]) * resource.getpagesize()


class Mallinfo2(ctypes.Structure):
    """What mallinfo2() returns."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


def malloc_bytes() -> int:
    """What malloc has given out."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = Mallinfo2
    info = library.mallinfo2()
    return int(info.uordblks) + int(info.hblkhd)


def measure(soak: Soak | Churn) -> dict[str, int]:
    """What is alive, exactly, and what is resident, now that no graph is."""
    import torchoffload
    from gradients import Live, settled

    soak.settle()
    settled(Live(0, 0, 0))
    stats = torchoffload.stats()
    held = {
        name: getattr(stats, name)
        for name in ("live_handles", "live_records", "live_slots", "live_tapes", "slot_bytes", "budget_bytes_used")
    }
    held["pinned_bytes"] = stats.pinned_bytes
    held["spill_bytes"] = spill_bytes(soak.device.directory)
    held["descriptors"] = len(os.listdir("/proc/self/fd"))
    held["threads"] = len(os.listdir("/proc/self/task"))
    if soak.device.name == "cuda":
        held["device_bytes"] = soak.torch.cuda.memory_allocated()
    gc.collect()
    return held | {"resident_bytes": resident_bytes()}


def spill_bytes(directory: pathlib.Path) -> int:
    """What the spill files in `directory` take up: they have no name, but this process has them open."""
    files = {}
    for descriptor in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(descriptor).startswith(str(directory)):
                status = os.stat(descriptor)
                files[status.st_ino] = status.st_blocks * 512
    return sum(files.values())


def scopes(device: Any, steps: int) -> Iterator[tuple[Any, range]]:
    for first in range(0, steps, PHASE_STEPS):
        yield device.scope(), range(first, min(first + PHASE_STEPS, steps))


def run(options: argparse.Namespace, directory: pathlib.Path) -> dict[str, Any]:
    import torch

    import torchoffload
    from devices import Device

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # a spent budget is part of the program
    device = Device("simulated-late" if options.device == "simulated" else options.device, directory)
    if options.stock:
        device.context = lambda **_options: contextlib.nullcontext()  # type: ignore[method-assign]
    make: type[Soak | Churn] = CHURNS[options.churn] if options.churn else Soak
    soak, measured, begin = make(device, options.seed), {}, time.monotonic()
    if device.name == "cuda" and isinstance(soak, Churn):
        soak.warm_up()
        torchoffload.reset_stats()
    for scope, numbers in scopes(device, options.steps):
        with scope as soak.simulation:
            begin_s = time.process_time()
            for number in numbers:
                soak.step(number)
            soak.settle()
            step_s = (time.process_time() - begin_s) / len(numbers)
            measured[numbers.stop] = measure(soak) | {"step_us": round(1e6 * step_s)}
            soak.offloaded_bytes += torchoffload.stats().bytes_offloaded
            torchoffload.reset_stats()
        measured[numbers.stop]["malloc_bytes"] = malloc_bytes()  # without the pools of the simulated device
        measured[numbers.stop]["new_things"] = soak.new_things(numbers.stop) if isinstance(soak, Churn) else 0
        if not options.quiet and (numbers.stop * 10) % options.steps < 10 * PHASE_STEPS:
            now = measured[numbers.stop]["resident_bytes"]
            print(f"step {numbers.stop}: {now / 2**20:.1f} MiB resident, {time.monotonic() - begin:.0f} s", flush=True)
    return judged(options, measured, soak, time.monotonic() - begin)


def leasts_of_fifths(measured: dict[int, Any], name: str, steps: int) -> list[dict[str, Any]]:
    """The phases with the least of it in the second fifth of the run and in the last: what pools hold varies."""
    return [
        min((each for step, each in measured.items() if low < step <= low + steps // 5), key=lambda each: each[name])
        for low in (steps // 5, steps - steps // 5)
    ]


def grown_capacity(measured: dict[int, Any], name: str, steps: int) -> list[int]:
    """The most of it before the last fifth of the run and the least in that, if this is more; else nothing."""
    before, behind = [], []
    for step, each in measured.items():
        (behind if step > steps - steps // 5 else before).append(each[name])
    return [max(before), min(behind)] if min(behind) > max(before) else []


def judged(options: argparse.Namespace, measured: dict[int, Any], soak: Soak | Churn, seconds: float) -> dict[str, Any]:
    first_step = min(step for step in measured if step >= options.steps // 5)
    early, last, fifth = measured[PHASE_STEPS], measured[max(measured)], measured[first_step]
    if options.churn:
        early = fifth
    leaks = {
        name: [early[name], last[name]]
        for name in early.keys() - {"resident_bytes", "malloc_bytes", "new_things", "step_us"}
        if not (options.churn and name in CAPACITIES) and early[name] != last[name]
    }
    malloc_growth, new_things = 0.0, 0
    growth_bytes = last["resident_bytes"] - fifth["resident_bytes"]
    if options.churn:
        leaks |= {name: found for name in CAPACITIES if (found := grown_capacity(measured, name, options.steps))}
        growth_bytes -= last["pinned_bytes"] - fifth["pinned_bytes"]
    if growth_bytes > GROWTH_LIMIT_BYTES:
        leaks["resident_bytes"] = [fifth["resident_bytes"], last["resident_bytes"]]
    if options.churn:
        before, behind = leasts_of_fifths(measured, "malloc_bytes", options.steps)
        malloc_bytes = [before["malloc_bytes"], behind["malloc_bytes"]]
        step_us = [each["step_us"] for each in leasts_of_fifths(measured, "step_us", options.steps)]
        new_things = max(1, behind["new_things"] - before["new_things"])
        malloc_growth = (malloc_bytes[1] - malloc_bytes[0]) / new_things
        limit = CHURNS[options.churn].malloc_limit_bytes + max(0.0, options.stock_growth)
        if malloc_growth > limit + JUMPS_BYTES / new_things:
            leaks["malloc_bytes"] = malloc_bytes
        if options.steps >= TIMED_STEPS and step_us[1] > SLOWDOWN_LIMIT * step_us[0]:
            leaks["step_us"] = step_us
    return {
        "device": options.device,
        "churn": options.churn,
        "steps": options.steps,
        "seconds": round(seconds, 1),
        "kinds": soak.counts,
        "offloaded_bytes": soak.offloaded_bytes,
        "differing": soak.differing,
        "at_100": early,
        "at_last": last,
        "resident_growth_of_last_80_percent_bytes": growth_bytes,
        "malloc": MALLOC,
        "malloc_growth": malloc_growth,
        "new_things": new_things,
        "leaks": leaks,
    }


def main() -> int:
    restart_with_malloc_settings()
    options = parse()
    os.environ.setdefault("TORCHOFFLOAD_TESTING", "1")
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        result = run(options, pathlib.Path(directory))
    print(json.dumps(result))
    return 1 if result["leaks"] or result["differing"] else 0


if __name__ == "__main__":
    sys.exit(main())
