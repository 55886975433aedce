"""Run what the pages show against an installed wheel: ``python tools/try_docs.py dist/*.whl --python python3``.

In a fresh environment with torch and the wheel, and nothing else, not even a compiler in reach: the whole programs of
README.md and of docs/quick-start.md, ``python -m torchoffload.info``, and the examples of docs/gallery.md, each with
the command that the page has for it. What they print is compared with what the page shows. An example that needs
another package has to say so there; those packages are installed afterwards, and the example runs, too.
"""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import build_wheels
import try_wheels

ROOT = Path(__file__).resolve().parent.parent
# A whole program, and what a page shows of its report.
PROGRAM = re.compile(r"^```python\n(import torch\n.*?)^```", flags=re.MULTILINE | re.DOTALL)
REPORT = re.compile(r"^ {4}(torchoffload(?:, since|\.fit:) .*\n(?: {4}.*\n)+)", flags=re.MULTILINE)
# A command of the gallery and what it printed. The remark behind a command is not part of it.
EXAMPLE = re.compile(r"^ {4}((?:python|torchrun) [^\n]*?)(?: +#[^\n]*)?\n\n```\n(.*?)^```", re.MULTILINE | re.DOTALL)
OF_A_GPU = "NVIDIA"
# What an example takes besides torch.
NEEDS = {
    "fsdp2.py": ("numpy",),
    "pipeline.py": ("numpy",),
    "memory_over_a_step.py": ("matplotlib",),
    "hf_trainer.py": ("transformers", "accelerate"),
    "trl_sft_lora.py": ("trl", "peft", "transformers", "accelerate", "datasets"),
    "long_context.py": ("transformers",),
    "train_llama.py": ("transformers",),
}
PINNED = ("requirements-integrations.txt", "requirements-build.txt")
PIN = re.compile(r"^(?!torch==)[\w.-]+==\S+", flags=re.MULTILINE)
# How a process ends now and then after FSDP2 over gloo, without torchoffload too. All has been printed by then.
ABORT_AT_EXIT = "terminate called without an active exception"
TRIES = 4

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
# Rows of a report that depend on when copies end; what `fit` chose, which depends on how long blocks take; and the loss
# on the sources of Python's own library, which each release of Python has others of.
OF_A_PLAN = ("  predicted: ", "  measured: ", "  of it ", "  with nothing moved or computed again: ")
DIFFERS = ("  reloaded", "  waits", "  windows", "  last", "      ", "fit  ", "last loss  ", *OF_A_PLAN)
REPORT_ROW = re.compile(r"  [a-z]")
TIMES = re.compile(r" ?(ms|s|%|threads?)\b|%")
LOSS_DECIMALS = 4
NEAR_LOSS = 1e-3
NEAR_REST = 0.4
NEAR_COUNT = 16  # MiB, or what else is counted


def near(shown: str, printed: str) -> bool:
    """Whether two numbers are alike: losses but for how a CPU rounds, bytes but for what the process holds besides."""
    ours, theirs = (float(text.replace(",", "")) for text in (shown, printed))
    if len(shown.partition(".")[2]) >= LOSS_DECIMALS:
        return abs(ours - theirs) <= NEAR_LOSS * abs(ours)
    return abs(ours - theirs) <= max(NEAR_REST * abs(ours), NEAR_COUNT)


def alike(shown: str, printed: str) -> bool:
    """Whether a line of a page and a printed one say the same: the words, and the numbers that are not times.

    The rows of a report have to be equal, apart from those that differ from run to run.
    """
    for start in DIFFERS:
        if shown.startswith(start):
            return printed.startswith(start)
    if REPORT_ROW.match(shown):
        return shown == printed
    if NUMBER.sub("#", shown).split() != NUMBER.sub("#", printed).split():
        return False
    pairs = zip(NUMBER.finditer(shown), NUMBER.finditer(printed), strict=True)
    return all(TIMES.match(shown, ours.end()) or near(ours[0], theirs[0]) for ours, theirs in pairs)


def not_printed(shown: str, printed: str) -> list[str]:
    """The lines of a page that have no counterpart, in their order, in what was printed. More may be printed."""
    missing, rest = [], printed.splitlines()
    for line in shown.splitlines():
        found = next((index for index, other in enumerate(rest) if alike(line, other)), None)
        if found is None:
            missing.append(line)
        else:
            rest = rest[found + 1 :]
    return missing


def programs() -> list[tuple[str, str, str]]:
    """Of each page with a whole program: its name, the program, and the report that it shows."""
    found = []
    for name in ("README.md", "docs/quick-start.md"):
        page = (ROOT / name).read_text(encoding="utf-8")
        (program,) = PROGRAM.findall(page)
        (report,) = REPORT.findall(page)
        found.append((name, program, re.sub("^ {4}", "", report, flags=re.MULTILINE)))
    return found


def examples() -> list[tuple[str, str]]:
    """The commands of the gallery that take no GPU, and what each of them printed."""
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    return [(command, shown) for command, shown in EXAMPLE.findall(page) if OF_A_GPU not in shown]


