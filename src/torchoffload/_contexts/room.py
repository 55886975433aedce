"""``memory=``: how much of what is saved may stay on the device, found by what steps have taken so far."""

import threading
from pathlib import Path
from typing import Any, Protocol

import torch

from torchoffload._contexts.amounts import parse_memory
from torchoffload._contexts.options import OffloadOptions
from torchoffload._core import core
from torchoffload._pytorch.meter import meter_for
from torchoffload._warnings import warn_user

__all__ = ["Room", "room_for"]

_MARGIN = 0.04  # the part of the memory that is left for fragmentation
_STEPS = 3  # before what they took is looked at: the first two learn, and in the third one all is as it will be
_MOST_RAISES = 4
_UNKNOWN_BYTES = 1 << 62  # a fraction is of what there is once a context is entered
_WORTH = 0.01  # less than this part of the memory is not given out any more


class _Memory(Protocol):
    """The memory that ``memory=`` is about."""

    def total_bytes(self) -> int: ...
    def peak_bytes(self) -> int: ...
    def forget(self) -> None: ...
    def oom_count(self) -> int: ...


class _DeviceMemory:
    """What PyTorch's allocator has reserved on the current device: it grows only, until it is forgotten."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("memory= needs a CUDA device, whose allocator says what it has reserved; leave it out")
        self._meter = meter_for(torch.device("cuda", torch.cuda.current_device()))
        self.total_bytes = self._meter.total_bytes
        self.peak_bytes = self._meter.reserved_bytes
        self.forget = self._meter.forget_reserved
        self.oom_count = self._meter.oom_count


class _ProcessMemory:
    """The resident memory of this process, as Linux counts it."""

    def total_bytes(self) -> int:
        host = core.host_memory()
        return int(min(filter(None, (host["total"], host["limit"]))))

    def peak_bytes(self) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("torchoffload: /proc/self/status has no VmHWM, which memory= needs on a CPU")

    def forget(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def oom_count(self) -> int:
        return 0


class Room:
    """How many bytes of each tape stay on the device, so that a process keeps to an amount of memory.

    Steps begin with moving everything. What they have left of the memory is given out then: so many bytes of what is
    saved last stay. A step that takes more than it may has less from then on.

    Parameters
    ----------
    memory : int, float or str
        What the process may reserve, as for ``fit``.
    options : OffloadOptions
        The options of the contexts.

    Attributes
    ----------
    context : core.Context
        What keeps so much. It is shared by all contexts that have this room.
    nbytes : int
        The bytes that stay.
    """

    def __init__(self, memory: float | str, options: OffloadOptions) -> None:
        self._memory_bytes = parse_memory(memory, _UNKNOWN_BYTES)
        self._given = memory
        self._options = options
        self.context = core.Context(**options.for_core(), warn=warn_user)
        self.context.keep_last(0)
        self.nbytes = 0
        self._memory: _Memory | None = None
        self._steps = self._raises = self._ooms = 0
        self._lock = threading.Lock()

    def step_begins(self) -> None:
        """Take notice that a context is about to be entered, and change what stays if a step has shown what it takes.

        Does nothing while anything that was saved under these contexts is still to be used, or in a backward.
        """
        if torch._C._current_graph_task_id() != -1 or not self.context.is_idle():
            return
        with self._lock:
            memory = self._memory or self._begin()
            self._steps += 1
            peak_bytes, usable_bytes = memory.peak_bytes(), int(self._memory_bytes * (1 - _MARGIN))
            has_oom = memory.oom_count() > self._ooms
            if has_oom or peak_bytes > self._memory_bytes:
                if self.nbytes > 0:
                    beyond = max(peak_bytes - usable_bytes, int(self._memory_bytes * _MARGIN))
                    self._raises = _MOST_RAISES
                    self._keep(self.nbytes - beyond)
                elif self._steps == _STEPS:
                    warn_user(
                        f"torchoffload: memory={self._given!r} is less than a step takes in which everything moves: "
                        f"{peak_bytes / (1 << 30):.2f} GiB. Give more, or a smaller batch; torchoffload.fit() can also "
                        "compute again."
                    )
            elif self._steps > _STEPS and self._raises < _MOST_RAISES:
                left_bytes = usable_bytes - peak_bytes
                self._raises = self._raises + 1 if left_bytes > _WORTH * self._memory_bytes else _MOST_RAISES
                if self._raises < _MOST_RAISES:
                    self._keep(self.nbytes + left_bytes)

    def _begin(self) -> _Memory:
        memory: _Memory = _ProcessMemory() if self._options.tier == "disk" else _DeviceMemory()
        if isinstance(self._given, float):
            self._memory_bytes = parse_memory(self._given, memory.total_bytes())
        self._memory = memory
        memory.forget()
        return memory

    def _keep(self, nbytes: int) -> None:
        assert self._memory is not None
        self.nbytes = max(0, nbytes)
        self.context.keep_last(self.nbytes)
        self._steps, self._ooms = 0, self._memory.oom_count()
        self._memory.forget()


_rooms: dict[Any, Room] = {}


def room_for(memory: float | str, options: OffloadOptions) -> Room:
    """Return the room that all contexts of the same memory and the same options have, so that each step teaches."""
    parse_memory(memory, _UNKNOWN_BYTES)  # what is no amount may be nothing that has a place in a dict
    key = (memory, options)
    if key not in _rooms:
        _rooms[key] = Room(memory, options)
    return _rooms[key]
