"""scenario.py: what a scenario of a mutant is, the stage it plays on, and how its outcome is taken.

The outcome of a program is a text: the first race that the simulated device found, or else what the program returned,
or else the exception it ended with. A scenario says the text that it gives with every wait and check in place, and the
one that it gives with its own left out. Both are compared whole, so that a mutant is caught by the failure that was
named and by no other.
"""

import contextlib
import dataclasses
import gc
import pathlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

import torchoffload
from private_device import NAME as PRIVATE
from private_device import private_devices
from simulated import SimulatedStream, Simulation, mutant, simulated_device
from torchoffload import _C_testing

testing = _C_testing.testing

NUMEL = 256
NBYTES = 4 * NUMEL
AMPLE_BYTES = 1 << 20  # a window that no scenario fills

# (mode, seed). Races are found alike in all of them; which bytes a copy sees differs.
ORDERS = [("late", 0), ("early", 0), ("seeded", 1), ("seeded", 2), ("seeded", 3)]

PASSES = "passes"


def race(earlier: str, later: str, how: str = "is not ordered before") -> str:
    """The race between two accesses, each "name @ stream"."""
    named = [f'"{access}" on {stream}' for access, stream in (text.split(" @ ") for text in (earlier, later))]
    return f"race: {named[0]} {how} {named[1]}"


class Stage:
    """The stage of a program: a simulated device, also as one of PyTorch's, or the disk tier in its own directory."""

    def __init__(
        self, directory: pathlib.Path, simulation: Simulation | None = None, torch_device: str = "cpu"
    ) -> None:
        self.directory = directory
        self.torch_device = torch_device
        self._simulation = simulation

    @property
    def simulation(self) -> Simulation:
        assert self._simulation is not None, "this scenario plays on disk"
        return self._simulation

    @property
    def main(self) -> SimulatedStream:
        return self.simulation.current_stream()

    def context(self, **options: Any) -> torchoffload.OffloadActivations:
        """Moves what `leaf` makes, drops sources at once and loads nothing ahead, unless `options` say otherwise."""
        chosen: dict[str, Any] = {
            "min_offload_size": NBYTES,
            "offload_window_bytes": 0,
            "reload_window_bytes": 0,
            "learn": False,
        }
        if self._simulation is None:
            chosen |= {"tier": "disk", "disk_dir": str(self.directory)}
        return torchoffload.OffloadActivations(**(chosen | options))

    def leaf(self, first: float = 1.0) -> torch.Tensor:
        """NUMEL different values from `first` on."""
        return torch.linspace(first, first + 1.0, NUMEL).to(self.torch_device).requires_grad_()

    def next_operator(self) -> None:
        """Another operator saves a tensor: what was packed before it has been written, and is copied out now."""
        torch.ones(1, device=self.torch_device, requires_grad=True).sin()  # itself below the minimum

    def in_backward(self, look: Callable[[], None]) -> None:
        """Call ``look`` inside a backward: what it reads of saved tensors, that backward has asked for."""
        y = torch.ones((), requires_grad=True) * 1
        y.register_hook(lambda _gradient: look())
        y.backward()


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One mutant's program.

    Attributes
    ----------
    program : callable
        Takes a Stage. What it returns is its outcome, None for "passes".
    right, wrong : str
        Its outcomes with every wait and check in place, and with the mutant's left out.
    on_disk, on_private : bool
        It plays on the disk tier, or on the simulated device as one of PyTorch's by the generic backend, whose copies
        are late, and not on the simulated device in all its orders.
    """

    program: Callable[[Stage], str | None]
    right: str
    wrong: str
    on_disk: bool
    on_private: bool

    @property
    def orders(self) -> list[tuple[str, int]]:
        return ORDERS[:1] if self.on_disk or self.on_private else ORDERS


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    mutant_name: str, *, wrong: str, right: str = PASSES, on_disk: bool = False, on_private: bool = False
) -> Callable[[Callable[[Stage], str | None]], Callable[[Stage], str | None]]:
    """Name the decorated program as the scenario of `mutant_name`."""

    def add(program: Callable[[Stage], str | None]) -> Callable[[Stage], str | None]:
        assert mutant_name not in SCENARIOS, f"{mutant_name} has two scenarios"
        assert right != wrong, f"{mutant_name}: its scenario could not tell"
        SCENARIOS[mutant_name] = Scenario(program, right, wrong, on_disk, on_private)
        return program

    return add


def _ending(program: Callable[[Stage], str | None], stage: Stage) -> str:
    """Text only: an exception's traceback would keep the program's frames, and with them its graph."""
    try:
        return program(stage) or PASSES
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def play_on_disk(program: Callable[[Stage], str | None], directory: pathlib.Path) -> str:
    try:
        return _ending(program, Stage(directory))
    finally:
        testing.clear_io_faults()


def play_simulated(
    program: Callable[[Stage], str | None], directory: pathlib.Path, mode: str, seed: int, *, on_private: bool = False
) -> str:
    with contextlib.ExitStack() as scope:
        if on_private:
            stage = Stage(directory, scope.enter_context(private_devices(mode=mode, seed=seed)), PRIVATE)
        else:
            stage = Stage(directory, scope.enter_context(simulated_device(mode=mode, seed=seed, devices=2)))
        simulation = stage.simulation
        outcome = _ending(program, stage)
        gc.collect()  # inside, so that the simulated device sees what is freed
        races = simulation.races
        simulation.clear_races()
    return races[0] if races else outcome


@contextlib.contextmanager
def from_scratch(mutant_name: str | None) -> Iterator[None]:
    """Nothing that earlier programs left is in use, and no slot is guarded; the engines themselves go on."""
    gc.collect()
    torchoffload.trim()
    torchoffload.reset_stats()
    with mutant(mutant_name) if mutant_name else contextlib.nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    gc.collect()


def outcome_of(
    played: Scenario, directory: pathlib.Path, order: tuple[str, int], *, mutant_name: str | None = None
) -> str:
    """The outcome of a scenario, once, with the mutant named, or none, left out."""
    with from_scratch(mutant_name):
        if played.on_disk:
            return play_on_disk(played.program, directory)
        return play_simulated(played.program, directory, *order, on_private=played.on_private)


@contextlib.contextmanager
def another_thread_inside(call: str, work: Callable[[], None]) -> Iterator[None]:
    """`work` runs on another thread in the middle of this thread's first such call."""
    this_thread = threading.get_ident()
    is_over = []

    def hook(name: str) -> None:
        if threading.get_ident() != this_thread or name != call or is_over:
            return
        is_over.append(True)
        other = threading.Thread(target=work)
        other.start()
        other.join()

    testing.set_seam_hook(hook)
    try:
        yield
    finally:
        testing.set_seam_hook(None)
