"""float32 that holds bfloat16 values: coded once an earlier step was seen to save such, and only while it pays.

On the simulated device, which codes the dtypes that a CUDA device codes here, in pieces of 1024 bytes.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import torchoffload
from devices import Device
from timed_steps import LEAST_MEMORY, scope_with_a_link

pytest.importorskip("torchoffload._C_testing", reason="the simulated device is in the test build alone")

from torchoffload import _C_testing

testing = _C_testing.testing
pytestmark = pytest.mark.devices("simulated-late", "simulated-early", "simulated-seeded")

SHAPE = (64, 64)  # sixteen pieces

Make = Callable[[], torch.Tensor]


@pytest.fixture(autouse=True)
def codes_are_as_on_cuda() -> Iterator[None]:
    gc.collect()
    torchoffload.trim()
    torchoffload.reset_stats()
    testing.forget_learned()
    testing.code_as_on_cuda(True)
    yield
    testing.code_as_on_cuda(False)
    testing.forget_learned()


class Scale(torch.autograd.Function):
    """Multiplies by a factor that it saves, and computes for a while."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(factor)
        testing.advance(0, 1e-5)
        return x * factor

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (factor,) = ctx.saved_tensors
        return gradient * factor, None


def widened() -> torch.Tensor:
    return torch.rand(SHAPE).add(1).bfloat16().float()


def not_widened() -> torch.Tensor:
    return torch.rand(SHAPE).add(1)


def widened_but_for_one_value() -> torch.Tensor:
    """The 16 blocks of the record are few enough for each to be looked at."""
    factor = widened()
    factor.view(-1)[torch.randint(factor.numel(), ())] = 1 + 2**-20
    return factor


def of_bfloat16() -> torch.Tensor:
    return torch.rand(SHAPE).add(1).bfloat16()


def of_int32() -> torch.Tensor:
    return torch.ones(SHAPE, dtype=torch.int32)


def gradient_of_step(device: Device, factors: Sequence[Make], seed: int, **options: Any) -> torch.Tensor:
    torch.manual_seed(seed)
    with device.context(**({"learn": True} | LEAST_MEMORY | options)):
        x = torch.ones(SHAPE, requires_grad=True)
        y = x
        for make in factors:
            y = Scale.apply(y, make())
        loss = y.sum()
    (gradient,) = torch.autograd.grad(loss, x)
    return gradient


def coded_in_step(device: Device, factors: Sequence[Make], seed: int = 0, **options: Any) -> int:
    """How many records the step coded; its gradient has to be the one that is got without coding."""
    wanted = gradient_of_step(device, factors, seed, compress=False, learn=False)
    torchoffload.reset_stats()
    got = gradient_of_step(device, factors, seed, **({"compress": True} | options))
    assert torch.equal(got, wanted)
    return torchoffload.stats().records_coded


def test_what_was_seen_to_be_widened_is_coded_from_the_next_step_on(device_under_test: Device):
    with device_under_test.scope():
        counts = [coded_in_step(device_under_test, [widened, not_widened, widened], seed) for seed in range(5)]
    assert counts == [0, 2, 2, 2, 2]
    stats = torchoffload.stats()
    assert stats.bytes_coded_on_link == 2 * 16 * 512  # of each block 385 bytes, a tag, and what makes it round
    assert (stats.blocks_seen, stats.blocks_excepted) == (32, 0)


def test_bfloat16_is_coded_from_the_first_step_on(device_under_test: Device):
    with device_under_test.scope():
        counts = [coded_in_step(device_under_test, [of_bfloat16, widened, of_int32], seed) for seed in range(3)]
    assert counts == [1, 2, 2]


