"""Storages that are emptied and filled again where they were, as recomputation that discards its outputs does.

Neither version, nor address, nor size tells of it: only that the memory is another allocation's.
"""

import gc
from collections.abc import Iterator

import pytest
import torch

from devices import Device
from functions import Save
from gradients import Run, TestErr, assert_same_gradients

testing = pytest.importorskip("torchoffload._C_testing", reason="it is in the test build alone").testing
SLOW_BYTES = 1 << 28  # a copy that is under way for a while


def _numel(device: Device) -> int:
    """Of a tensor whose copy takes a while."""
    return 1 << 24 if device.name == "disk" else 1024


@pytest.fixture(autouse=True)
def _addresses_are_given_again(device_under_test: Device) -> Iterator[None]:
    """As by a device's allocator; that of the CPU's memory may give any address."""
    if device_under_test.name != "disk":
        yield
        return
    testing.begin_recycling()
    yield
    gc.collect()
    testing.end_recycling()


def _empty_and_allocate(tensor: torch.Tensor, *, anywhere: bool = False) -> None:
    """Other memory for the storage, at the address of the first (or `anywhere`)."""
    storage, address, others = tensor.untyped_storage(), tensor.data_ptr(), []
    nbytes = storage.nbytes()
    storage.resize_(0)
    for _ in range(64):  # until the allocator gives the address again
        others.append(torch.UntypedStorage(nbytes, device=tensor.device))
        if others[-1].data_ptr() == address:
            break
    others.pop()
    storage.resize_(nbytes)
    if tensor.data_ptr() != address and not anywhere:
        raise TestErr("the allocator does not give the address again")


def _fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Not counted by the tensor's version."""
    source = torch.UntypedStorage(tensor.untyped_storage().nbytes(), device=tensor.device)
    torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(source).view(tensor.shape).copy_(values)
    tensor.untyped_storage().copy_(source)


def _save_behind_slow_copies(run: Run, x: torch.Tensor, gathered: torch.Tensor) -> torch.Tensor:
    """`gathered` is saved, and its copy enqueued behind two that take a while."""
    slow = [torch.ones(SLOW_BYTES // 4, device=run.device) for _ in range(2)]
    y = Save.apply(x, _ignore, *slow)
    return Save.apply(y, lambda unpacked: run.check(gathered=unpacked), gathered).exp()


def _ignore(*_: torch.Tensor) -> None:
    """A look that looks at nothing."""


def test_a_storage_emptied_while_its_copy_is_pending_is_not_copied_before_it_is_full(device_under_test: Device):
    numel = _numel(device_under_test)

    def program(run: Run):
        x, values = run.leaf(4), run.tensor(numel)
        gathered = values.clone()
        with run.offload():
            y = Save.apply(x, lambda unpacked: run.check(gathered=unpacked), gathered)
            _empty_and_allocate(gathered)
            gathered.data.fill_(float("nan"))
            y = y.exp()  # the next hook event
            _fill(gathered, values)
        y.sum().backward()

    assert_same_gradients(program, device=device_under_test, moved_bytes=16, kept_reason="resized")


def test_a_storage_filled_with_other_values_between_two_saves_is_two_records(device_under_test: Device):
    numel = _numel(device_under_test)

    def program(run: Run):
        x, values, others = run.leaf(4), run.tensor(numel), run.tensor(numel)
        gathered = values.clone()
        with run.offload(offload_window_bytes=0):
            y = Save.apply(x, _ignore, gathered).exp()
            _empty_and_allocate(gathered)
            _fill(gathered, others)
            y = Save.apply(y, lambda unpacked: run.check(gathered=unpacked), gathered)
        y.sum().backward()

    assert_same_gradients(program, device=device_under_test, moved_bytes=8 * numel + 16)


@pytest.mark.devices("disk", "cuda")
def test_a_storage_emptied_under_its_copy_stands_for_what_it_holds_in_backward(device_under_test: Device):
    """The copy reads what lay there in between: on a simulated device that is a race of the program's own."""
    numel = _numel(device_under_test)

    def program(run: Run):
        x, values = run.leaf(4), run.tensor(numel)
        gathered = values.clone()
        with run.offload(offload_window_bytes=4 * SLOW_BYTES):
            y = _save_behind_slow_copies(run, x, gathered)
            _empty_and_allocate(gathered)
            gathered.data.fill_(float("nan"))
        if run.device.type == "cuda":
            torch.cuda.synchronize()
        _fill(gathered, values)
        y.sum().backward()

    assert_same_gradients(program, device=device_under_test, kept_reason="resized", min_moved_fraction=0.5)


@pytest.mark.devices("disk", "cuda")
def test_a_source_that_backward_used_is_not_given_up_for_a_copy_of_other_bytes(device_under_test: Device):
    """Backward takes the source while its copy is under way; the storage is emptied then, and asked for again."""
    numel = _numel(device_under_test)

    def program(run: Run):
        x, values = run.leaf(4), run.tensor(numel)
        gathered = values.clone()
        with run.offload(offload_window_bytes=4 * SLOW_BYTES):
            y = _save_behind_slow_copies(run, x, gathered)
        y.sum().backward(retain_graph=True)
        _empty_and_allocate(gathered, anywhere=True)
        gathered.data.fill_(float("nan"))
        if run.device.type == "cuda":
            torch.cuda.synchronize()
        _fill(gathered, values)
        y.sum().backward()

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.5)


@pytest.mark.devices("simulated-late", "simulated-early", "simulated-seeded", "cuda")
def test_a_storage_emptied_after_a_backward_that_used_it_comes_back_from_the_slot(device_under_test: Device):
    """Stock would read memory that is not there. On disk the slot may not be written by then: a clear error."""

    def program(run: Run):
        x, gathered = run.leaf(4), run.tensor(1024)
        with run.offload(offload_window_bytes=1 << 20):
            y = Save.apply(x, lambda unpacked: run.check(gathered=unpacked), gathered).exp()
        for _ in range(2):  # the first takes the source, the second finds it given up
            y.sum().backward(retain_graph=True)
        if not run.stock:
            gathered.untyped_storage().resize_(0)
        y.sum().backward()

    assert_same_gradients(program, device=device_under_test, moved_bytes=4096 + 16)
