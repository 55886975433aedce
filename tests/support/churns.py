"""churns.py: programs of many short steps, each of which makes something anew that an earlier step had, too.

``soak.py --churn NAME`` runs one. Threads, directories, budgets, streams, contexts and shapes come and go. What is
held, and the time of a step, must not depend on how many there have been.
"""

import pathlib
import random
import shutil
import threading
from typing import Any


class Churn:
    """A step that saves and moves two tensors of 1 KiB, in a context that each kind makes in its own way.

    Parameters
    ----------
    device : Device
        Where the tensors are.
    seed : int
        Of what the steps draw.
    """

    devices: tuple[str, ...] = ("disk", "simulated", "cuda")
    malloc_limit_bytes = 64  # that each new thing may leave behind, beside what it leaves behind without offloading

    def __init__(self, device: Any, seed: int) -> None:
        import torch

        self.torch, self.device, self.rng = torch, device, random.Random(seed)
        self.simulation: Any = None  # of the present phase, on the simulated device
        self.counts: dict[str, int] = {}
        self.differing = self.offloaded_bytes = 0

    def step(self, number: int) -> None:
        self.train(self.device.context())

    def new_things(self, steps: int) -> int:
        """How many things the steps so far have made that no step had before: one each, if nothing else is said."""
        return steps

    def warm_up(self) -> None:
        """Fill the tables of a fixed size, which the first 1,000 steps or more would fill.

        On CUDA each stream keeps an event for each of its latest 1,024 points, and makes them as they are needed.
        """
        self.fill_rings(self.device.context())

    def fill_rings(self, context: Any) -> None:
        for _ in range(2):
            x = self.torch.linspace(-1, 1, 256, device=self.device.torch_device).requires_grad_()
            with context:
                y = x
                for _operator in range(1500):
                    y = y.sin()
            y.sum().backward()

    def train(self, context: Any, rows: int = 4) -> None:
        x = self.torch.linspace(-1, 1, rows * 64, device=self.device.torch_device).requires_grad_()
        with context:
            y = x.sin().exp()
            y = y.sum()
        y.backward()
        self.differing += not self.torch.equal(x.grad, x.detach().cos() * x.detach().sin().exp())

    def settle(self) -> None:
        """Nothing of a step is left when it ends."""


class Threads(Churn):
    """A thread for each step, as `nn.DataParallel` and some servers have them."""

    def __init__(self, device: Any, seed: int) -> None:
        super().__init__(device, seed)
        self.context = device.context()

    def step(self, number: int) -> None:
        thread = threading.Thread(target=self.train, args=(self.context,))
        thread.start()
        thread.join()


class Directories(Churn):
    """A temporary directory for each step, which the next step finds deleted."""

    devices = ("disk", "simulated")

    def options(self, directory: pathlib.Path) -> dict[str, Any]:
        if self.device.tier == "disk":
            return {"disk_dir": str(directory)}
        return {"disk_dir": str(directory), "on_full": "disk", "budget_bytes": 4096}

    def step(self, number: int) -> None:
        directory = self.device.directory / f"step-{number}"
        directory.mkdir()
        self.train(self.device.context(**self.options(directory)))
        shutil.rmtree(directory)


class DirectoriesInTurn(Directories):
    """More directories than are remembered, used in turn."""

    def step(self, number: int) -> None:
        directory = self.device.directory / f"turn-{number % 40}"
        directory.mkdir(exist_ok=True)
        self.train(self.device.context(**self.options(directory)))


class Budgets(Churn):
    """A budget for each step, such as what the system says that is free, of slots that go on to a disk."""

    devices = ("simulated", "cuda")

    def step(self, number: int) -> None:
        self.train(self.context(4096 + 512 * number))

    def warm_up(self) -> None:
        self.fill_rings(self.context(4 << 20))

    def context(self, budget_bytes: int) -> Any:
        directory = str(self.device.directory)
        return self.device.context(on_full="disk", disk_dir=directory, budget_bytes=budget_bytes)


class Streams(Churn):
    """A stream of the program's own for each step, which it destroys some steps later."""

    devices = ("simulated", "cuda")
    # A handle that no stream had before is in the tables of streams for good, with 350 bytes. PyTorch and the driver
    # keep 3,400 bytes and a segment of device memory for it.
    malloc_limit_bytes = 512

    def __init__(self, device: Any, seed: int) -> None:
        super().__init__(device, seed)
        self.living: list[Any] = []
        self.handles: set[int] = set()
        self.context = device.context()

    def new_things(self, steps: int) -> int:
        return len(self.handles) if self.device.name == "cuda" else steps

    def step(self, number: int) -> None:
        (self._on_cuda if self.device.name == "cuda" else self._simulated)()

    def _simulated(self) -> None:
        simulation = self.simulation
        stream = simulation.external_stream()
        stream.wait_stream(simulation.current_stream())
        with simulation.stream(stream):
            self.train(self.context)
        simulation.current_stream().wait_stream(stream)
        simulation.destroy(stream)

    def warm_up(self) -> None:
        super().warm_up()
        for number in range(400):  # as many streams as may have events of their own, and those that live at a time
            self.step(number)

    def _on_cuda(self) -> None:
        torch = self.torch
        handle = torch.zeros(1, dtype=torch.int64)
        torch.cuda.check_error(int(torch.cuda.cudart().cudaStreamCreate(handle.data_ptr())))
        stream = torch.cuda.ExternalStream(int(handle[0]))
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.train(self.context)
        torch.cuda.current_stream().wait_stream(stream)
        self.handles.add(int(handle[0]))
        self.living.append(int(handle[0]))  # for a while, so that the next ones have other handles
        if len(self.living) > 64:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaStreamDestroy(self.living.pop(0))


class Contexts(Churn):
    """A context for each step, with options of its own, that learns."""

    def step(self, number: int) -> None:
        window_bytes = self.rng.choice([0, 4096, 1 << 20])
        self.train(self.device.context(learn=True, offload_window_bytes=window_bytes, min_offload_size=number % 1024))


class Shapes(Churn):
    """Sizes that no step had before, in a context that learns."""

    def __init__(self, device: Any, seed: int) -> None:
        super().__init__(device, seed)
        self.context = device.context(learn=True)

    def step(self, number: int) -> None:
        self.train(self.context, rows=self.rng.randrange(1, 1000))

    def settle(self) -> None:
        if self.simulation is not None:  # the next phase has another one, and engines that the context would keep
            self.context = self.device.context(learn=True)


CHURNS: dict[str, type[Churn]] = {
    "threads": Threads,
    "directories": Directories,
    "directories-in-turn": DirectoriesInTurn,
    "budgets": Budgets,
    "streams": Streams,
    "contexts": Contexts,
    "shapes": Shapes,
}