def test_without_learning_nothing_is_known_to_be_widened(device_under_test: Device):
    with device_under_test.scope():
        factors = [widened, of_bfloat16]
        assert [coded_in_step(device_under_test, factors, learn=False) for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("make", [not_widened, widened_but_for_one_value])
def test_what_was_seen_not_to_be_widened_is_not_coded(device_under_test: Device, make: Make):
    with device_under_test.scope():
        assert [coded_in_step(device_under_test, [make, make], seed) for seed in range(4)] == [0, 0, 0, 0]


def test_what_is_widened_later_is_noticed(device_under_test: Device):
    with device_under_test.scope():
        counts = [coded_in_step(device_under_test, [make]) for make in (not_widened, not_widened, widened, widened)]
    assert counts == [0, 0, 0, 1]


def test_what_stops_being_widened_is_coded_once_more_and_then_never(device_under_test: Device):
    made = (widened, widened, not_widened, not_widened, widened, widened)
    with device_under_test.scope():
        counts = [coded_in_step(device_under_test, [make], seed) for seed, make in enumerate(made)]
    assert counts == [0, 1, 1, 0, 0, 0]


def test_a_few_exceptions_do_not_matter(device_under_test: Device):
    made = (widened, widened, widened_but_for_one_value, widened_but_for_one_value)
    with device_under_test.scope():
        counts = [coded_in_step(device_under_test, [make], seed) for seed, make in enumerate(made)]
    assert counts == [0, 1, 1, 1]
    assert (torchoffload.stats().blocks_seen, torchoffload.stats().blocks_excepted) == (16, 1)


def test_bytes_of_another_step_may_give_a_wrong_hint(device_under_test: Device):
    """A graph is dropped before its copies run: what its slot holds is of the step before."""
    factors = [not_widened, not_widened]
    with device_under_test.scope():
        for seed in range(2):
            coded_in_step(device_under_test, [widened, widened], seed, learn=False)  # the slots' former bytes
        with device_under_test.context(learn=True, compress=True, **LEAST_MEMORY):
            y = torch.ones(SHAPE, requires_grad=True)
            for make in factors:
                y = Scale.apply(y, make())
        del y
        counts = [coded_in_step(device_under_test, factors, seed) for seed in range(3)]
    assert counts[1:] == [0, 0], "the step that was misled has taught that it was"


def test_the_host_learns_though_it_is_ahead_of_the_device(device_under_test: Device):
    """Each graph is dropped before its copies run, so that what is seen in its slots is of the step before."""

    def step(make: Make) -> int:
        torchoffload.reset_stats()
        with device_under_test.context(learn=True, compress=True, **LEAST_MEMORY | {"offload_window_bytes": 1 << 20}):
            x = torch.ones(SHAPE, requires_grad=True)
            y = Scale.apply(Scale.apply(x, make()), make())
        del y
        coded = torchoffload.stats().records_coded
        with device_under_test.context():
            y = torch.ones(40, requires_grad=True).sin()
        y.sum().backward()  # waits for a copy behind the others
        return coded

    made = [widened] * 4 + [not_widened] * 4
    with device_under_test.scope():
        counts = [step(make) for make in made]
    assert counts[3] == 2
    assert counts[-1] == 0


def test_auto_codes_it_where_the_link_binds(device_under_test: Device):
    factors = [of_bfloat16, widened, not_widened] * 3
    with scope_with_a_link(device_under_test):
        counts = [coded_in_step(device_under_test, factors, seed, compress="auto") for seed in range(8)]
    assert counts[:3] == [0, 0, 0]
    assert counts[3] == 3, "only bfloat16 is coded in the step whose float32 records are looked at first"
    assert counts[4:] == [6, 6, 0, 6], "one more step is timed as it is"


def test_auto_does_not_code_it_where_computing_hides_the_copies(device_under_test: Device):
    with scope_with_a_link(device_under_test):
        testing.set_link(0, 1e12)
        factors = [of_bfloat16, widened] * 3
        windows = {"offload_window_bytes": 1 << 20, "reload_window_bytes": 1 << 20}
        counts = [coded_in_step(device_under_test, factors, seed, compress="auto", **windows) for seed in range(7)]
    assert counts == [0] * 7


def test_other_lengths_know_it_too(device_under_test: Device):
    """The lesson belongs to the structure of a step, which does not depend on the batch's length."""

    def coded(length: int, seed: int) -> int:
        def make() -> torch.Tensor:
            return torch.rand(length, 64).add(1).bfloat16().float()

        torch.manual_seed(seed)
        torchoffload.reset_stats()
        with device_under_test.context(learn=True, compress=True, **LEAST_MEMORY):
            x = torch.ones(length, 64, requires_grad=True)
            y = Scale.apply(Scale.apply(x, make()), make())
        y.sum().backward()
        torch.manual_seed(seed)
        assert torch.equal(x.grad, make() * make())
        return torchoffload.stats().records_coded

    with device_under_test.scope():
        assert [coded(length, length) for length in (64, 48, 57, 64)] == [0, 2, 2, 2]


def test_bits_that_are_no_numbers_come_back(device_under_test: Device):
    every_value = torch.arange(1 << 16, dtype=torch.int32) << 16
    nan = torch.full((1 << 16,), 0x7FC00000, dtype=torch.int32)
    kinds = [
        every_value,
        every_value.flip(0),
        every_value | 1,
        torch.randint(-(2**31), 2**31 - 1, (1 << 16,), dtype=torch.int32),
        torch.where(torch.arange(1 << 16) % 1031 == 0, every_value | 1, nan),
    ]

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor, kept: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
            ctx.seen = seen
            ctx.save_for_backward(kept)
            return x * 2

        @staticmethod
        def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
            ctx.seen.append(ctx.saved_tensors[0].view(torch.int32).clone())
            return gradient, None, None

    def step(bits: torch.Tensor) -> int:
        torchoffload.reset_stats()
        seen: list[torch.Tensor] = []
        with device_under_test.context(learn=True, compress=True, **LEAST_MEMORY):
            x = torch.ones(4, requires_grad=True)
            y = Keep.apply(x, bits.clone().view(torch.float32), seen)
        y.sum().backward()
        assert torch.equal(seen[0], bits)
        del y
        return torchoffload.stats().records_coded

    for bits in kinds:
        with device_under_test.scope():
            testing.forget_learned()
            assert step(torch.full((1 << 16,), 0x3F800000, dtype=torch.int32)) == 0
            assert step(bits) == 1
            step(bits)
