"""Memory that the engine drops may run any code: finalizers that enter contexts, save, run steps, trim, or raise.

Each saved tensor, and each tensor that a backward unpacks, has a finalizer that does one deed. So each place at which
the engine drops memory does it: between the copies of a flush, as a context is entered or left, as a module begins, as
a backward asks, passes by, or ends, and as a graph is dropped.
"""

import contextlib
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchoffload
from devices import Device
from functions import Save, SavesInput
from gradients import Run, assert_same_gradients
from spilling_contexts import NBYTES, SIDE, chain, sound_disks, spilling
from torchoffload._core import core

testing = pytest.importorskip("torchoffload._C_testing", reason="the simulated device is in the test build").testing

SIMULATED = ("simulated-late", "simulated-early", "simulated-seeded")
PROGRAMS = Path(__file__).parent.parent / "support"
DEPTH = 8


@pytest.fixture(autouse=True)
def _sound_disks() -> Iterator[None]:
    yield from sound_disks()


class Finalizers:
    """What runs as storages are freed, and a leaf of its own to run it on."""

    def __init__(self, run: Run, context: Any, other: Callable[[], Any], deed: str) -> None:
        self.run, self.context, self.other = run, context, other
        self.deed: Callable[[], None] = getattr(self, deed)
        self.leaf = run.leaf(SIDE, SIDE)
        (self.expected,) = torch.autograd.grad(self.leaf.sin().exp().sum(), self.leaf)
        self.graphs: list[torch.Tensor] = []
        self.raised: list[str] = []
        self.is_acting = False
        self.count = 0

    def watch(self, tensor: torch.Tensor) -> None:
        weakref.finalize(tensor.untyped_storage(), self.act).atexit = False

    def act(self) -> None:
        if self.run.stock or self.is_acting:
            return
        self.is_acting = True
        self.count += 1
        try:
            with torch.enable_grad():  # it may run inside of a Function's forward
                self.deed()
        except Exception as error:
            self.raised.append(f"{type(error).__name__}: {error}")
            raise
        finally:
            self.is_acting = False

    def step_in(self, around: Any) -> None:
        with around:
            y = self.leaf.sin().exp()
        (found,) = torch.autograd.grad(y.sum(), self.leaf)
        assert torch.equal(found, self.expected)

    # The deeds.

    def enters_another(self) -> None:
        with self.other():
            pass

    def enters_the_same(self) -> None:
        with self.context:
            pass

    def saves(self) -> None:
        self.graphs.append(self.leaf.sin().exp())

    def drops_what_it_saved(self) -> None:
        self.graphs.append(self.leaf.sin().exp())
        del self.graphs[:-1]

    def steps_in_another(self) -> None:
        self.step_in(self.other())

    def steps_in_the_same(self) -> None:
        self.step_in(self.context)

    def lets_the_disk_go_on(self) -> None:
        testing.set_transfers_wait(False)
        self.enters_another()
        testing.set_transfers_wait(True)

    def trims(self) -> None:
        torchoffload.trim()

    def fails(self) -> None:
        raise ValueError("planted in a finalizer")

    def check(self) -> None:
        """Each deed went as it should, and each graph that it has left is whole."""
        deadline = time.monotonic() + 5
        while not self.run.stock and self.count == 0 and time.monotonic() < deadline:
            self.step_in(self.other())  # the disk may not have been done with the memory yet
        assert self.run.stock or self.count > 0
        assert [text for text in self.raised if "planted" not in text] == []
        for graph in self.graphs:
            (found,) = torch.autograd.grad(graph.sum(), self.leaf)
            assert torch.equal(found, self.expected)
        self.graphs.clear()


DEEDS = [
    "enters_another",
    "enters_the_same",
    "saves",
    "drops_what_it_saved",
    "steps_in_another",
    "steps_in_the_same",
    "trims",
    "fails",
]

OPTIONS: dict[str, dict[str, Any]] = {
    "windows of nothing": {"offload_window_bytes": 0, "reload_window_bytes": 0},
    "windows of some records": {"offload_window_bytes": 2 * NBYTES, "reload_window_bytes": 2 * NBYTES},
    "windows that hold all": {"offload_window_bytes": 1 << 30, "reload_window_bytes": 1 << 30},
}


