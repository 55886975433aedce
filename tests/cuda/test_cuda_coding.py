"""Coded copies on a GPU: bits, alignments, pieces, streams, captures, memory that is written over once it is free."""

import gc
import threading
from collections.abc import Iterator

import pytest
import torch

import torchoffload
from devices import Device
from gradients import Run, assert_same_gradients

pytestmark = [pytest.mark.cuda, pytest.mark.devices("cuda")]

MIB = 1 << 20
DELAY_CYCLES = 20_000_000  # about 10 ms
NOTHING_AHEAD = {"offload_window_bytes": 0, "reload_window_bytes": 0}


@pytest.fixture(autouse=True)
def from_zero() -> Iterator[None]:
    gc.collect()
    torchoffload.reset_stats()
    yield
    gc.collect()


def saved_and_back(device: Device, values: torch.Tensor) -> torch.Tensor:
    """What backward reads of `values`, a bfloat16 tensor on the GPU, once its memory was written over."""
    weight = torch.ones_like(values, requires_grad=True)
    kept = values.clone(memory_format=torch.preserve_format)
    del values
    with device.context(compress=True, **NOTHING_AHEAD):
        y = kept * weight
    shape = kept.shape
    del kept
    garbage = [torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    del garbage
    saved = y.grad_fn._saved_self
    return saved if saved is not None else y.grad_fn._saved_other


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.int16), right.contiguous().view(torch.int16))


def random_bits(numel: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(1 << 15), 1 << 15, (numel,), dtype=torch.int16, generator=generator)
    return bits.cuda().view(torch.bfloat16)


def test_no_device_here_has_an_obstacle(device_under_test: Device):
    saved_and_back(device_under_test, torch.randn(MIB, device="cuda").bfloat16())
    stats = torchoffload.stats()
    assert stats.coding_obstacles == {}
    assert stats.records_coded == 1
    assert 0 < stats.staging_bytes <= 64 * MIB


@pytest.mark.parametrize("numel", [MIB // 2, MIB + 3, 8 * MIB, 8 * MIB + 255, 20 * MIB + 77])
def test_activations_come_back(device_under_test: Device, numel: int):
    values = torch.randn(numel, device="cuda").bfloat16()
    assert same_bits(saved_and_back(device_under_test, values), values)
    torch.cuda.synchronize()
    gc.collect()
    stats = torchoffload.stats()
    assert stats.records_coded == 1
    assert stats.bytes_coded_on_link < 0.76 * stats.bytes_coded + 4096
    assert stats.blocks_excepted <= 0.2 * max(stats.blocks_seen, 1)


@pytest.mark.parametrize("turn", [0, 1, 100, 255])
def test_each_value_comes_back(device_under_test: Device, turn: int):
    everything = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    alone = torch.zeros(1 << 16, 256, dtype=torch.int16)  # each value in a block of zeros
    alone[:, turn] = everything
    neighbours = everything.roll(turn).repeat(16)
    for values in (alone.view(-1), neighbours, everything[torch.randperm(1 << 16)].repeat(32)):
        moved = values.cuda().view(torch.bfloat16)
        assert same_bits(saved_and_back(device_under_test, moved), moved)


@pytest.mark.parametrize("seed", range(4))
def test_random_bits_come_back(device_under_test: Device, seed: int):
    values = random_bits(9 * MIB + 11 * seed, seed)
    assert same_bits(saved_and_back(device_under_test, values), values)
    gc.collect()
    stats = torchoffload.stats()
    assert stats.blocks_excepted == stats.blocks_seen


@pytest.mark.parametrize("offset", [1, 3, 4, 8, 129])
def test_a_view_at_any_place_of_its_storage_comes_back(device_under_test: Device, offset: int):
    """A part of a storage moves as a record of its own, from an address that no vector load takes."""
    whole = random_bits(8 * MIB)
    part = whole[offset : offset + MIB + 5]
    weight = torch.ones_like(part, requires_grad=True)
    with device_under_test.context(compress=True, **NOTHING_AHEAD):
        y = part * weight
    saved = next(t for t in (y.grad_fn._saved_self, y.grad_fn._saved_other) if t is not None)
    assert same_bits(saved, part)
    assert torchoffload.stats().records_coded == 1


@pytest.mark.parametrize("options", [NOTHING_AHEAD, {}, {"learn": True}, {"compress": "auto", "learn": True}])
def test_gradients_are_those_of_stock(device_under_test: Device, options: dict[str, object]):
    def program(run: Run):
        weights = [run.leaf(1024, 1024) for _ in range(6)]
        for step in range(6):
            with run.offload(**({"compress": True} | options)):
                y = torch.randn(1024, 1024, device=run.device, dtype=torch.bfloat16)
                for number, weight in enumerate(weights):
                    y = torch.nn.functional.gelu(y @ weight.bfloat16()) + y
                    if step == 1 and number % 2 == 0:
                        torch.cuda._sleep(DELAY_CYCLES)
            y.float().square().mean().backward()
            run.check(gradients=[weight.grad.clone() for weight in weights])
            for weight in weights:
                weight.grad = None

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0)
    if "compress" not in options:
        assert torchoffload.stats().records_coded > 0


def test_side_streams_and_threads(device_under_test: Device):
    values = [torch.randn(3 * MIB + index, device="cuda").bfloat16() for index in range(4)]
    torch.cuda.synchronize()
    right = [False] * len(values)

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                right[index] = same_bits(saved_and_back(device_under_test, values[index]), values[index])
                if not right[index]:
                    return

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(values))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * len(values)


def test_a_capture_leaves_coding_alone(device_under_test: Device):
    x = torch.randn(2 * MIB, device="cuda").bfloat16().requires_grad_()

    def step() -> torch.Tensor:
        with device_under_test.context(compress=True):
            y = (x.sin() * x).exp().sum()
        (gradient,) = torch.autograd.grad(y, x)
        return gradient

    expected = step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert same_bits(captured, expected)
    assert same_bits(step(), expected)


def test_staging_memory_is_given_back_by_trim(device_under_test: Device):
    saved_and_back(device_under_test, torch.randn(MIB, device="cuda").bfloat16())
    gc.collect()
    before = torch.cuda.memory_allocated()
    staging_bytes = torchoffload.stats().staging_bytes
    torchoffload.trim()
    assert torchoffload.stats().staging_bytes == 0
    assert before - torch.cuda.memory_allocated() >= staging_bytes


def test_auto_codes_a_step_that_waits_for_the_link(device_under_test: Device):
    coded = []
    for _ in range(6):
        torchoffload.reset_stats()
        x = torch.randn(16 * MIB, device="cuda").bfloat16().requires_grad_()
        with device_under_test.context(compress="auto", learn=True, **NOTHING_AHEAD):
            y = x
            for _ in range(8):
                y = y.sin()
        y.sum().backward()
        del x, y
        gc.collect()
        torch.cuda.synchronize()
        coded.append(torchoffload.stats().records_coded)
    assert coded[0] == coded[1] == 0
    assert coded[-1] > 0
