"""fuzz_programs.py: runs random autograd programs stock and offloaded, many at once, and reproduces one that failed.

    python tests/support/fuzz_programs.py --device disk simulated --programs 20000 --jobs 2
    python tests/support/fuzz_programs.py --device disk --seed 123 --shrink

Exits with 1 where any program came out otherwise than stock, leaked, crashed or hung, or was not the same twice without
offloading. Each job is a process of its own, so that a crash costs one program and names it. The first failures are cut
down, and printed as scripts that run them again. docs/testing.md says more.
"""

import argparse
import contextlib
import faulthandler
import gc
import json
import os
import pathlib
import platform
import queue
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

os.environ.setdefault("TORCHOFFLOAD_TESTING", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the deterministic choice

import torch
import torch._dynamo
import tqdm

from devices import DEVICE_NAMES, SPILLED_NAME, Device, spill_everything
from programs.generator import OPERATOR_NAMES, generate
from programs.program import Program
from programs.script import as_script
from programs.shrink import shrink
from programs.verdict import Kind, Verdict, judge, prepare_process, total

SIMULATED = [name for name in DEVICE_NAMES if name.startswith("simulated")]
PROGRAM_TIMEOUT_S = 120
SHRINK_TIMEOUT_S = 300
SHRUNK_FAILURES = 3


def device_names(name: str, seed: int) -> str:
    """The device that a program of this seed runs on: "simulated" is each of its modes in turn."""
    return SIMULATED[seed % len(SIMULATED)] if name == "simulated" else name


class Judge:
    """Judges programs in this process."""

    def __init__(self, mutant: str | None = None) -> None:
        prepare_process()
        self._mutant = mutant
        faulthandler.enable()
        self._directory = tempfile.TemporaryDirectory(prefix="programs-")
        gc.collect()
        gc.freeze()  # what imports made lives until the end, and each program collects

    def __call__(self, program: Program, device_name: str) -> Verdict:
        directory = pathlib.Path(self._directory.name)
        spill_everything(device_name, directory)
        device = Device(device_name, directory, spills=device_name == SPILLED_NAME)
        faulthandler.dump_traceback_later(PROGRAM_TIMEOUT_S, exit=True)
        try:
            if self._mutant:
                from simulated import mutant

                with mutant(self._mutant):
                    return judge(program, device)
            return judge(program, device)
        finally:
            faulthandler.cancel_dump_traceback_later()


def work(tasks: str, mutant: str | None) -> None:
    """A job: each line of `tasks` is a device and a seed; a line before each program and one with its verdict."""
    judged = Judge(mutant)
    for line in tasks.splitlines():
        device_name, seed = line.split()
        print(json.dumps({"begins": line}), flush=True)
        print(json.dumps(judged(generate(int(seed)), device_name).as_dict()), flush=True)


class Jobs:
    """Processes that share the tasks out, each in slices, so that none of them is left with the slow ones."""

    def __init__(self, tasks: list[tuple[str, int]], count: int, slice_length: int, mutant: str | None) -> None:
        self._command = [sys.executable, __file__, "--worker", *(["--mutant", mutant] if mutant else [])]
        self._slices: queue.Queue[list[tuple[str, int]]] = queue.Queue()
        for first in range(0, len(tasks), slice_length):
            self._slices.put(tasks[first : first + slice_length])
        self.verdicts: queue.Queue[Verdict | None] = queue.Queue()
        self._running: set[subprocess.Popen[str]] = set()
        self._has_ended = False
        for _ in range(count):
            threading.Thread(target=self._run, daemon=True).start()

    def end(self) -> None:
        """What still runs is ended, and nothing is begun."""
        self._has_ended = True
        for process in list(self._running):
            process.kill()

    def _run(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                left = self._slices.get_nowait()
                while left and not self._has_ended:
                    left = self._process(left)
        self.verdicts.put(None)

    def _process(self, tasks: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Runs the tasks in one process; returns those that are left because one of them brought it down."""
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
            self._running.add(process)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("".join(f"{device} {seed}\n" for device, seed in tasks))
            process.stdin.close()
            running, done = -1, 0
            for line in process.stdout:
                row = json.loads(line)
                if "begins" in row:
                    running += 1
                else:
                    self.verdicts.put(Verdict(**row))
                    done += 1
            code = process.wait()
            self._running.discard(process)
            if code == 0 and done == len(tasks):
                return []
            errors.seek(0)
            device, seed = tasks[max(running, 0)]
            text = f"the process ended with {code}\n{errors.read()[-2000:]}"
        self.verdicts.put(Verdict(seed, device, Kind.CRASHES, text))
        return tasks[max(running, 0) + 1 :]


def fuzz(options: argparse.Namespace) -> int:
    tasks = [
        (device_names(name, seed), seed)
        for seed in range(options.first, options.first + options.programs)
        for name in options.device
    ]
    jobs = Jobs(tasks, options.jobs, max(1, min(250, len(tasks) // (4 * options.jobs))), options.mutant)
    verdicts: list[Verdict] = []
    failures: list[Verdict] = []
    began, waiting = time.monotonic(), options.jobs
    with tqdm.tqdm(total=len(tasks), unit="program", disable=None, smoothing=0.02) as progress:
        while waiting:
            verdict = jobs.verdicts.get()
            if verdict is None:
                waiting -= 1
                continue
            verdicts.append(verdict)
            progress.update()
            if verdict.kind != Kind.SAME:
                failures.append(verdict)
                progress.write(f"{verdict.device} {verdict.seed} {verdict.kind}: {verdict.text}")
                if options.first_failure:
                    break
    jobs.end()
    report(verdicts, failures, time.monotonic() - began, options)
    return 1 if failures else 0


def summaries(verdicts: list[Verdict]) -> dict[str, dict[str, Any]]:
    """By device, and "all": what CI asserts and the command prints."""
    by_device: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_device.setdefault(verdict.device, []).append(verdict)
    return {name: total(some) for name, some in sorted(by_device.items())} | {"all": total(verdicts)}


def print_summary(name: str, summary: dict[str, Any]) -> None:
    never = sorted(OPERATOR_NAMES - summary["done"].keys())
    print(f"{name}: {summary['programs']} programs: {summary['kinds']}")
    print(f"  {summary['finished_fraction']:.0%} finish a backward; {summary['moved_fraction']:.1%} of "
          f"{summary['eligible_bytes']} eligible bytes moved")  # fmt: skip
    if summary["renamed"]:
        print(f"  {summary['renamed']} errors name another origin: see docs/testing.md")
    if summary["spared"]:
        print(f"  {summary['spared']} spare a tensor that autograd adds into otherwise: see docs/testing.md")
    if summary["left_by_any_hooks"]:
        print(f"  {summary['left_by_any_hooks']} leave handles, as with any hooks: see docs/testing.md")
    print(f"  {len(OPERATOR_NAMES) - len(never)} of {len(OPERATOR_NAMES)} operators ran; never: {never[:20]}")


def report(verdicts: list[Verdict], failures: list[Verdict], wall_s: float, options: argparse.Namespace) -> None:
    by_device = summaries(verdicts)
    for name, summary in by_device.items():
        if name != "all" or len(by_device) > 2:
            print_summary(name, summary)
    whole = by_device["all"]
    print("kept bytes:", whole["kept_bytes"])
    print("raised:", whole["raised"])
    print("the rarest that ran:", list(whole["done"].items())[-8:])
    print(f"{len(verdicts)} programs, {len(failures)} failures, {wall_s:.0f} s, torch {torch.__version__}")
    if options.out:
        document: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "python": platform.python_version(),
            "cpus": os.cpu_count(), "jobs": options.jobs, "wall_s": round(wall_s, 1), "first": options.first,
            "devices": by_device, "failures": [failure.as_dict() for failure in failures],
        }  # fmt: skip
        pathlib.Path(options.out).write_text(json.dumps(document, indent=1))
    for failure in failures:
        how = f"--device {failure.device} --seed {failure.seed} --shrink"
        print(f"{failure.kind}; reproduce: python tests/support/fuzz_programs.py {how}")
    for failure in failures[: options.shrunk]:
        print(f"\n{'-' * 40} {failure.device} {failure.seed}, cut down\n{shrunk_elsewhere(failure)}")


def shrunk_elsewhere(failure: Verdict) -> str:
    """The script of a failing program, cut down in a process of its own, or whole where that one ends badly."""
    command = [sys.executable, __file__, "--device", failure.device, "--seed", str(failure.seed), "--shrink"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SHRINK_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return as_script(generate(failure.seed), failure.device, failure.text)
    return done.stdout if done.returncode == 1 else as_script(generate(failure.seed), failure.device, failure.text)


def reproduce(options: argparse.Namespace) -> int:
    """One program, from its seed: judged, and printed as a script; on demand cut down first."""
    program, judged, worst = generate(options.seed), Judge(options.mutant), 0
    for name in options.device:
        device_name = device_names(name, program.seed)
        verdict, shown = judged(program, device_name), program
        if options.shrink and verdict.kind != Kind.SAME:
            shown = shrink(program, lambda p, n=device_name, v=verdict: judged(p, n).is_like(v))
            verdict = judged(shown, device_name)
        print(as_script(shown, device_name, f"{device_name} {program.seed}: {verdict.kind}\n{verdict.text}".rstrip()))
        worst |= verdict.kind != Kind.SAME
    return int(worst)


def run_again(program: Program, device_name: str) -> int:
    """What a printed script calls."""
    verdict = Judge()(program, device_name)
    print(f"{device_name} {program.seed}: {verdict.kind}\n{verdict.text}".rstrip())
    return int(verdict.kind != Kind.SAME)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", nargs="+", default=["disk", "simulated"], choices=[*DEVICE_NAMES, "simulated"])
    parser.add_argument("--programs", type=int, default=20000, help="how many, on each device")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    parser.add_argument("--out", help="a JSON file for the summary and all failures")
    parser.add_argument("--seed", type=int, help="run the one program of this seed, and print it")
    parser.add_argument("--shrink", action="store_true", help="with --seed: cut a failing program down")
    parser.add_argument("--shrunk", type=int, default=SHRUNK_FAILURES, help="so many failures are cut down at the end")
    parser.add_argument("--first-failure", action="store_true", help="end with the first failure")
    parser.add_argument("--mutant", help="leave out this wait or check of csrc/core/mutant.h: something should fail")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(sys.stdin.read(), options.mutant)
        return 0
    return reproduce(options) if options.seed is not None else fuzz(options)


if __name__ == "__main__":
    sys.exit(main())
