"""A pack joins a record only when it stands for the same bytes: storage, version counter, version, address and size."""

import gc

import pytest
import torch
from test_gradients_threads import new_stream, on_stream, wait_stream

from devices import Device
from functions import Save
from gradients import Run, TestErr, assert_same_gradients


def ignore(*_: torch.Tensor) -> None:
    """A look that looks at nothing."""


def pass_time(y: torch.Tensor) -> torch.Tensor:
    """An operator that packs: what was pending before it leaves. Its own record has 16 bytes."""
    return y.exp()


def test_a_changed_tensor_saved_again_is_another_record(device_under_test: Device):
    def program(run: Run):
        x, state = run.leaf(4), run.tensor(32, 32)
        y = x
        with run.offload():
            for step in range(1, 4):
                y = Save.apply(y, ignore if step < 3 else lambda unpacked: run.check(state=unpacked), state)
                y = pass_time(y)
                if step < 3:
                    state.add_(step)
        with run.raising("first"):
            y.sum().backward()

    assert_same_gradients(program, device=device_under_test, moved_bytes=3 * (4096 + 16))


def test_an_alias_with_a_version_counter_of_its_own_is_another_record(device_under_test: Device):
    """`.data` begins a new counter: equal versions of two counters say nothing of each other."""

    def program(run: Run):
        x, state = run.leaf(4), run.tensor(32, 32).clone()  # of version 0
        with run.offload(offload_window_bytes=0):
            y = pass_time(Save.apply(x, ignore, state))
            state.data.mul_(2)  # no version that autograd could see
            y = Save.apply(y, lambda unpacked: run.check(alias=unpacked), state.data)
        y.sum().backward()

    assert_same_gradients(program, device=device_under_test, moved_bytes=2 * 4096 + 16)


def test_a_storage_that_was_freed_and_filled_again_is_another_record(device_under_test: Device):
    """As FSDP2's unsharded parameters: the same storage and version, other memory, other values."""

    def program(run: Run):
        x, gathered = run.leaf(4), run.tensor(32, 32)
        with run.offload(offload_window_bytes=0):
            y = pass_time(Save.apply(x, ignore, gathered))
            address = gathered.data_ptr()
            gathered.untyped_storage().resize_(0)
            takers = [torch.full((32, 32), 3.0, device=run.device) for _ in range(8)]  # of the freed memory
            gathered.untyped_storage().resize_(4096)
            if gathered.data_ptr() == address:
                raise TestErr("the storage got its old address again: nothing tells it apart")
            gathered.data.copy_(takers[0])
            y = Save.apply(y, lambda unpacked: run.check(gathered=unpacked), gathered)
        y.sum().backward()

    assert_same_gradients(program, device=device_under_test, moved_bytes=2 * 4096 + 16)


def test_another_storage_at_the_address_of_a_dead_one_is_another_record(device_under_test: Device):
    """`.data =` keeps counter and version; the old storage dies, and the new one may be made at its address."""

    def program(run: Run):
        x = run.leaf(4)
        y = x
        with run.offload(offload_window_bytes=0):
            for step in range(12):
                state = torch.full((32, 32), step + 0.5, device=run.device)
                y = pass_time(Save.apply(y, ignore, state))
                state.data = torch.empty(0, device=run.device)
                state.data = torch.full((32, 32), step + 0.25, device=run.device)
                y = pass_time(Save.apply(y, lambda unpacked: run.check(state=unpacked), state))
        y.sum().backward()

    assert_same_gradients(program, device=device_under_test, moved_bytes=12 * 2 * (4096 + 16))


def test_a_storage_saved_by_two_forwards_moves_in_each(device_under_test: Device):
    """A pack joins within its own tape alone: each graph may be dropped without the other."""

    def program(run: Run):
        x, shared = run.leaf(4), run.tensor(32, 32)
        outputs = []
        for _ in range(3):
            with run.offload():
                outputs.append(Save.apply(x, lambda unpacked: run.check(shared=unpacked), shared))
        outputs.pop(1)
        gc.collect()
        for y in outputs:
            y.sum().backward()

    assert_same_gradients(program, device=device_under_test, moved_bytes=3 * 4096)


