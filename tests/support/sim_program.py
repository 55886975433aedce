"""sim_program.py: the calls of an engine at the seam, by hand, so that one can be left out or come too early."""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from simulated import RaceError, Simulation, simulated_device
from torchoffload import _C_testing

control = _C_testing.testing

NBYTES = 4096

PointTuple = tuple[int, int]  # stream, serial

# Blocks that no test freed, and memory of slots: held until the simulation has ended, so that a free is always one that
# the test meant, and a queued copy finds its slot.
holders: list[Any] = []


class HostMemory:
    """Memory for slots, as an arena would own it."""

    def __init__(self, nbytes: int = 8 * NBYTES) -> None:
        self._buffer = ctypes.create_string_buffer(nbytes)
        self.address = ctypes.addressof(self._buffer)
        self.nbytes = nbytes
        control.register_host_memory(self.address, nbytes)

    def slot(self, index: int) -> int:
        return self.address + index * NBYTES

    def bytes_at(self, index: int) -> bytes:
        return ctypes.string_at(self.slot(index), NBYTES)


def fill(address: int, value: int, nbytes: int = NBYTES) -> None:
    ctypes.memset(address, value, nbytes)


def read(address: int, nbytes: int = NBYTES) -> bytes:
    return ctypes.string_at(address, nbytes)


class Program:
    """The engine's calls for one record, each a method; every wait can be left out by name.

    The names of the waits: R2 "offload waits for compute", R3 "compute waits for offload", R5 "offload waits for
    guards", R6 "reload waits for compute" and "reload waits for offload", R7 "consumer waits for reload".
    """

    def __init__(self, missing: str = "", device: int = 0) -> None:
        self.seam = control.Seam(device)
        self.compute_stream = self.seam.current_stream
        self.offload_stream = self.seam.offload_stream
        self.reload_stream = self.seam.reload_stream
        self.missing = missing
        self.host = HostMemory()
        holders.append(self.host)
        self.guards: dict[int, list[PointTuple]] = {}
        self.sequence_number = 100
        control.set_sequence_number(self.sequence_number)

    def wait(self, name: str, waiter: int, point: PointTuple) -> None:
        if name != self.missing:
            self.seam.wait(waiter, point)

    def next_operator(self) -> None:
        self.sequence_number += 1
        control.set_sequence_number(self.sequence_number)

    def make_source(self, value: int = 7) -> Any:
        block = control.allocate(NBYTES)
        holders.append(block)
        fill(block.address, value)
        return block

    def pack(self, source: Any, stream: int | None = None) -> None:
        self.seam.saw_pack(
            source.address, NBYTES, self.compute_stream if stream is None else stream, self.sequence_number
        )

    def offload(self, slot: int = 0, value: int = 7) -> tuple[Any, PointTuple]:
        """A record's first half: a source, packed, its operator ended, its copy enqueued."""
        source = self.make_source(value)
        self.pack(source)
        self.next_operator()
        return source, self.copy_out(source, slot)

    def copy_out(self, source: Any, slot: int, packed_on: int | None = None) -> PointTuple:
        point = self.seam.record(self.compute_stream if packed_on is None else packed_on)
        self.wait("offload waits for compute", self.offload_stream, point)
        for guard in self.guards.pop(slot, []):
            self.wait("offload waits for guards", self.offload_stream, guard)
        self.seam.copy_out(self.host.slot(slot), source.address, NBYTES, self.offload_stream)
        return self.seam.record(self.offload_stream)

    def drop_source(self, source: Any, offloaded: PointTuple) -> None:
        self.wait("compute waits for offload", self.compute_stream, offloaded)
        source.free()

    def copy_in(self, slot: int, offloaded: PointTuple) -> tuple[Any, PointTuple]:
        buffer = self.seam.allocate(NBYTES, 64)
        holders.append(buffer)
        point = self.seam.record(self.compute_stream)
        self.wait("reload waits for compute", self.reload_stream, point)
        self.wait("reload waits for offload", self.reload_stream, offloaded)
        self.seam.copy_in(buffer.address, self.host.slot(slot), NBYTES, self.reload_stream)
        return buffer, self.seam.record(self.reload_stream)

    def unpack(self, buffer: Any, reloaded: PointTuple, consumer: int | None = None) -> bytes:
        stream = self.compute_stream if consumer is None else consumer
        self.wait("consumer waits for reload", stream, reloaded)
        self.seam.saw_unpack(buffer.address, NBYTES, stream)
        return read(buffer.address)

    def round_trip(self, slot: int = 0, value: int = 7) -> bytes:
        """A record's whole life: packed, moved out, dropped, brought back, consumed, its slot given back."""
        source, offloaded = self.offload(slot, value)
        self.drop_source(source, offloaded)
        buffer, reloaded = self.copy_in(slot, offloaded)
        contents = self.unpack(buffer, reloaded)
        buffer.free()
        self.guards[slot] = [offloaded, reloaded]
        return contents


def forget_programs() -> None:
    """Drop what Programs left, and go back to autograd's own sequence number."""
    control.set_sequence_number(None)
    holders.clear()


@contextlib.contextmanager
def simulated_program(mode: str, seed: int = 0) -> Iterator[Simulation]:
    """A simulation of two devices in which Programs run; what they left is dropped after it."""
    try:
        with simulated_device(mode=mode, seed=seed, devices=2) as simulation:
            yield simulation
    finally:
        forget_programs()


def race(earlier: str, later: str, how: str = "is not ordered before") -> str:
    """The message's pattern for two accesses, each "name @ stream"."""
    named = [f'"{access}" on {stream}' for access, stream in (text.split(" @ ") for text in (earlier, later))]
    return (f"^race: {named[0]} {how} {named[1]}$").replace("[", r"\[").replace("]", r"\]")


@contextlib.contextmanager
def expect_race(simulation: Simulation, earlier: str, later: str, how: str = "is not ordered before") -> Iterator[None]:
    with pytest.raises(RaceError, match=race(earlier, later, how)):
        yield
    simulation.clear_races()


def run_in_thread(function: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