@pytest.fixture(autouse=True)
def unraisable(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a finalizer raises is told to this hook, and to nobody else."""
    told: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: told.append(str(found.exc_value)))
    monkeypatch.setattr(sys, "excepthook", lambda _kind, value, _traceback: told.append(str(value)))
    return told


def forward(finalizers: Finalizers, x: torch.Tensor) -> torch.Tensor:
    """Operators that save two tensors each; nobody but autograd's graph holds these afterwards."""

    def look(*unpacked: torch.Tensor) -> None:
        for each in unpacked:
            finalizers.watch(each)

    for _ in range(DEPTH):
        first, second = x * 0.5, x * 0.25
        finalizers.watch(first)
        finalizers.watch(second)
        x = Save.apply(x, look, first, second)
    return x


def two_steps(finalizers: Finalizers, context: Any, x: torch.Tensor) -> None:
    for _ in range(2):
        with context:
            y = forward(finalizers, x)
            passed_by = forward(finalizers, x)
        torch.autograd.grad(passed_by.sum(), x, retain_graph=True)
        y.sum().backward()
        with context:
            dropped = forward(finalizers, x)
        del passed_by, dropped, y
    finalizers.check()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("deed", DEEDS)
def test_a_finalizer_of_a_saved_tensor(device_under_test: Device, options: str, deed: str, unraisable: list[str]):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        context = run.offload(learn=False, **OPTIONS[options])
        two_steps(Finalizers(run, context, lambda: run.offload(learn=False), deed), context, x)
        return x.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.2)
    assert (deed == "fails") == ("planted in a finalizer" in unraisable)


@pytest.mark.devices(*SIMULATED)
@pytest.mark.parametrize("deed", [*DEEDS, "lets_the_disk_go_on"])
@pytest.mark.parametrize("slots", [1, 4])
def test_a_finalizer_of_a_saved_tensor_while_copies_wait_for_room(
    device_under_test: Device, tmp_path: Path, slots: int, deed: str
):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        testing.set_transfers_wait(True)

        def context(**options: Any) -> Any:
            return spilling(run, tmp_path, slots, learn=False, **options)

        first = context(offload_window_bytes=2 * NBYTES)
        two_steps(Finalizers(run, first, context, deed), first, x)
        return x.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.2)


@pytest.mark.parametrize("deed", DEEDS)
def test_a_finalizer_of_a_saved_tensor_while_modules_change_the_windows(device_under_test: Device, deed: str):
    class Block(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(finalizers, x)

    finalizers: Finalizers

    def program(run: Run) -> Any:
        nonlocal finalizers
        x, model = run.leaf(SIDE, SIDE), nn.Sequential(Block(), Block(), Block())
        if run.stock:
            finalizers = Finalizers(run, None, run.offload, deed)
            model(x).sum().backward()
            return x.grad
        handle = torchoffload.offload_modules(model, list(model), min_offload_size=0, learn=False, **device_options)
        context = handle._offloading.context
        core.set_module_windows(context, [(0, 0, 0), (1 << 30, 0, 1 << 30), (0, NBYTES, NBYTES), (1 << 30, 0, 0)])
        finalizers = Finalizers(run, run.offload(learn=False), lambda: run.offload(learn=False), deed)
        model(x).sum().backward()
        handle.remove()
        finalizers.check()
        return x.grad

    device_options = {"tier": "disk"} if device_under_test.name == "disk" else {}
    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.2)


@pytest.mark.devices(*SIMULATED)
@pytest.mark.parametrize("deed", DEEDS)
def test_a_finalizer_of_a_saved_tensor_while_times_are_taken(device_under_test: Device, deed: str):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        context = run.offload(learn=False, offload_window_bytes=NBYTES)
        with contextlib.nullcontext() if run.stock else torchoffload.profile():
            two_steps(Finalizers(run, context, lambda: run.offload(learn=False), deed), context, x)
        return x.grad

    testing.set_link(0, 1e9)
    try:
        assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.2)
    finally:
        testing.set_link(0, 0.0)


