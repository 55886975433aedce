"""The values of one saved tensor, coded: all bits of each kind of value, at each place, come back.

By the kernels on CUDA. On the simulated device, with smaller pieces and by the host's reference, this shows that the
tests do what has a record coded: float32 is coded only where an earlier step has shown that it suits.
"""

import gc
from collections.abc import Iterator

import pytest
import torch

import torchoffload
from coded_copies import (
    codes_of_cuda,
    of_bfloat16_bits,
    options_for,
    piece_bytes,
    random_bits,
    same_bits,
    save_and_read,
    saved_and_back,
)
from devices import Device

pytestmark = pytest.mark.devices("simulated-late", "simulated-early", "simulated-seeded", "cuda")

BLOCK_VALUES = 256

both_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])


@pytest.fixture(autouse=True)
def on_the_device(device_under_test: Device) -> Iterator[None]:
    gc.collect()
    with codes_of_cuda(device_under_test), device_under_test.scope():
        yield
        gc.collect()


def stats_of_one_record() -> torchoffload.OffloadStats:
    stats = torchoffload.stats()
    assert stats.records_coded == stats.records_offloaded == 1
    assert stats.blocks_seen > 0
    return stats


@both_dtypes
@pytest.mark.parametrize("sixteenths", [1, 8, 16, 17, 57, 160])
@pytest.mark.parametrize("more_values", [0, 3, 255])
def test_activations_come_back(device_under_test: Device, dtype: torch.dtype, sixteenths: int, more_values: int):
    device = device_under_test
    numel = max(sixteenths * piece_bytes(device) // 16, 512) // dtype.itemsize + more_values
    values = torch.randn(numel, device=device.torch_device).bfloat16().to(dtype)
    assert same_bits(saved_and_back(device, values), values)
    if numel < BLOCK_VALUES:
        return
    stats = stats_of_one_record()
    assert stats.bytes_coded == values.nbytes
    if device.name == "cuda":  # where pieces are large
        most_on_link = 0.38 if dtype == torch.float32 else 0.76
        assert stats.bytes_coded_on_link < most_on_link * stats.bytes_coded + 4096
        assert stats.blocks_excepted <= 0.2 * stats.blocks_seen


@both_dtypes
@pytest.mark.parametrize("turn", [0, 1, 100, 255])
def test_each_value_comes_back(device_under_test: Device, dtype: torch.dtype, turn: int):
    apart = 64 if device_under_test.is_simulated else 1  # each value is too many for the host
    everything = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    some = everything[turn % apart :: apart]
    alone = torch.zeros(len(some), BLOCK_VALUES, dtype=torch.int16)  # each value in a block of zeros
    alone[:, turn] = some
    neighbours = everything.roll(turn).repeat(16 // min(apart, 16))
    for bits in (alone.view(-1), neighbours, neighbours[torch.randperm(len(neighbours))]):
        values = of_bfloat16_bits(device_under_test, bits, dtype)
        assert same_bits(saved_and_back(device_under_test, values), values)
        stats_of_one_record()


@both_dtypes
@pytest.mark.parametrize("seed", range(4))
def test_random_bits_come_back(device_under_test: Device, dtype: torch.dtype, seed: int):
    numel = 9 * piece_bytes(device_under_test) // 8 + 11 * seed
    values = random_bits(device_under_test, numel, seed, dtype)
    assert same_bits(saved_and_back(device_under_test, values), values)
    stats = stats_of_one_record()
    assert stats.blocks_excepted == stats.blocks_seen


@pytest.mark.parametrize("place", [0, 1, 100, 255])
@pytest.mark.parametrize("lower_half", [0x0001, 0x0100, 0x8000, 0xFFFF, None])
def test_one_value_of_a_block_that_was_not_widened_comes_back(
    device_under_test: Device, place: int, lower_half: int | None
):
    """Of each third block; None: any lower half but zero."""
    device = device_under_test
    blocks = piece_bytes(device) // 2048 if device.name == "cuda" else 96
    bits = torch.rand(blocks, BLOCK_VALUES, device=device.torch_device).add(1).bfloat16().float().view(torch.int32)
    excepted = bits[::3, place]
    halves = torch.randint(1, 1 << 16, excepted.shape, dtype=torch.int32) if lower_half is None else lower_half
    bits[::3, place] = excepted | (halves.to(device.torch_device) if lower_half is None else halves)
    values = bits.view(-1).view(torch.float32)
    assert same_bits(saved_and_back(device, values), values)
    stats = stats_of_one_record()
    assert 0.3 * stats.blocks_seen < stats.blocks_excepted < 0.4 * stats.blocks_seen


@both_dtypes
@pytest.mark.parametrize("offset", [1, 3, 4, 8, 129])
def test_a_view_at_any_place_of_its_storage_comes_back(device_under_test: Device, dtype: torch.dtype, offset: int):
    """A part of a storage moves as a record of its own, from an address that no vector load takes."""
    numel = max(piece_bytes(device_under_test) // 8, 1024)
    whole = torch.ones(8 * numel, dtype=dtype, device=device_under_test.torch_device)
    part = whole[offset : offset + numel + 5]
    options = options_for(dtype)
    save_and_read(device_under_test, lambda: part, options)  # has taught that float32 suits
    whole.copy_(random_bits(device_under_test, 8 * numel, dtype=dtype))
    assert same_bits(save_and_read(device_under_test, lambda: part, options), part)
    stats = stats_of_one_record()
    assert stats.bytes_coded == part.nbytes