def script_of(command: str) -> str:
    """The name of the example that a command runs."""
    return next(Path(word).name for word in shlex.split(command) if word.startswith("examples/"))


class Environment:
    """A fresh environment in a folder of its own, with a copy of the examples, and what went wrong in it."""

    def __init__(self, folder: Path, python: str) -> None:
        self.folder = folder
        self.wrong: list[str] = []
        try_wheels.run(python, "-m", "venv", folder / "venv", cwd=folder)
        shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("*.png", "__pycache__"))
        (folder / "docs").mkdir()

    def install(self, *what: str | Path) -> None:
        """Run pip install."""
        pip = (self.folder / "venv" / "bin" / "python", "-m", "pip", "--disable-pip-version-check")
        try_wheels.run(*pip, "install", "--quiet", "--no-compile", *what, cwd=self.folder)

    def once(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command as somebody without a GPU does who has entered the environment."""
        path = str(self.folder / "venv" / "bin")
        variables = {
            "PATH": path,
            "HOME": str(self.folder),
            "TMPDIR": tempfile.gettempdir(),
            "CUDA_VISIBLE_DEVICES": "",
        }
        program = shutil.which(command[0], path=path)
        if program is None:
            sys.exit(f"there is no {command[0]} in {path}")
        return subprocess.run(
            [program, *command[1:]], check=False, cwd=self.folder, env=variables, capture_output=True, text=True
        )

    def check(self, name: str, command: list[str], shown: str) -> None:
        """Run a command and compare what it prints."""
        started = time.monotonic()
        for _ in range(TRIES):
            done = self.once(command)
            if not (done.returncode and ABORT_AT_EXIT in done.stderr and "identical" in done.stdout):
                break
        missing = not_printed(shown, done.stdout)
        good = done.returncode == 0 and not missing
        print(f"=== {name}: {'as shown' if good else 'NOT AS SHOWN'}, {time.monotonic() - started:.0f} s", flush=True)
        if not good:
            self.wrong.append(name)
            print(f"exit status {done.returncode}; not printed:", *missing, "printed:", sep="\n")
            print(done.stdout, done.stderr, sep="\n", flush=True)

    def check_needs(self, name: str, command: list[str], packages: tuple[str, ...]) -> None:
        """Run a command without the packages that it needs: it has to name one."""
        done = self.once(command)
        said = [
            line for line in done.stderr.splitlines() if " needs " in line and any(map(line.__contains__, packages))
        ]
        if done.returncode != 0 and said:
            print(f"=== {name}: {said[0]}", flush=True)
        else:
            self.wrong.append(name)
            print(f"=== {name}: DOES NOT SAY WHAT IT NEEDS", done.stderr, sep="\n", flush=True)


def try_docs(environment: Environment, wheel: Path, torch: str, *, torch_alone: bool) -> None:
    """Install torch and the wheel, and run everything."""
    environment.install(f"torch=={torch}")
    environment.install("--no-index", wheel.resolve())
    environment.check("torchoffload.info", ["python", "-m", "torchoffload.info"], "versions:\n")
    for name, program, report in programs():
        environment.check(name, ["python", "-c", program], report)
    with_more = [(command, shown) for command, shown in examples() if script_of(command) in NEEDS]
    for command, shown in examples():
        if (command, shown) not in with_more:
            environment.check(command, shlex.split(command), shown)
    for command, _ in with_more:
        environment.check_needs(command, shlex.split(command), NEEDS[script_of(command)])
    if torch_alone:
        return
    pins = [pin for name in PINNED for pin in PIN.findall((ROOT / name).read_text(encoding="utf-8"))]
    constraints = environment.folder / "constraints.txt"
    constraints.write_text("\n".join(dict.fromkeys(pins)) + "\n", encoding="utf-8")
    packages = {package for each in NEEDS.values() for package in each}
    environment.install("--constraint", constraints, *sorted(packages))
    for command, shown in with_more:
        environment.check(command, shlex.split(command), shown)


def main() -> None:
    """Command line."""
    pinned = re.search(r"^torch==(\S+)", (ROOT / "requirements-build.txt").read_text(encoding="utf-8"), re.MULTILINE)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="+", type=Path, help="the one for that Python is taken")
    parser.add_argument("--python", default="python3", help="an interpreter (%(default)s)")
    parser.add_argument("--torch", default=pinned[1] if pinned else None, help="its version (%(default)s)")
    parser.add_argument("--torch-alone", action="store_true", help="leave out what needs more packages")
    arguments = parser.parse_args()
    version = build_wheels.version_of(arguments.python)
    wheel = next((each for each in arguments.wheels if try_wheels.python_version(each) == version), None)
    if wheel is None:
        sys.exit(f"no wheel for Python {version} among {', '.join(map(str, arguments.wheels))}")
    with tempfile.TemporaryDirectory(prefix="try-docs-") as scratch:
        environment = Environment(Path(scratch), arguments.python)
        try_docs(environment, wheel, arguments.torch, torch_alone=arguments.torch_alone)
    if environment.wrong:
        sys.exit(f"not as the pages say: {'; '.join(environment.wrong)}")


if __name__ == "__main__":
    main()
