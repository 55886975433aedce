"""devices.py: the devices that the suite runs on, each with a scope, a default context and its capabilities.

Every device has windows of its own, so that the suite sees least memory, tiny windows and defaults without running any
test more often.
"""

import contextlib
import os
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchoffload

REQUIRE_CUDA = os.environ.get("TORCHOFFLOAD_REQUIRE_CUDA") == "1"

# (offload_window_bytes, reload_window_bytes) by device name. An offload window of 0 drops each source at once, so that
# backward has to read what was moved; the defaults would leave every small tensor of a test where it is.
WINDOWS: dict[str, tuple[int | None, int | None]] = {
    "disk": (0, None),
    "simulated-late": (0, None),
    "simulated-early": (0, 0),
    "simulated-seeded": (6000, 6000),
    "privateuseone": (0, None),  # the simulated device as one of PyTorch's, by the generic backend
    "cuda": (0, None),
}
DEVICE_NAMES = tuple(WINDOWS)
SPILLED_NAME = "simulated-early"  # on which some suites let slots go on to a disk, soon
SPILL_MEMORY_BYTES = 1 << 14  # of host memory, before they do
NOT_SPILLED = {"tier", "disk_dir", "budget_bytes", "on_full"}  # options that say themselves where slots go


class Device:
    """One device under test.

    Parameters
    ----------
    name : str
        One of ``DEVICE_NAMES``.
    directory : pathlib.Path
        Where the disk tier may put its spill file.
    seed : int
        The legal order that "simulated-seeded" takes.
    spills : bool
        Its contexts have ``on_full="disk"`` and little host memory, unless other options exclude that.
    """

    def __init__(self, name: str, directory: pathlib.Path, seed: int = 0, *, spills: bool = False) -> None:
        self.name = name
        self.directory = directory
        self.seed = seed
        self.spills = spills
        self.torch_device = torch.device(name if name in ("cuda", "privateuseone") else "cpu")

    @property
    def is_simulated(self) -> bool:
        return self.name.startswith("simulated")

    @property
    def tier(self) -> str:
        return "disk" if self.name == "disk" else "host"

    @contextlib.contextmanager
    def scope(self, devices: int = 1) -> Iterator[Any]:
        """Tensors made in here belong to the device. Left, it has checked every access of the simulated device.

        Gives the Simulation, or None on the other devices.
        """
        if self.is_simulated:
            from simulated import simulated_device

            mode = self.name.removeprefix("simulated-")
            with simulated_device(mode=mode, seed=self.seed, devices=devices) as simulation:
                yield simulation
        elif self.name == "privateuseone":
            from private_device import private_devices

            with private_devices(seed=self.seed) as simulation:
                yield simulation
        else:
            yield None
            if self.name == "cuda":
                torch.cuda.synchronize()

    def context(self, **options: Any) -> torchoffload.OffloadActivations:
        """An OffloadActivations of this device, that learns nothing; `options` go before the device's own."""
        offload_window_bytes, reload_window_bytes = WINDOWS[self.name]
        chosen: dict[str, Any] = {"min_offload_size": 0, "tier": self.tier, "learn": False}
        if "max_fwd_stash_size" not in options:
            chosen["offload_window_bytes"] = offload_window_bytes
        chosen["reload_window_bytes"] = reload_window_bytes
        if self.spills and not options.keys() & NOT_SPILLED:
            chosen |= {"on_full": "disk", "budget_bytes": SPILL_MEMORY_BYTES, "disk_dir": str(self.directory)}
        if self.tier == "disk":
            chosen["disk_dir"] = str(self.directory)
        return torchoffload.OffloadActivations(**(chosen | options))


def private_device_names() -> list[str]:
    """The simulated device as one of PyTorch's, while it is simulated."""
    known = getattr(torch, "privateuseone", None)
    return ["privateuseone"] if known is not None and known.is_available() else []


def spill_everything(name: str, directory: pathlib.Path) -> None:
    """TORCHOFFLOAD_TEST_SPILLED=1 has all slots on CUDA go on to a disk at once. Needs the test build."""
    if name != "cuda" or os.environ.get("TORCHOFFLOAD_TEST_SPILLED") != "1":
        return
    from torchoffload._C_testing import testing

    testing.spill_everything(str(directory), memory_bytes=1 << 20)


def require_cuda() -> None:
    """Skip, or with TORCHOFFLOAD_REQUIRE_CUDA=1 fail, where torch sees no CUDA device."""
    if torch.cuda.is_available():
        return
    if REQUIRE_CUDA:
        pytest.fail("TORCHOFFLOAD_REQUIRE_CUDA=1, and torch sees no CUDA device")
    pytest.skip("no CUDA device")


def make_device(name: str, directory: pathlib.Path, test_name: str, *, spills: bool = False) -> Device:
    """The device `name`, or a skip where it cannot be had."""
    if name == "cuda":
        require_cuda()
    if name.startswith(("simulated", "privateuseone")) and os.environ.get("TORCHOFFLOAD_TESTING") != "1":
        pytest.skip("TORCHOFFLOAD_TESTING=0 was asked for: the simulated device is in the test build alone")
    if name == "privateuseone" and torch.cuda.is_available():
        pytest.skip("PyTorch has one accelerator at a time, and here it is CUDA")
    return Device(name, directory, seed=zlib.crc32(test_name.encode()), spills=spills)
