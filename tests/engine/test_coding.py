"""What the link carries coded: gradients, counts, staging memory, and when ``compress="auto"`` codes.

On the simulated device, whose reference code takes every dtype, in pieces of 1024 bytes.
"""

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchoffload
from devices import Device
from timed_steps import COPY_S, LEAST_MEMORY, RECORD_BYTES, forward, scope_with_a_link, step

pytest.importorskip("torchoffload._C_testing", reason="the simulated device is in the test build alone")

from torchoffload import _C_testing

testing = _C_testing.testing
pytestmark = pytest.mark.devices("simulated-late", "simulated-early", "simulated-seeded")

PIECE_BYTES = 1024
LANES = 4  # each way
LANE_BYTES = 1152  # a block but for its last byte, which is kept as it is, a tag, and what makes it round


@pytest.fixture(autouse=True)
def nothing_is_known() -> Iterator[None]:
    gc.collect()
    torchoffload.trim()
    torchoffload.reset_stats()
    testing.forget_learned()
    yield
    testing.forget_learned()


def gradient_of(device: Device, x: torch.Tensor, **options: Any) -> torch.Tensor:
    with device.context(**({"compress": False} | options)):
        y = x
        for _ in range(4):
            y = (y * y.sin()).exp()
    (gradient,) = torch.autograd.grad(y.sum(), x)
    return gradient


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [257, 1023, 1024, 5000])
def test_gradients_are_those_of_stock(device_under_test: Device, dtype: torch.dtype, numel: int):
    with device_under_test.scope():
        x = torch.randn(numel, dtype=dtype).requires_grad_()
        coded = [gradient_of(device_under_test, x, compress=True) for _ in range(3)]
        raw = gradient_of(device_under_test, x)
    for gradient in coded:
        assert torch.equal(gradient, raw)
    assert torchoffload.stats().records_coded > 0


def test_bits_that_are_no_numbers_come_back(device_under_test: Device):
    with device_under_test.scope():
        every_value = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
        blocks = torch.cat([every_value, every_value.flip(0), every_value[::257].repeat(300)])
        x = blocks.view(torch.bfloat16).clone().requires_grad_()
        with device_under_test.context(compress=True):
            y = x.clone() * torch.ones_like(x, requires_grad=True)
        saved = y.grad_fn._saved_self
        assert torch.equal(saved.view(torch.int16), blocks)
    assert torchoffload.stats().blocks_excepted == 0, "nothing was released yet"
    del y, saved
    stats = torchoffload.stats()
    assert 0 < stats.blocks_excepted <= stats.blocks_seen


def test_a_part_of_a_storage_is_coded_too(device_under_test: Device):
    with device_under_test.scope():
        whole = torch.randn(64, 300).bfloat16()
        x = torch.randn(7, 300).bfloat16().requires_grad_()
        with device_under_test.context(compress=True):
            y = (x * whole[3:10]).sum()
        (gradient,) = torch.autograd.grad(y, x)
        assert torch.equal(gradient, whole[3:10])
    assert torchoffload.stats().records_coded == 1


def test_counts(device_under_test: Device):
    numel = 4 * PIECE_BYTES // 2
    with device_under_test.scope():
        x = torch.rand(numel).add(1).bfloat16().requires_grad_()
        with device_under_test.context(compress=True):
            y = x.sin()
        y.sum().backward()
        del y
    stats = torchoffload.stats()
    assert (stats.records_coded, stats.bytes_coded) == (1, 2 * numel)
    assert stats.bytes_coded_on_link == 4 * 896  # 385 bytes of each of two blocks, a tag, and what makes it round
    assert (stats.blocks_seen, stats.blocks_excepted) == (8, 0)
    assert stats.staging_bytes == 2 * LANES * LANE_BYTES
    assert (stats.tapes[-1].records_coded, stats.tapes[-1].blocks_seen) == (1, 8)
    assert "coded" in torchoffload.report()
    assert "0.875 of it on the link; 0.0% of blocks were exceptions" in torchoffload.report()


