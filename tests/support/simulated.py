"""simulated.py: the simulated device for tests: CPU memory, streams that run when told, every access checked.

``with simulated_device(mode="late"):`` makes each CPU tensor made inside belong to a simulated device. A missing wait
raises :class:`RaceError`, at the call that found it, and again when the scope is left, if something swallowed it.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from torchoffload import _C_testing
from torchoffload._devices import Counts

_control = _C_testing.testing

MODES = ("late", "early", "seeded")

RaceError: type[RuntimeError] = _control.RaceError


@dataclass(frozen=True)
class SimulatedStream:
    """A compute_stream of a simulated device."""

    device: int
    stream: int

    def wait_stream(self, other: "SimulatedStream") -> None:
        """What runs here from now on comes after what was enqueued on `other` up to now."""
        _control.make_stream_wait_stream(self.stream, other.stream)


class Simulation:
    """The running simulation, as a test sees it."""

    def __init__(self, devices: int) -> None:
        self.devices = devices

    @property
    def races(self) -> list[str]:
        """Every race found so far, the first first; also those that raised."""
        return list(_control.races())

    def clear_races(self) -> None:
        """Forget the races: the test has seen what it wanted to see."""
        _control.clear_races()

    def check(self) -> None:
        """Raise RaceError if a race was found and not cleared."""
        if races := self.races:
            raise RaceError(races[0])

    def new_stream(self, device: int = 0) -> SimulatedStream:
        """Another compute_stream. Memory allocated on it comes from a pool of its own."""
        return SimulatedStream(device, _control.make_compute_stream(device))

    def external_stream(self, device: int = 0) -> SimulatedStream:
        """A compute_stream of the program's own, which it may destroy; as ``torch.cuda.ExternalStream``."""
        return SimulatedStream(device, _control.make_external_stream(device))

    def destroy(self, stream: SimulatedStream) -> None:
        """From here on every call that names the stream is reported, as a race is."""
        _control.destroy_stream(stream.stream)

    def current_stream(self, device: int = 0) -> SimulatedStream:
        """The stream on which this thread's operators run on `device`."""
        return SimulatedStream(device, _control.current_stream(device))

    @contextlib.contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        """Operators of this thread run on `stream`, and allocate on its device; as ``torch.cuda.stream``."""
        device = _control.current_device()
        before = _control.current_stream(stream.device)
        _control.set_current_stream(stream.stream)
        try:
            yield
        finally:
            _control.set_current_stream(before)
            _control.set_current_device(device)

    @contextlib.contextmanager
    def device(self, device: int) -> Iterator[None]:
        """Tensors of this thread are made on `device`; as ``torch.cuda.device``."""
        before = _control.current_device()
        _control.set_current_device(device)
        try:
            yield
        finally:
            _control.set_current_device(before)

    def device_index_of(self, tensor: torch.Tensor) -> int | None:
        """The device that a tensor's memory belongs to; None for memory from outside the simulation."""
        index: int | None = _control.device_index_of(tensor.untyped_storage().data_ptr())
        return index

    def fill(self, tensor: torch.Tensor, stream: SimulatedStream) -> None:
        """Count a write of all of `tensor` on `stream`, as a kernel there would make it."""
        _control.fill(tensor.data_ptr(), tensor.nbytes, stream.stream)

    def tell_no_origins(self) -> None:
        """From here on the allocator tells nothing of what it allocates, as CUDA's other ones."""
        _control.set_tells_origins(False)

    def allocated_bytes(self, device: int = 0) -> int:
        """Bytes in blocks in use, in multiples of 512."""
        return int(_control.allocated_bytes(device))

    def peak_bytes(self, device: int = 0) -> int:
        """The most that allocated_bytes() was since the simulation began."""
        return int(_control.peak_bytes(device))

    def take_peak_bytes(self, device: int = 0) -> int:
        """The most that allocated_bytes() was since this was last called."""
        return int(_control.take_peak_bytes(device))

    def queued_count(self) -> int:
        """Copies and waits that are enqueued and have not run."""
        return int(_control.queued_count())


class SimulationMeter:
    """The meter of a simulated device, for fit. Each look at the clock takes as long."""

    measures_memory = True

    def __init__(self, simulation: Simulation) -> None:
        self.device = torch.device("cpu")
        self._simulation = simulation
        self._now_s = 0.0

    def now(self) -> float:
        self._now_s += 1e-4
        return self._now_s

    def between_s(self, begin: float, end: float) -> float:
        return end - begin

    def take_peak(self) -> int:
        return self._simulation.take_peak_bytes()

    def counts(self) -> Counts:
        allocated_bytes = self._simulation.allocated_bytes()
        return Counts(allocated_bytes, allocated_bytes, 0, 0)

    def forget_reserved(self) -> None:
        pass

    def total_bytes(self) -> int:
        return 1 << 60

    def keep_host_ahead(self, operator_count: int) -> None:
        pass


@contextlib.contextmanager
def simulated_device(mode: str = "late", seed: int = 0, devices: int = 1) -> Iterator[Simulation]:
    """Run a simulation.

    Parameters
    ----------
    mode : str
        When copies run. "late": when a compute_stream or the host waits for them. "early": at their enqueueing.
        "seeded": at any later call, in a legal order that `seed` picks.
    seed : int
        For "seeded".
    devices : int
        How many devices there are. A thread begins on device 0.

    Raises
    ------
    RaceError
        On leaving, if a race was found and not cleared. An exception that is on its way out is left alone.
    """
    _control.start_simulation(mode, seed, devices)
    simulation = Simulation(devices)
    try:
        yield simulation
    except BaseException:
        _control.stop_simulation()
        raise
    _control.stop_simulation()
    simulation.check()


@contextlib.contextmanager
def mutant(name: str) -> Iterator[None]:
    """Leave out one numbered wait or check of the engine."""
    _control.set_mutant(name)
    try:
        yield
    finally:
        _control.set_mutant(None)


def mutant_names() -> list[str]:
    """All of them, in the order of mutant.h."""
    return list(_control.mutant_names())


@contextlib.contextmanager
def seam_log() -> Iterator[list[str]]:
    """Write down the seam calls made inside; the list is filled on leaving. Works on every device of the test build."""
    lines: list[str] = []
    _control.start_seam_log()
    try:
        yield lines
    finally:
        _control.stop_seam_log()
        lines.extend(_control.seam_log())
