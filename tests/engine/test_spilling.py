"""Host memory, then a disk: gradients, order, counts and waits of contexts with on_full="disk"."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchoffload
from devices import Device
from gradients import Run, assert_same_gradients, settled_stats
from spilling_contexts import DEPTH, NBYTES, ROOM, SIDE, chain, sound_disks, spilling

testing = pytest.importorskip("torchoffload._C_testing", reason="the simulated device is in the test build").testing

SIMULATED = ("simulated-late", "simulated-early", "simulated-seeded")
pytestmark = pytest.mark.devices(*SIMULATED, "privateuseone")


@pytest.fixture(autouse=True)
def _sound_disks() -> Iterator[None]:
    yield from sound_disks()


@pytest.mark.parametrize("slots", [0, 1, 3, DEPTH - 2])
@pytest.mark.parametrize("reload_window_bytes", [0, 3 * NBYTES, None])
def test_gradients_are_the_same_whatever_the_budget(
    device_under_test: Device, tmp_path: Path, slots: int, reload_window_bytes: int | None
):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        for _ in range(2):
            with spilling(run, tmp_path, slots, reload_window_bytes=reload_window_bytes):
                y = chain(x)
            y.sum().backward()
            run.check(gradient=x.grad)
        return x.grad

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=2 * DEPTH * NBYTES)
    at_most_in_memory = max(slots, 1)  # one passes where the budget is none
    assert stats.bytes_spilled >= 2 * (DEPTH - at_most_in_memory) * NBYTES
    assert stats.bytes_fetched >= 2 * (DEPTH - at_most_in_memory) * NBYTES
    assert stats.records_kept == {}


def test_what_fits_in_the_budget_stays_in_host_memory(device_under_test: Device, tmp_path: Path):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        with spilling(run, tmp_path, 2 * DEPTH):
            y = chain(x)
        y.sum().backward()
        return x.grad

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=DEPTH * NBYTES)
    assert (stats.bytes_spilled, stats.bytes_fetched, stats.disk_waits, stats.disk_wait_s) == (0, 0, 0, 0)


def test_everything_is_given_back_at_the_end(device_under_test: Device, tmp_path: Path):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        with spilling(run, tmp_path):
            y, unused = chain(x), chain(x, 3)
        y.sum().backward()
        del unused
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=(DEPTH + 2) * NBYTES)
    assert settled_stats().live_slots == 0
    assert testing.spill_memory_bytes() == 0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_several_graphs_in_any_order_of_backwards(device_under_test: Device, tmp_path: Path, order: tuple[int, ...]):
    """As the micro-batches of a pipeline: the oldest slots, which are on the disk, are wanted first."""

    def program(run: Run) -> Any:
        leaves = [run.leaf(SIDE, SIDE) for _ in order]
        losses = []
        for x in leaves:
            with spilling(run, tmp_path, 4, learn=True):
                losses.append(chain(x, 6).sum())
        for index in order:
            losses[index].backward()
        return [x.grad for x in leaves]

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.9)


def test_a_graph_that_is_kept_is_read_again_and_again(device_under_test: Device, tmp_path: Path):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        with spilling(run, tmp_path, 2):
            y = chain(x)
        for _ in range(3):
            run.check(gradient=torch.autograd.grad(y.sum(), x, retain_graph=True))
        return torch.autograd.grad(y.sum(), x)

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=DEPTH * NBYTES)
    assert stats.bytes_spilled <= (DEPTH + 1) * NBYTES, "what is on the disk is not written again"


def test_records_larger_than_the_budget_pass_one_at_a_time(device_under_test: Device, tmp_path: Path):
    def program(run: Run) -> Any:
        x = run.leaf(4 * SIDE, SIDE)
        with spilling(run, tmp_path, 1):
            y = chain(x)
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=DEPTH * 4 * NBYTES)


def test_contexts_with_different_budgets_and_one_directory_keep_to_their_own(device_under_test: Device, tmp_path: Path):
    def program(run: Run) -> Any:
        x, z = run.leaf(SIDE, SIDE), run.leaf(SIDE, SIDE)
        with spilling(run, tmp_path, 1):
            y = chain(x)
        with spilling(run, tmp_path, 2 * DEPTH):
            w = chain(z)
        (y.sum() + w.sum()).backward()
        return x.grad, z.grad

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=2 * DEPTH * NBYTES)
    assert stats.bytes_spilled <= DEPTH * NBYTES, "the second one has room"


@pytest.mark.devices("simulated-late")
def test_plain_contexts_count_what_spilling_ones_have_in_memory(
    device_under_test: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Host memory is not promised twice: 120 MiB do not fit in four fifths of the 128 MiB that the arena has."""
    mib = 1 << 20
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(torchoffload.host_memory().default_budget_bytes // (2 * mib)))

    def program(run: Run) -> Any:
        x, z = run.leaf(512, 512), run.leaf(512, 512)
        with run.offload(on_full="disk", disk_dir=str(tmp_path), budget_bytes=100 * mib):
            y = chain(x, 60)
        with run.offload():
            w = chain(z, 60)
        (y.sum() + w.sum()).backward()
        return x.grad, z.grad

    with pytest.warns(UserWarning, match="budget of host memory"):
        assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5, kept_reason="tier_full")