def test_exceptions_are_counted_by_module(device_under_test: Device):
    class Sines(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

    model = torch.nn.Sequential(Sines(), Sines())
    with device_under_test.scope():
        x = torch.rand(4 * PIECE_BYTES // 2).add(1).bfloat16().requires_grad_()
        with torch.no_grad():
            x.view(torch.int16)[:512] = torch.arange(512, dtype=torch.int16) * 64  # two blocks of all exponents
        options = {"min_offload_size": 0, "compress": True, "learn": False, **LEAST_MEMORY}
        with torchoffload.offload_modules(model, ["0", "1"], **options) as handle:
            y = model(x)
            y.sum().backward()
            del y
            first, second = handle.stats()
            assert (first.blocks_seen, first.blocks_excepted) == (8, 2)
            assert second.blocks_seen == 8
            assert "25.0% exceptions" in torchoffload.report()


def test_small_records_are_not_coded(device_under_test: Device):
    with device_under_test.scope():
        x = torch.rand(200).bfloat16().requires_grad_()
        gradient_of(device_under_test, x, compress=True)
    stats = torchoffload.stats()
    assert stats.records_offloaded > 0
    assert stats.records_coded == 0


def test_the_budget_counts_what_a_coded_slot_takes(device_under_test: Device):
    numel = 64 * PIECE_BYTES // 2
    with device_under_test.scope():
        x = torch.rand(numel).bfloat16().requires_grad_()
        with device_under_test.context(compress=True):
            y = x.sin()
        used = torchoffload.stats().budget_bytes_used
        del y
        scarce = device_under_test.context(compress=True, budget_bytes=2 * numel, on_full="error")
        with pytest.raises(RuntimeError, match="budget"), scarce:
            x.sin()
    assert used > 2 * numel


def test_staging_memory_is_given_back_by_trim(device_under_test: Device):
    with device_under_test.scope() as simulation:
        x = torch.rand(1000).requires_grad_()
        with device_under_test.context(compress=True):
            y = x.sin()
        torchoffload.trim()
        assert torchoffload.stats().staging_bytes > 0, "a tape is alive"
        y.sum().backward()
        del y
        before = testing.allocated_bytes(0)
        staging_bytes = torchoffload.stats().staging_bytes
        torchoffload.trim()
        assert torchoffload.stats().staging_bytes == 0
        assert before - testing.allocated_bytes(0) >= staging_bytes
        simulation.check()
        gradient_of(device_under_test, x, compress=True)
        assert torchoffload.stats().staging_bytes == staging_bytes


def test_where_the_self_test_fails_nothing_is_coded(device_under_test: Device):
    testing.refuse_coding("the self-test failed")
    try:
        with device_under_test.scope():
            x = torch.rand(1000).requires_grad_()
            raw, coded = (gradient_of(device_under_test, x, compress=compress) for compress in (False, True))
        assert torch.equal(raw, coded)
        assert torchoffload.stats().records_coded == 0
        assert "compress is off on cpu: the self-test failed" in torchoffload.report()
    finally:
        testing.refuse_coding("")
    assert "compress is off" not in torchoffload.report()


def test_without_memory_for_staging_nothing_is_coded(device_under_test: Device):
    with device_under_test.scope():
        x = torch.rand(1000).requires_grad_()
        raw = gradient_of(device_under_test, x)
        testing.limit_device_memory(testing.allocated_bytes(0) + LANE_BYTES)  # refuses what follows two lanes
        try:
            with device_under_test.context(compress=True):
                y = x.sin()
        finally:
            testing.limit_device_memory(None)
        assert torchoffload.stats().staging_bytes == 0
        del y
        assert torch.equal(raw, gradient_of(device_under_test, x, compress=True))
    assert 0 < torchoffload.stats().records_coded < torchoffload.stats().records_offloaded


def test_where_memory_is_scarce_there_are_fewer_lanes(device_under_test: Device):
    with device_under_test.scope():
        x = torch.rand(8 * PIECE_BYTES // 4).requires_grad_()
        small = torch.rand(4).requires_grad_()
        raw = gradient_of(device_under_test, x)
        testing.limit_device_memory(testing.allocated_bytes(0) + 3 * LANE_BYTES)  # refuses what follows four lanes
        try:
            with device_under_test.context(compress=True):
                y = small.sin()
        finally:
            testing.limit_device_memory(None)
        del y
        assert torchoffload.stats().staging_bytes == LANES * LANE_BYTES
        assert torch.equal(raw, gradient_of(device_under_test, x, compress=True))
        assert torchoffload.stats().staging_bytes == LANES * LANE_BYTES


def test_threads_code_at_once(device_under_test: Device):
    results: dict[int, torch.Tensor] = {}

    def train(index: int) -> None:
        x = (torch.arange(3000) % (index + 7)).float().requires_grad_()
        results[index] = gradient_of(device_under_test, x, compress=True)

    with device_under_test.scope():
        threads = [threading.Thread(target=train, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index in range(4):
            x = (torch.arange(3000) % (index + 7)).float().requires_grad_()
            assert torch.equal(results[index], gradient_of(device_under_test, x))


def test_coded_and_other_records_in_one_step(device_under_test: Device):
    with device_under_test.scope():
        x = torch.rand(100, 90).requires_grad_()
        small = torch.rand(90).requires_grad_()

        def gradients(**options: Any) -> tuple[torch.Tensor, ...]:
            with device_under_test.context(**options):
                y = ((x * small).sin() * small.sin()).exp() + x.relu()
            return torch.autograd.grad(y.sum(), [x, small])

        for coded, raw in zip(gradients(compress=True), gradients(), strict=True):
            assert torch.equal(coded, raw)
    stats = torchoffload.stats()
    assert 0 < stats.records_coded < stats.records_offloaded


# ---- codes that are made ready in the background ----


@contextlib.contextmanager
def codes_held_up() -> Iterator[None]:
    testing.hold_coding(True)
    try:
        yield
    finally:
        testing.hold_coding(False)


def test_copies_are_raw_until_the_code_is_ready_and_no_step_waits_for_it(device_under_test: Device):
    with device_under_test.scope():
        x = torch.randn(3000).requires_grad_()
        raw = gradient_of(device_under_test, x)
        with codes_held_up():
            steps = [gradient_of(device_under_test, x, compress=True) for _ in range(2)]
            stats = torchoffload.stats()
            assert (stats.records_coded, stats.staging_bytes, stats.coding_obstacles) == (0, 0, {})
        steps += [gradient_of(device_under_test, x, compress=True)]
    assert torchoffload.stats().records_coded == stats.records_offloaded // 3
    for gradient in steps:
        assert torch.equal(gradient, raw)


def test_a_tape_that_is_open_as_the_code_gets_ready_goes_on_as_it_began(device_under_test: Device):
    with device_under_test.scope():
        x = torch.rand(3000).requires_grad_()
        with device_under_test.context(compress=True):
            with codes_held_up():
                y = x.sin()
            z = y.exp().sin()
        assert torchoffload.stats().records_coded == 0
        (gradient,) = torch.autograd.grad(z.sum(), x)
        with device_under_test.context():
            z = x.sin().exp().sin()
        assert torch.equal(gradient, torch.autograd.grad(z.sum(), x)[0])


@pytest.mark.parametrize("compress", [True, "auto"])
def test_the_code_is_begun_as_a_context_that_may_code_is_entered_first(device_under_test: Device, compress: Any):
    with device_under_test.scope(), codes_held_up():
        context = device_under_test.context(compress=compress)
        assert not testing.is_coding_awaited()
        with context:
            assert testing.is_coding_awaited()


@pytest.mark.parametrize("options", [{"compress": False}, {"compress": "auto", "use_streams": False}])
def test_no_other_context_begins_it(device_under_test: Device, options: dict[str, Any]):
    with device_under_test.scope(), codes_held_up():
        gradient_of(device_under_test, torch.rand(3000).requires_grad_(), **options)
        assert not testing.is_coding_awaited()


def test_a_record_that_is_coded_later_finds_the_slot_that_it_had_raw(device_under_test: Device):
    """Records of several sizes take as many bytes of slots coded as raw, so they fit in the same budget."""

    def step(**options: Any) -> tuple[int, int]:
        torchoffload.reset_stats()
        with device_under_test.context(compress=True, **options):
            saved = [x.sin() for x in leaves]
        torch.autograd.grad(sum(y.sum() for y in saved), leaves)
        del saved
        return torchoffload.stats().peak_slot_bytes, torchoffload.stats().records_coded

    with device_under_test.scope():
        leaves = [torch.rand(numel).requires_grad_() for numel in (5000, 70_001, 1 << 20, 3 << 18)]
        with codes_held_up():
            raw_bytes, coded = step()
            assert coded == 0
        for _ in range(3):
            assert step(budget_bytes=raw_bytes, on_full="error") == (raw_bytes, len(leaves))


def test_slots_of_contexts_that_never_code_have_the_size_of_their_records(device_under_test: Device):
    with device_under_test.scope():
        x = torch.rand(1 << 16).requires_grad_()
        for options in ({"compress": False}, {"compress": "auto", "learn": False}):
            torchoffload.reset_stats()
            with device_under_test.context(**options):
                y = x.sin()
            assert torchoffload.stats().peak_slot_bytes == x.nbytes
            del y


# ---- auto ----


@contextlib.contextmanager
def coding_that_takes(piece_s: float) -> Iterator[None]:
    testing.set_coding_time(0, piece_s)
    try:
        yield
    finally:
        testing.set_coding_time(0, 0.0)


def coded_records(device: Device, layers: int, steps: int, **options: Any) -> list[int]:
    """How many records each step coded."""
    counts = []
    for _ in range(steps):
        torchoffload.reset_stats()
        step(device, layers, learn=True, **(LEAST_MEMORY | options))
        counts.append(torchoffload.stats().records_coded)
    return counts


def test_auto_codes_from_the_fourth_step_where_the_link_binds(device_under_test: Device):
    with scope_with_a_link(device_under_test):
        counts = coded_records(device_under_test, 8, 12, compress="auto")
        assert counts[:3] == [0, 0, 0]
        assert all(count > 0 for count in counts[3:])
        assert torchoffload.stats().codes_given_up == {}


def test_auto_ends_raw_where_the_step_takes_longer_coded(device_under_test: Device):
    """The kernels that code are held up, as by a kernel of the program that leaves them no processor."""
    with scope_with_a_link(device_under_test), coding_that_takes(COPY_S / 8):
        counts = coded_records(device_under_test, 8, 12, compress="auto")
        assert [count > 0 for count in counts] == [False] * 3 + [True] * 3 + [False] * 6
        assert torchoffload.stats().staging_bytes == 0, "it is given up with the code"
        ((raw_s, coded_s),) = torchoffload.stats().codes_given_up["cpu"]
        assert coded_s > raw_s > 8 * COPY_S
        said = f"took {1000 * coded_s:.1f} ms coded and {1000 * raw_s:.1f} ms as they were"
        assert said in torchoffload.report()
        testing.forget_learned()
        assert torchoffload.stats().codes_given_up == {}
        assert coded_records(device_under_test, 8, 4, compress="auto")[-1] > 0


def test_true_codes_though_the_step_takes_longer(device_under_test: Device):
    with scope_with_a_link(device_under_test), coding_that_takes(COPY_S / 8):
        assert all(count > 0 for count in coded_records(device_under_test, 8, 12, compress=True))


def test_a_step_that_goes_raw_again_is_planned_by_times_of_raw_copies(device_under_test: Device):
    """As many records are kept as where nothing was ever coded."""
    kept = {}
    for compress in (False, "auto"):
        with scope_with_a_link(device_under_test), coding_that_takes(COPY_S / 8):
            testing.forget_learned()
            for _ in range(12):
                torchoffload.reset_stats()
                with device_under_test.context(learn=True, compress=compress):
                    loss = forward(device_under_test, 40)
                loss.backward()
                del loss
            kept[compress] = (torchoffload.stats().records_offloaded, torchoffload.stats().records_kept)
    assert kept["auto"] == kept[False]


def test_steps_that_overlap_are_coded_without_a_trial(device_under_test: Device):
    """Where two graphs are alive at once the time of neither is its own."""
    with scope_with_a_link(device_under_test), coding_that_takes(COPY_S / 8):
        for _ in range(10):
            torchoffload.reset_stats()
            losses = []
            for _ in range(2):
                with device_under_test.context(learn=True, compress="auto", **LEAST_MEMORY):
                    losses.append(forward(device_under_test, 8))
            for loss in losses:
                loss.backward()
            del loss, losses
        assert torchoffload.stats().records_coded > 0
        assert torchoffload.stats().codes_given_up == {}


def test_coding_that_is_ready_late_is_tried_then(device_under_test: Device):
    with scope_with_a_link(device_under_test), coding_that_takes(COPY_S / 8):
        with codes_held_up():
            assert coded_records(device_under_test, 8, 20, compress="auto") == [0] * 20
        counts = coded_records(device_under_test, 8, 6, compress="auto")
        assert [count > 0 for count in counts] == [True] * 3 + [False] * 3


def test_auto_does_not_code_where_computing_hides_the_copies(device_under_test: Device):
    with scope_with_a_link(device_under_test):
        testing.set_link(0, 100 * RECORD_BYTES / COPY_S)
        windows = {"offload_window_bytes": 4 * RECORD_BYTES, "reload_window_bytes": 4 * RECORD_BYTES}
        assert coded_records(device_under_test, 8, 8, compress="auto", **windows) == [0] * 8
        assert torchoffload.stats().staging_bytes == 0


def test_auto_leaves_out_what_did_not_get_smaller(device_under_test: Device):
    """The layers' inputs are powers of two, each one number: no exceptions. Random bits are all exceptions."""

    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, noise):
            ctx.save_for_backward(noise)
            testing.advance(0, 1e-5)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            ctx.saved_tensors  # noqa: B018
            return gradient, None

    def one(compress: str) -> int:
        torchoffload.reset_stats()
        with device_under_test.context(learn=True, compress=compress, **LEAST_MEMORY):
            x = torch.ones(64, 64, requires_grad=True)
            for _ in range(4):
                x = Save.apply(x, torch.randint(-(2**31), 2**31 - 1, (64, 64), dtype=torch.int32))
                x = Save.apply(x, torch.full((64, 64), 1.5))
            loss = x.sum()
        loss.backward()
        del loss, x
        return torchoffload.stats().records_coded

    with scope_with_a_link(device_under_test):
        counts = [one("auto") for _ in range(6)]
    assert counts[:4] == [0, 0, 0, 8]
    assert counts[-1] == 4