@pytest.mark.devices(*SIMULATED, "privateuseone")
@pytest.mark.parametrize("deed", ["saves", "enters_the_same", "steps_in_another", "steps_in_the_same"])
def test_an_operator_that_fills_what_it_has_saved_has_not_ended_because_a_finalizer_ran_others(
    device_under_test: Device, deed: str
):
    """R1. rrelu saves its noise and its input before it fills the noise.

    A finalizer that runs between the two packs uses up numbers of operators, by which the engine knows that an operator
    has ended, or leaves the context.
    """

    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        context = run.offload(learn=False, offload_window_bytes=0)
        finalizers = Finalizers(run, context, lambda: run.offload(learn=False), deed)
        with context:
            source, inside = x * 0.5, x * 2
            finalizers.watch(source)
            y = SavesInput.apply(source)
            del source
            z = F.rrelu(inside, training=True)
        (y.sum() + z.sum()).backward()
        finalizers.check()
        return x.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.2)


@pytest.mark.devices(*SIMULATED)
def test_what_a_flush_gives_up_is_dropped_before_the_host_waits_for_the_next_slot(
    device_under_test: Device, tmp_path: Path
):
    """One operator saves more than there is room for. So the flush behind it waits for slots, one after the other."""
    waits_before: list[int] = []

    def look(*_unpacked: torch.Tensor) -> None:
        return None

    def watched(source: torch.Tensor) -> torch.Tensor:
        note = weakref.finalize(source.untyped_storage(), lambda: waits_before.append(torchoffload.stats().disk_waits))
        note.atexit = False
        return source

    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        testing.set_transfers_wait(True)
        with spilling(run, tmp_path, 1, offload_window_bytes=2 * NBYTES, learn=False):
            y = Save.apply(x, look, *(watched(x * number) for number in range(6)))
            waits_before.clear()
            y = SavesInput.apply(y)
            dropped = list(waits_before)
        y.sum().backward()
        if not run.stock:
            assert dropped == [0, 1, 2, 3], "each as the host was about to wait for the next slot"
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=7 * NBYTES)


@pytest.mark.parametrize("mode", ["late", "early"])
def test_a_copy_begins_to_wait_as_a_finalizer_flushes(mode: str, tmp_path: Path):
    """In a process whose freed memory is overwritten at once."""
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "reentry_program.py"), mode, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "right"), done.stderr


# ---- threads that share an engine ----


@pytest.mark.devices("simulated-early", "simulated-seeded")
@pytest.mark.parametrize("ends", [False, True], ids=["idles", "ends"])
def test_a_thread_that_stays_inside_of_its_context_keeps_no_window_from_others(
    ends: bool, device_under_test: Device, tmp_path: Path
):
    """Its copies that wait for room are enqueued by the others, which then have the window for copies of their own."""
    slots, waiting = 3, 4

    def program(run: Run) -> Any:
        mine, idles = run.leaf(SIDE, SIDE), run.leaf(SIDE, SIDE)
        testing.set_transfers_wait(True)
        is_idle, may_go_on = threading.Event(), threading.Event()
        outputs: list[torch.Tensor] = []
        main = run.simulation.current_stream()

        of_thread = spilling(run, tmp_path, slots, offload_window_bytes=waiting * NBYTES, learn=False)

        def idle() -> None:
            with run.simulation.stream(main):
                of_thread.__enter__()
                outputs.append(chain(idles, slots + waiting + 1))  # the last one is pending
                is_idle.set()
                if not ends:
                    may_go_on.wait(60)
                    of_thread.__exit__(None, None, None)

        thread = threading.Thread(target=idle)
        thread.start()
        assert is_idle.wait(60)
        if ends:
            thread.join(60)
        with spilling(run, tmp_path, slots, offload_window_bytes=waiting * NBYTES, learn=False):
            before = torchoffload.stats()
            y = chain(mine, waiting + 1)
            found = torchoffload.stats()
            if not run.stock:
                assert found.records_offloaded - before.records_offloaded == waiting, "those of the thread that idles"
                testing.set_transfers_wait(False)
                for _ in range(100):
                    torch.relu(mine[:1, :0])
            y = chain(y, waiting)
            assert torchoffload.stats().disk_waits - found.disk_waits <= 1
        may_go_on.set()
        thread.join(60)
        (y.sum() + outputs.pop().sum()).backward()
        return mine.grad, idles.grad

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.9)
