"""plot_memory(): the same operators plain and offloaded, and a picture of the memory after each."""

import mmap
import os
import sys
from importlib.util import find_spec

import pytest
import torch

import torchoffload
from devices import Device
from torchoffload._contexts.disabling import disabled
from torchoffload._observe import plot as _plot

CPU = torch.device("cpu")
needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")


def make_step(device: Device):
    """A step of eight layers of 16 KiB, and a list that notes of each call whether contexts were switched off."""
    weights = [torch.nn.Parameter(torch.ones(64, 64, device=device.torch_device)) for _ in range(8)]
    context = device.context(offload_window_bytes=0, reload_window_bytes=0)
    switched_off: list[bool] = []

    def step() -> None:
        switched_off.append(os.environ.get("TORCHOFFLOAD_DISABLE") == "1")
        hidden = torch.ones(64, 64, device=device.torch_device)
        with context:
            for weight in weights:
                hidden = (hidden @ weight).sin()
            loss = hidden.sum()
        loss.backward()

    return step, switched_off


@pytest.mark.devices("simulated-late", "simulated-early", "simulated-seeded")
def test_both_courses_count_the_same_operators_and_the_offloaded_one_is_lower(device_under_test, monkeypatch):
    with device_under_test.scope() as simulation:
        monkeypatch.setattr(_plot, "memory_bytes", lambda device: simulation.allocated_bytes())
        step, _ = make_step(device_under_test)
        with disabled():
            plain = _plot.sample(step, CPU, 1, may_run_out=True)
        offloaded = _plot.sample(step, CPU, 1, may_run_out=False)
    assert len(plain.memory_bytes) == len(offloaded.memory_bytes) > 30
    assert plain.backward_begins == offloaded.backward_begins > 16
    at_loss = plain.backward_begins - 1
    # Each layer saves its input and the product: 16 of them are away, but for the last two, whose turn comes later.
    freed_bytes = plain.memory_bytes[at_loss] - offloaded.memory_bytes[at_loss]
    assert 12 * 64 * 64 * 4 <= freed_bytes <= 16 * 64 * 64 * 4
    assert max(offloaded.memory_bytes) < max(plain.memory_bytes)


@needs_matplotlib
def test_steps_run_switched_off_first_and_then_as_they_are(device_under_test, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHOFFLOAD_DISABLE", "0")
    with device_under_test.scope():
        step, switched_off = make_step(device_under_test)
        torchoffload.plot_memory(step, tmp_path / "memory.png", device=device_under_test.torch_device, warm_up_steps=1)
    assert switched_off == [True, True, False, False]
    assert os.environ["TORCHOFFLOAD_DISABLE"] == "0"
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


@needs_matplotlib
def test_plain_steps_that_run_out_of_memory_are_drawn_until_then(tmp_path):
    def step() -> None:
        with torchoffload.OffloadActivations(tier="disk", disk_dir=tmp_path, min_offload_size=0):
            hidden = torch.ones(64, 64, requires_grad=True).exp().exp()
        if os.environ.get("TORCHOFFLOAD_DISABLE") == "1":
            raise torch.OutOfMemoryError("planted")
        hidden.sum().backward()

    torchoffload.plot_memory(step, tmp_path / "memory.svg", device="cpu")
    assert (tmp_path / "memory.svg").stat().st_size > 1000
    with disabled():
        course = _plot.sample(step, CPU, 2, may_run_out=True)
    assert (course.is_complete, course.backward_begins) == (False, None)
    assert course.memory_bytes
    with disabled(), pytest.raises(torch.OutOfMemoryError):
        _plot.sample(step, CPU, 2, may_run_out=False)


@needs_matplotlib
def test_steps_that_move_nothing_are_warned_of(tmp_path):
    def step() -> None:
        torch.ones(4, requires_grad=True).exp().sum().backward()

    with pytest.warns(UserWarning, match="nothing was offloaded in these steps"):
        torchoffload.plot_memory(step, tmp_path / "memory.png", device="cpu", warm_up_steps=0)


def test_without_matplotlib_it_says_what_to_install_and_nothing_runs(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install matplotlib$"):
        torchoffload.plot_memory(lambda: pytest.fail("it ran"), tmp_path / "memory.png")


@needs_matplotlib
def test_a_negative_number_of_steps_is_refused(tmp_path):
    with pytest.raises(ValueError, match="warm_up_steps must be at least 0, got -1"):
        torchoffload.plot_memory(lambda: None, tmp_path / "memory.png", warm_up_steps=-1)


@pytest.mark.parametrize("device", [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.cuda)])
def test_memory_is_what_is_in_use(device):
    # Mapped anew: what the allocator has kept of earlier tests is in use already.
    fresh = torch.frombuffer(mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE), dtype=torch.float32)
    before = _plot.memory_bytes(torch.device(device))
    held = fresh.fill_(1) if device == "cpu" else torch.ones(16 << 20, device=device)
    assert _plot.memory_bytes(torch.device(device)) - before >= held.nbytes * 0.9
