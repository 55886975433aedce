"""test_private_device.py: an accelerator that is not CUDA, as a user meets it: training, fit, report, and error texts.

It is the simulated device as one of PyTorch's, whose copies are late: a missing wait raises, or shows in the values.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchoffload
from devices import Device
from gradients import Run, assert_same_gradients, execute
from places import ROOT
from torchoffload import _devices
from torchoffload._devices import AcceleratorMeter, Counts, HostMeter, meter_for
from torchoffload._fit.machine.link import measure_link

pytestmark = pytest.mark.devices("privateuseone")

WIDTH, WORDS, LENGTH = 32, 24, 12
WITHOUT_STREAMS = f"""
import os, sys
os.environ["TORCHOFFLOAD_TESTING"] = "1"
sys.path.insert(0, {str(ROOT / "tests" / "support")!r})
import torch, private_device, torchoffload
from autograd_threads import await_autograd
private_device.register()
with private_device.private_devices():
    torchoffload._C_testing.testing.set_private_streams(False)
    x = torch.ones(64, 64, device="privateuseone", requires_grad=True)
    with torchoffload.OffloadActivations(min_offload_size=0):
        y = x.sin().exp()
    y.sum().backward()
    assert torch.equal(x.grad.cpu(), (x.sin().exp() * x.cos()).detach().cpu())
    await_autograd("privateuseone")
    print(torchoffload.report())
"""
MIB = 1 << 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Model(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Trainer:
    """A loop as trainers have it: gradients are accumulated and clipped, the rate warms up, evaluations lie between."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.model = run.module(Model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.5, total_iters=4)
        self._generator = torch.Generator().manual_seed(5)

    def loss(self) -> torch.Tensor:
        words = torch.randint(0, WORDS, (8, LENGTH + 1), generator=self._generator).to(self.run.device)
        return F.cross_entropy(self.model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())

    def train(self, steps: int, **options: Any) -> None:
        with_context = options.pop("with_context", True)
        for step in range(steps):
            self.optimizer.zero_grad()
            for _ in range(2):
                if with_context:
                    with self.run.offload(**options):
                        loss = self.loss()
                else:
                    loss = self.loss()
                loss.backward()
                self.run.check(loss=loss)
            self.run.check(norm=nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
            self.optimizer.step()
            self.schedule.step()
            if step % 2:
                self.evaluate()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.run.check(evaluation=self.loss())
        self.model.train()


def test_a_trainers_loop_ends_in_the_same_weights(device_under_test: Device):
    def program(run: Run) -> Any:
        trainer = Trainer(run)
        trainer.train(5)
        return list(trainer.model.parameters())

    assert_same_gradients(program, device=device_under_test)


def test_a_trainers_loop_that_learns_its_windows(device_under_test: Device):
    def program(run: Run) -> Any:
        trainer = Trainer(run)
        trainer.train(8, learn=True, offload_window_bytes=None)
        return list(trainer.model.parameters())

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.1)


def test_modules_that_are_chosen_by_name(device_under_test: Device):
    def program(run: Run) -> Any:
        trainer = Trainer(run)
        if not run.stock:
            torchoffload.offload_modules(trainer.model, "blocks.*", min_offload_size=0, learn=False)
        trainer.train(4, with_context=False)
        return list(trainer.model.parameters())

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5)


# --- fit ---


def test_fit_settles_moves_and_has_the_bits_of_stock(device_under_test: Device):
    """In the least memory that a step takes. Times are the host's, since events of the device tell none."""
    reports = []

    def program(run: Run) -> Any:
        trainer = Trainer(run)
        handle = None if run.stock else torchoffload.fit(trainer.model, memory=64 * MIB, min_offload_size=0)
        trainer.train(14, with_context=False)
        if handle is not None:
            assert handle.phase == "settled"
            handle.replan(int(handle.frontier()[0].memory_bytes / 0.96) + 1)
        trainer.train(10, with_context=False)
        if handle is not None:
            assert handle.phase == "settled"
            reports.append(handle.report())
            handle.remove()
        return list(trainer.model.parameters())

    stock = execute(program, device_under_test, stock=True)
    assert "exception" not in stock
    torchoffload.reset_stats()
    assert execute(program, device_under_test, stock=False) == stock
    assert torchoffload.stats().bytes_offloaded > 0
    assert "What the blocks do" in reports[0]


def test_fit_counts_the_optimizers_memory_and_tells_how_much_a_step_takes(device_under_test: Device):
    with device_under_test.scope():
        trainer = Trainer(Run(device_under_test, stock=True, context=None))
        trainer.train(1)
        torchoffload.fit(trainer.model, memory="200KiB")
        with pytest.raises(torch.OutOfMemoryError, match=r"fit: out of memory\. 200\.0 KiB is too little") as error:
            trainer.train(4)
    weights = sum(each.nbytes for each in trainer.model.parameters())
    (others,) = re.findall(r"as the optimizer's (\d+\.\d) KiB", str(error.value))
    assert float(others) * 1024 >= 2 * weights  # of AdamW


@pytest.mark.parametrize("memory", [None, 0.5])
def test_fit_asks_for_the_memory_if_the_device_does_not_tell_it(device_under_test: Device, memory: float | None):
    text = "memory must be given for a model on 'privateuseone': what it may use there cannot be asked for. Give bytes"
    with device_under_test.scope(), pytest.raises(ValueError, match=text):
        torchoffload.fit(Model().to(device_under_test.torch_device), memory=memory)