def test_threads_share_a_budget(device_under_test: Device, tmp_path: Path):
    def program(run: Run) -> Any:
        leaves = [run.leaf(SIDE, SIDE) for _ in range(3)]
        errors: list[BaseException] = []

        def train(x: torch.Tensor) -> None:
            try:
                for _ in range(3):
                    with spilling(run, tmp_path, 2):
                        y = chain(x)
                    y.sum().backward()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=train, args=(x,)) for x in leaves]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
            assert not thread.is_alive(), "it waits for ever"
        assert errors == []
        return [x.grad for x in leaves]

    assert_same_gradients(program, device=device_under_test, moved_bytes=9 * DEPTH * NBYTES)


# ---- with threads, as on a GPU: what the simulated device otherwise does at a time that its mode says ----


@pytest.fixture
def disk_threads() -> Iterator[None]:
    testing.set_disk_threads(True)
    yield
    testing.set_disk_threads(False)


@pytest.mark.usefixtures("disk_threads")
@pytest.mark.parametrize("slots", [0, 3])
def test_threads_of_the_disk_change_no_bit(device_under_test: Device, tmp_path: Path, slots: int):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        for _ in range(4):
            with spilling(run, tmp_path, slots):
                y, unused = chain(x), chain(x, 3)
            del unused
            y.sum().backward()
            run.check(gradient=x.grad)
        return x.grad

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=4 * (DEPTH + 2) * NBYTES)
    assert stats.bytes_spilled > 0
    assert stats.bytes_fetched > 0


@pytest.mark.usefixtures("disk_threads")
def test_threads_of_the_program_and_of_the_disk(device_under_test: Device, tmp_path: Path):
    test_threads_share_a_budget(device_under_test, tmp_path)


# ---- waits ----


@pytest.mark.devices("simulated-early")
def test_what_backward_wants_next_is_read_ahead(device_under_test: Device, tmp_path: Path):
    """The disk's threads are quick here: each slot is in memory before backward asks for it."""

    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        with spilling(run, tmp_path, 4, reload_window_bytes=NBYTES):
            y = chain(x)
        y.sum().backward()
        return x.grad

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=DEPTH * NBYTES)
    assert stats.bytes_fetched >= (DEPTH - 4) * NBYTES
    assert stats.disk_waits == 0