def test_after_a_backward_inside_the_entry_a_storage_moves_again(device_under_test: Device):
    """The first unpack in a graph task closes the tape."""

    def program(run: Run):
        x, shared = run.leaf(4), run.tensor(32, 32)
        with run.offload():
            for _ in range(3):
                y = pass_time(Save.apply(x, lambda unpacked: run.check(shared=unpacked), shared))
                pass_time(y)
                y.sum().backward()

    assert_same_gradients(program, device=device_under_test, moved_bytes=3 * (4096 + 16))


def test_aliases_saved_by_one_operator_move_once_whatever_counts_their_versions(device_under_test: Device):
    """As the views that inductor's regions save: the copy is not enqueued yet, so all stand for the same bytes."""

    def program(run: Run):
        x, state = run.leaf(4), run.tensor(32, 32)
        with run.offload():
            y = Save.apply(x, lambda *unpacked: run.check(states=unpacked), state, state.data, state.t().data)
            y = pass_time(y)
        y.sum().backward()

    assert_same_gradients(program, device=device_under_test, moved_bytes=4096 + 16)


def test_two_dtypes_at_one_address_are_told_apart(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(4)
        y = x
        with run.offload(offload_window_bytes=0):
            for dtype in (torch.float32, torch.int32, torch.float32, torch.int64, torch.complex64):
                temporary = run.tensor(4096 // dtype.itemsize, dtype=dtype)
                y = Save.apply(y, lambda unpacked: run.check(temporary=unpacked), temporary)
                del temporary
        y.sum().backward()

    assert_same_gradients(program, device=device_under_test, moved_bytes=5 * 4096)


def test_views_at_odd_bytes_of_one_record(device_under_test: Device):
    """A record may begin where another dtype's elements do not: such a view is a record of its own."""

    def program(run: Run):
        x, big = run.leaf(1), run.tensor(1 << 14, dtype=torch.uint8)
        first = big[6 : 6 + 2048]
        second = big[8 : 8 + 1024].view(torch.float32)
        with run.offload():
            products = [x * view for view in (first, second, big[9:999], second[3:9])]
        del big, first, second
        run.check(views=[product.grad_fn._saved_other for product in products])
        sum(product.sum() for product in products).backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=2048 + 1024)


@pytest.mark.devices("simulated-late", "simulated-early", "simulated-seeded", "cuda")
def test_memory_of_another_streams_pool_is_dropped_after_its_pack(device_under_test: Device):
    """R3: the pool that the memory came from must hear of the stream on which it was packed."""

    def program(run: Run):
        other, x = new_stream(run), run.leaf(32, 32)
        for _ in range(4):
            wait_stream(run, other, None)
            with on_stream(run, other):
                temporary = run.tensor(32, 32)
            wait_stream(run, None, other)
            with run.offload(offload_window_bytes=0):
                y = x * temporary
                del temporary
                z = y.exp()
            with on_stream(run, other):
                again = run.tensor(32, 32).mul_(3)  # may be given the memory
                run.check(again=again)
            del again
            z.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=4 * 2 * 4096)


# In stock its memory goes back to the pool before another stream has read it, which this device reports.
@pytest.mark.except_devices("privateuseone")
def test_a_join_on_another_stream_is_told_to_the_memorys_pool(device_under_test: Device):
    if device_under_test.name == "disk":
        pytest.skip("the host is its only stream")

    def program(run: Run):
        other, x = new_stream(run), run.leaf(32, 32)
        for _ in range(4):
            with run.offload(offload_window_bytes=1 << 30):
                temporary = x.detach() * 2
                y = x * temporary
                wait_stream(run, other, None)
                with on_stream(run, other):
                    z = x * temporary
                del temporary
            wait_stream(run, None, other)
            (y + z).sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test)
