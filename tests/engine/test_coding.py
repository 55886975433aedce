"""What the link carries coded: gradients, counts, staging memory, and code that gets ready in the background.

On the simulated device, whose reference code takes every dtype, in pieces of 1024 bytes.
"""

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchoffload
from coded_copies import codes_held_up
from devices import Device
from timed_steps import LEAST_MEMORY

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