@pytest.mark.devices("simulated-early")
@pytest.mark.parametrize("keeps", [False, True], ids=["", "a graph is kept"])
def test_each_step_is_written_in_time(device_under_test: Device, tmp_path: Path, keeps: bool):
    """The disk's threads are quick here: the host waits only if nothing was begun in time. Also beside a kept graph."""
    kept = []

    def program(run: Run) -> Any:
        gradients = []
        for depth in (16, 16, 1 if keeps else 10, 10, 10, 10, 10):
            before = torchoffload.stats()
            x = run.leaf(SIDE, SIDE)
            with spilling(run, tmp_path, 4):
                y = chain(x, depth)
            if depth == 1:
                kept.append(y)
            else:
                y.sum().backward()
                gradients.append(x.grad)
            now = torchoffload.stats()
            if not run.stock:
                assert now.disk_waits == before.disk_waits
                if len(gradients) > 4:
                    assert now.bytes_spilled - before.bytes_spilled == 6 * NBYTES, "six of ten do not fit"
        kept.clear()
        return gradients

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.9)


@pytest.mark.except_devices("privateuseone")  # the threads of its disks go on when they like
def test_waits_for_the_disk_are_counted(device_under_test: Device, tmp_path: Path):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        testing.set_transfers_wait(True)
        with spilling(run, tmp_path, 2):
            y = chain(x)
        y.sum().backward()
        return x.grad

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=DEPTH * NBYTES)
    assert stats.disk_waits > 0
    assert stats.disk_wait_s > 0
    text = torchoffload.report()
    assert "on to the disk" in text
    assert f"{stats.disk_waits} waits for it" in text


def test_no_thread_of_python_stands_still_while_one_waits_for_the_disk(device_under_test: Device, tmp_path: Path):
    """The GIL is released: what holds the disk up is ended by another thread."""

    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        if run.stock:
            return torch.autograd.grad(chain(x).sum(), x)
        with spilling(run, tmp_path, 1):
            y = chain(x)
        testing.set_transfers_wait(True)
        testing.hold_next_io("pread")
        helper = threading.Timer(0.05, testing.release_held_io, ("pread",))
        helper.start()
        gradient = torch.autograd.grad(y.sum(), x)
        helper.join()
        return gradient

    assert_same_gradients(program, device=device_under_test, moved_bytes=DEPTH * NBYTES)


# ---- tier="disk" on an accelerator: everything is written, whatever the options of the context ----


@pytest.fixture
def everything_spills(spill_directory: Path) -> Iterator[None]:
    testing.spill_everything(str(spill_directory), memory_bytes=3 * ROOM)
    yield
    testing.spill_everything(None)


@pytest.mark.usefixtures("everything_spills")
def test_where_everything_is_written_a_little_memory_passes_it_on(device_under_test: Device):
    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        with run.offload():
            y = chain(x)
        held = testing.spill_memory_bytes()
        assert run.stock or held <= 3 * ROOM
        y.sum().backward()
        return x.grad

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=DEPTH * NBYTES)
    assert stats.bytes_spilled >= (DEPTH - 3) * NBYTES


@pytest.mark.devices("simulated-early")
def test_the_budget_of_the_context_that_saves_is_the_limit_of_all(device_under_test: Device, tmp_path: Path):
    """Contexts of one directory share a store, whatever their budgets are."""

    def program(run: Run) -> Any:
        x = run.leaf(SIDE, SIDE)
        with spilling(run, tmp_path, 2 * DEPTH):
            y = chain(x)
        if not run.stock:
            assert testing.spill_memory_bytes() == DEPTH * ROOM
        with spilling(run, tmp_path, 3):
            z = chain(y)
        if not run.stock:
            assert testing.spill_memory_bytes() <= 3 * ROOM
        with spilling(run, tmp_path, 2 * DEPTH):
            z = chain(z)
        if not run.stock:
            assert testing.spill_memory_bytes() > 3 * ROOM
        z.sum().backward()
        return x.grad

    engine_count = testing.engine_count()
    assert_same_gradients(program, device=device_under_test, moved_bytes=3 * DEPTH * NBYTES)
    assert testing.engine_count() <= engine_count + 1
