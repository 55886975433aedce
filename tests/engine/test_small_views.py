"""A small view of a large storage moves: kept it would pin all of that. What this may cost for nothing is bounded."""

from typing import Any

import pytest
import torch

import torchoffload
from devices import Device
from gradients import Run, assert_same_gradients

ROW_BYTES = 1024 * 4
ROWS = 64
BIG_BYTES = ROWS * ROW_BYTES
MINIMUM = 2 * ROW_BYTES
ALONE = 8  # Schedule::kSmallViewsAlone


def products(run: Run, x: torch.Tensor, big: torch.Tensor, rows: Any) -> list[torch.Tensor]:
    with run.offload(min_offload_size=MINIMUM, offload_window_bytes=0):
        return [x * big[row] for row in rows]


def finish(run: Run, x: torch.Tensor, outputs: list[torch.Tensor]) -> Any:
    run.check(saved=[output.grad_fn._saved_other for output in outputs])
    torch.stack([output.sum() for output in outputs]).sum().backward()
    return x.grad


def test_a_small_view_moves_alone_and_its_storage_is_free(device_under_test: Device):
    def program(run: Run):
        x, big = run.leaf(1), run.tensor(ROWS, 1024)
        outputs = products(run, x, big, [5])
        held = run.simulation.allocated_bytes() if run.simulation else 0
        del big
        if run.simulation and not run.stock:
            assert held - run.simulation.allocated_bytes() == BIG_BYTES
        return finish(run, x, outputs)

    assert_same_gradients(program, device=device_under_test, moved_bytes=ROW_BYTES)


@pytest.mark.parametrize("count", [ALONE, ALONE + 1, ROWS])
def test_of_many_small_views_the_first_move_alone_and_one_copy_serves_the_rest(device_under_test: Device, count: int):
    def program(run: Run):
        x, big = run.leaf(1), run.tensor(ROWS, 1024)
        return finish(run, x, products(run, x, big, range(count)))

    whole_bytes = BIG_BYTES if count > ALONE else 0
    assert_same_gradients(program, device=device_under_test, moved_bytes=ALONE * ROW_BYTES + whole_bytes)


def test_a_storage_that_changes_between_many_small_views_moves_as_a_whole_once(device_under_test: Device):
    def program(run: Run):
        x, big = run.leaf(1), run.tensor(ROWS, 1024)
        with run.offload(min_offload_size=MINIMUM):
            outputs = []
            for row in range(ROWS):
                outputs.append(x * big[row])
                big.add_(1)  # such as a cache of keys, in a loop without a backward
        with run.raising("error"):
            outputs[0].sum().backward()

    assert_same_gradients(
        program, device=device_under_test, moved_bytes=ALONE * ROW_BYTES + BIG_BYTES, kept_reason="small"
    )


def test_a_small_view_of_a_storage_that_is_kept_anyway_stays(device_under_test: Device):
    def program(run: Run):
        x, big = run.leaf(1), run.tensor(ROWS, 1024)
        with run.offload(min_offload_size=MINIMUM, budget_bytes=ROW_BYTES):
            outputs = [x * big[: ROWS // 4], x * big[ROWS - 1]]  # the first is over the budget
        return finish(run, x, outputs)

    with pytest.warns(UserWarning, match="budget_bytes"):
        assert_same_gradients(program, device=device_under_test, moved_bytes=0, kept_reason=["tier_full", "small"])


@pytest.mark.devices("simulated-late", "privateuseone")
def test_what_was_learned_keeps_no_part_of_a_storage(device_under_test: Device):
    """It would pin the whole, and count with its own bytes alone. Whole storages of the same size are kept by then."""
    device = device_under_test
    with device.scope() as simulation, device.torch_device:
        for _ in range(6):
            torchoffload.reset_stats()
            x = torch.ones(1, requires_grad=True)
            with device.context(min_offload_size=MINIMUM, learn=True, reload_window_bytes=4 * BIG_BYTES):
                outputs = []
                for row in range(4):
                    big = torch.ones(ROWS, 1024) + row
                    outputs += [x * big[row], x * torch.ones(2, 1024)]
                    del big
                torch.ones(1, requires_grad=True).sin()
            allocated_bytes = simulation.allocated_bytes()
            stats = torchoffload.stats()
            torch.stack([output.sum() for output in outputs]).sum().backward()
            del outputs
        assert stats.records_kept.get("small_copy", 0) + stats.records_kept.get("tape_end", 0) > 0
        assert stats.records_offloaded >= 4
        assert allocated_bytes < BIG_BYTES


@pytest.mark.devices("simulated-late", "privateuseone")
def test_a_small_view_of_a_storage_that_lives_on_stays_from_the_third_tape_on(device_under_test: Device):
    device = device_under_test
    with device.scope(), device.torch_device:
        table = torch.ones(ROWS, 1024)
        kept = []
        for _ in range(4):
            torchoffload.reset_stats()
            x = torch.ones(1, requires_grad=True)
            with device.context(min_offload_size=MINIMUM, learn=True):
                y = x * table[3]
            y.sum().backward()
            kept.append(torchoffload.stats().records_kept.get("lives_on", 0))
        assert kept == [0, 0, 1, 1]


@pytest.mark.devices("simulated-late", "privateuseone")
def test_a_part_that_is_in_flight_counts_with_its_storage(device_under_test: Device):
    """Its source keeps all of the storage, whose bytes the window has to hold."""
    window_bytes = 8 * ROW_BYTES
    with device_under_test.scope() as simulation, device_under_test.torch_device:
        x = torch.ones(1, requires_grad=True)
        with device_under_test.context(min_offload_size=MINIMUM, offload_window_bytes=window_bytes):
            outputs = []
            for row in range(4):
                big = torch.ones(ROWS, 1024) + row
                outputs.append(x * big[row])
                del big
            torch.ones(1, requires_grad=True).sin()
            held_bytes = simulation.allocated_bytes() - sum(output.nbytes for output in outputs)
        assert held_bytes <= window_bytes
        torch.stack([output.sum() for output in outputs]).sum().backward()
        assert x.grad is not None
        assert x.grad.item() == 1024 * (1 + 2 + 3 + 4)


@pytest.mark.devices("simulated-late", "privateuseone")
def test_parts_of_one_storage_in_flight_count_it_once(device_under_test: Device):
    torchoffload.reset_stats()
    with device_under_test.scope(), device_under_test.torch_device:
        x = torch.ones(1, requires_grad=True)
        with device_under_test.context(min_offload_size=0, offload_window_bytes=4 * BIG_BYTES):
            big = torch.ones(ROWS, 1024)
            outputs = [x * each for each in big.split(ROWS // 4)]
            del big
            torch.ones(1, requires_grad=True).sin()
        stats = torchoffload.stats()
        assert stats.records_offloaded >= 4
        assert BIG_BYTES <= stats.peak_offload_window_bytes < BIG_BYTES + ROW_BYTES
        torch.stack([output.sum() for output in outputs]).sum().backward()
        del outputs