# --- The meter ---


def test_each_device_has_its_meter(device_under_test: Device):
    with device_under_test.scope():
        assert isinstance(meter_for(torch.device("privateuseone", 0)), AcceleratorMeter)
    assert isinstance(meter_for(torch.device("cpu")), HostMeter)


def test_a_device_whose_events_tell_no_time_is_waited_for(device_under_test: Device):
    with device_under_test.scope() as simulation:
        meter = meter_for(torch.device("privateuseone", 0))
        on_device = torch.ones(1000, device="privateuseone")
        host = torch.empty(1000, pin_memory=True)
        begin = meter.now()
        with torch.Stream(torch.device("privateuseone", 0)):
            host.copy_(on_device, non_blocking=True)
        assert simulation.queued_count() > 0
        end = meter.now()
        assert simulation.queued_count() == 0
        assert meter.between_s(begin, end) > 0


class Allocator:
    """An allocator that tells peaks, of the moments at which it was asked, as ``torch.accelerator`` asks one."""

    total_bytes = 100 * MIB

    def __init__(self, simulation: Any) -> None:
        self._simulation = simulation
        self._peak_bytes = 0
        self.may_reset = True

    def memory_allocated(self, _device: Any = None) -> int:
        allocated = int(self._simulation.allocated_bytes(0))
        self._peak_bytes = max(self._peak_bytes, allocated)
        return allocated

    def max_memory_allocated(self, _device: Any = None) -> int:
        self.memory_allocated()
        return self._peak_bytes

    def reset_peak_memory_stats(self, _device: Any = None) -> None:
        if self.may_reset:
            self._peak_bytes = self.memory_allocated()

    def memory_stats(self, _device: Any = None) -> dict[str, int]:
        names = ("allocated_bytes.all.current", "reserved_bytes.all.current", "num_ooms", "num_alloc_retries")
        return dict(zip(names, (self.memory_allocated(), 2 * self.memory_allocated(), 3, 4), strict=True))

    def get_memory_info(self, _device: Any = None) -> tuple[int, int]:
        return self.total_bytes - 3 * self.memory_allocated(), self.total_bytes


@pytest.fixture
def allocator(device_under_test: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    """PyTorch asks this one for the figures of the device."""
    with device_under_test.scope() as simulation:
        allocator = Allocator(simulation)
        for name in (name for name in vars(Allocator) if "memory" in name):
            monkeypatch.setattr(torch.accelerator, name, getattr(allocator, name), raising=False)
        _devices._tells_peaks.cache_clear()
        yield allocator
        _devices._tells_peaks.cache_clear()


def test_memory_is_measured_if_the_allocator_tells_peaks_and_the_device_its_size(allocator: Allocator):
    meter = meter_for(torch.device("privateuseone", 0))
    assert meter.measures_memory
    held = torch.empty(MIB, dtype=torch.uint8, device="privateuseone")
    assert meter.counts() == Counts(MIB, 2 * MIB, 3, 4)
    assert meter.total_bytes() == allocator.total_bytes - 3 * MIB + 2 * MIB
    assert meter.take_peak() == MIB
    del held
    assert meter.take_peak() == MIB
    assert meter.take_peak() == 0


def test_memory_is_not_measured_if_peaks_cannot_be_reset(allocator: Allocator):
    allocator.may_reset = False
    meter = meter_for(torch.device("privateuseone", 0))
    assert not meter.measures_memory
    assert meter.take_peak() == 0
    assert meter.counts().reserved_bytes == 0


def test_the_link_is_measured_by_copies(device_under_test: Device):
    with device_under_test.scope():
        link = measure_link(torch.device("privateuseone", 0), torchoffload.OffloadActivations().options)
    assert link.out_bytes_per_s > 0
    assert link.in_bytes_per_s > 0
    assert 0 < link.latency_s < 1


# --- What it says ---


def test_the_report_has_the_memory_of_the_device(device_under_test: Device):
    with device_under_test.scope():
        held = torch.empty(MIB, dtype=torch.uint8, device="privateuseone")
        text = torchoffload.report()
        del held
    assert "memory of privateuseone:0" in text
    assert "memory of privateuseone" not in torchoffload.report()


def test_a_tensor_of_the_cpu_stays_and_the_report_says_why(device_under_test: Device):
    torchoffload.reset_stats()
    with device_under_test.scope():
        x = torch.ones(64, 64, requires_grad=True)
        with (
            pytest.warns(UserWarning, match="saved tensors on cpu stay where they are"),
            torchoffload.OffloadActivations(min_offload_size=0),
        ):
            y = x.sin()
        y.sum().backward()
        assert "NOTHING MOVED, mostly because of 'device'" in torchoffload.report()


def test_without_an_accelerator_the_error_names_all_types(device_under_test: Device):
    with pytest.raises(RuntimeError, match="no CUDA device, and no accelerator of another type"):
        torchoffload.offload_modules(Model(), "blocks.*")
    with device_under_test.scope(), torchoffload.offload_modules(Model(), "blocks.*"):
        pass


def test_a_device_that_copies_at_once_has_a_line_in_the_report(device_under_test: Device):
    """In a process of its own, since a device is asked once whether it has streams."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_STREAMS], capture_output=True, text=True, timeout=120, check=True
    )
    assert "privateuseone:0 has no streams that PyTorch knows, so copies are not made beside the" in done.stdout
