"""Coded copies on a GPU: bits, alignments, pieces, streams, captures, memory that is written over once it is free."""

import gc
import itertools
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
    """What backward reads of `values`, a tensor on the GPU, once its memory was written over.

    float32 is coded too: an earlier step has saved values of the same shape that were widened from bfloat16.
    """
    if values.dtype == torch.bfloat16:
        return _saved_and_back(device, values, **NOTHING_AHEAD)
    # What is learned belongs to the windows: with windows of their own, these two steps know of no others.
    windows = {"offload_window_bytes": 0, "reload_window_bytes": next(_window_bytes), "learn": True}
    teaching = _saved_and_back(device, torch.ones_like(values), **windows)
    torch.cuda.synchronize()
    del teaching
    gc.collect()
    torchoffload.reset_stats()
    return _saved_and_back(device, values, **windows)


_window_bytes = itertools.count(1)


def _saved_and_back(device: Device, values: torch.Tensor, **options: object) -> torch.Tensor:
    weight = torch.ones_like(values, requires_grad=True)
    kept = values.clone(memory_format=torch.preserve_format)
    del values
    with device.context(compress=True, **options):
        y = kept * weight
    shape, dtype = kept.shape, kept.dtype
    del kept
    garbage = [torch.full(shape, float("nan"), dtype=dtype, device="cuda") for _ in range(4)]
    del garbage
    saved = y.grad_fn._saved_self
    return saved if saved is not None else y.grad_fn._saved_other


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    assert left.dtype == right.dtype
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def random_bits(numel: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return bits.cuda().view(dtype)


def test_no_device_here_has_an_obstacle(device_under_test: Device):
    saved_and_back(device_under_test, torch.randn(MIB, device="cuda").bfloat16())
    stats = torchoffload.stats()
    assert stats.coding_obstacles == {}
    assert stats.records_coded == 1
    assert 0 < stats.staging_bytes <= 200 * MIB


@pytest.mark.parametrize("numel", [MIB // 2, MIB + 3, 8 * MIB, 8 * MIB + 255, 20 * MIB + 77])
@pytest.mark.parametrize(
    ("dtype", "most_on_link"), [(torch.bfloat16, 0.76), (torch.float32, 0.38)], ids=["bfloat16", "widened"]
)
def test_activations_come_back(device_under_test: Device, numel: int, dtype: torch.dtype, most_on_link: float):
    values = torch.randn(numel, device="cuda").bfloat16().to(dtype)
    assert same_bits(saved_and_back(device_under_test, values), values)
    torch.cuda.synchronize()
    gc.collect()
    stats = torchoffload.stats()
    assert stats.records_coded == 1
    assert stats.bytes_coded_on_link < most_on_link * stats.bytes_coded + 4096
    assert stats.blocks_excepted <= 0.2 * max(stats.blocks_seen, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "widened"])
@pytest.mark.parametrize("turn", [0, 1, 100, 255])
def test_each_value_comes_back(device_under_test: Device, turn: int, dtype: torch.dtype):
    everything = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    alone = torch.zeros(1 << 16, 256, dtype=torch.int16)  # each value in a block of zeros
    alone[:, turn] = everything
    neighbours = everything.roll(turn).repeat(16)
    for values in (alone.view(-1), neighbours, everything[torch.randperm(1 << 16)].repeat(32)):
        moved = values.cuda().view(torch.bfloat16)
        if dtype == torch.float32:  # by their bits: converting would make NaNs quiet
            moved = (values.cuda().int() << 16).view(torch.float32)
        assert same_bits(saved_and_back(device_under_test, moved), moved)
        assert torchoffload.stats().records_coded > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", range(4))
def test_random_bits_come_back(device_under_test: Device, seed: int, dtype: torch.dtype):
    values = random_bits(9 * MIB + 11 * seed, seed, dtype)
    assert same_bits(saved_and_back(device_under_test, values), values)
    gc.collect()
    stats = torchoffload.stats()
    assert stats.records_coded == 1
    assert stats.blocks_excepted == stats.blocks_seen


@pytest.mark.parametrize("place", [0, 1, 100, 255])
def test_one_value_of_a_block_that_was_not_widened_comes_back(device_under_test: Device, place: int):
    bits = torch.randn(1 << 13, 256, device="cuda").bfloat16().float().view(torch.int32)
    bits[::3, place] |= torch.randint(1, 1 << 16, bits[::3, place].shape, device="cuda", dtype=torch.int32)
    values = bits.view(-1).view(torch.float32)
    assert same_bits(saved_and_back(device_under_test, values), values)
    gc.collect()
    stats = torchoffload.stats()
    assert stats.records_coded == 1
    assert 0.2 * stats.blocks_seen < stats.blocks_excepted < stats.blocks_seen


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


def layers_in_bfloat16(run: Run, options: dict[str, object], width: int) -> None:
    """Steps of layers that begin with a normalisation in float32, as language models do."""
    weights = [run.leaf(width, width) for _ in range(6)]
    for step in range(6):
        with run.offload(**({"compress": True} | options)):
            y = torch.randn(width, width, device=run.device, dtype=torch.bfloat16)
            for number, weight in enumerate(weights):
                wide = y.float()
                normed = wide * wide.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
                y = torch.nn.functional.gelu(normed.bfloat16() @ weight.bfloat16()) + y
                if run.device.type == "cuda" and step == 1 and number % 2 == 0:
                    torch.cuda._sleep(DELAY_CYCLES)
        y.float().square().mean().backward()
        run.check(gradients=[weight.grad.clone() for weight in weights])
        for weight in weights:
            weight.grad = None


@pytest.mark.parametrize("options", [NOTHING_AHEAD, {}, {"learn": True}, {"compress": "auto", "learn": True}])
def test_gradients_are_those_of_stock(device_under_test: Device, options: dict[str, object]):
    def program(run: Run):
        layers_in_bfloat16(run, options, width=1024)

    # Learned plans keep what the windows have room for; but the first step is learned from, and moves all.
    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.1)
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


def test_what_was_seen_to_be_widened_is_coded_from_then_on(device_under_test: Device):
    coded = []
    for step in range(4):
        torchoffload.reset_stats()
        x = torch.randn(4 * MIB, device="cuda").bfloat16().requires_grad_()
        y = x
        with device_under_test.context(compress=True, learn=True, offload_window_bytes=0, reload_window_bytes=77):
            for _ in range(4):
                y = y.float().sin().bfloat16()  # saves its input, which was widened
                y = (y.float() + step / 3).sin().bfloat16()  # saves a sum, which was not, but for the first step's
        y.float().sum().backward()
        del x, y
        torch.cuda.synchronize()
        gc.collect()
        coded.append(torchoffload.stats().records_coded)
    assert coded[0] == 0
    assert coded[1] >= 4
    assert coded[3] == 4


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
