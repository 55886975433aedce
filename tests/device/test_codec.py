"""The lossless code for bfloat16: the reference, and the GPU's kernels run on the host, lane by lane."""

import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

testing = pytest.importorskip("torchoffload._C_testing", reason="it is reached through the test build alone").testing

codec = testing.codec

VALUES_OF_BLOCK = 256
KERNEL_WARPS = (1, 3)


def coded_both_ways(raw: bytes, modulo: int = 0) -> int:
    """The number of exceptions, after everything that codes has coded `raw` and brought it back."""
    coded, overflow = codec.encode(raw, modulo, tag=7)
    assert codec.decode(coded, overflow, len(raw), modulo) == raw
    blocks = len(raw) // 512
    tops = coded[384 * blocks : 385 * blocks]
    exceptions = [block for block in range(blocks) if tops[block] == 0]
    meaning = meaning_of(coded, len(raw))
    for warp_count in KERNEL_WARPS:
        by_kernel, overflow_by_kernel = codec.encode(raw, modulo, tag=7, warp_count=warp_count)
        assert meaning_of(by_kernel, len(raw)) == meaning
        for block in exceptions:
            place = slice(128 * block, 128 * block + 128)
            assert overflow_by_kernel[place] == overflow[place]
        assert codec.decode(coded, overflow, len(raw), modulo, warp_count=warp_count) == raw
    return len(exceptions)


def meaning_of(coded: bytes, raw_bytes: int) -> tuple[bytes, int]:
    """A coded piece without what is only there for the sake of alignment: (blocks and tail, tag)."""
    blocks, tail = divmod(raw_bytes, 512)
    end = 385 * blocks + tail
    tag_begin = -(-end // 8) * 8
    return coded[:end], struct.unpack_from("<Q", coded, tag_begin)[0]


def of_values(values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}H", *values)


def test_each_value_in_each_place_of_a_block() -> None:
    # In turn k, value v stands in place (v + k) % 256, among 255 neighbours of its own.
    everything = list(range(1 << 16))
    for turn in range(VALUES_OF_BLOCK):
        coded_both_ways(of_values(everything[turn:] + everything[:turn]))


@pytest.mark.parametrize("background", [0x0000, 0x8000, 0x0001, 0x3F80, 0x7F80, 0xFFC1])
def test_each_value_in_a_block_of_one_other_value(background: int) -> None:
    place = 0
    values = []
    for value in range(1 << 16):
        block = [background] * VALUES_OF_BLOCK
        place = (place + 101) % VALUES_OF_BLOCK
        block[place] = value
        values += block
        if len(values) == 1 << 20:
            raw = of_values(values)
            coded, overflow = codec.encode(raw)
            assert codec.decode(coded, overflow, len(raw)) == raw
            assert codec.decode(*codec.encode(raw, warp_count=1), len(raw), warp_count=1) == raw
            values = []
    assert not values


@pytest.mark.parametrize(
    ("values", "exceptions"),
    [
        pytest.param([0x0000, 0x8000], 0, id="zeros of both signs"),
        pytest.param([0x0001, 0x807F, 0x0000], 0, id="subnormal numbers alone"),
        pytest.param([0x0001, 0x807F, 0x3F80], 0, id="subnormal numbers beside one"),
        pytest.param([0x7F80, 0xFF80], 0, id="infinities"),
        pytest.param([0x7F81, 0xFFFF, 0x7FC0], 0, id="NaNs with payloads"),
        pytest.param([0x7F80, 0x0000], 0, id="a mask: infinity and zero"),
        pytest.param([0x7F80, 0x3F80], 1, id="infinity beside one"),
        pytest.param([0x3F80, (127 - 14) << 7], 0, id="14 below the top"),
        pytest.param([0x3F80, (127 - 15) << 7], 1, id="15 below the top"),
        pytest.param([15 << 7, 1 << 7, 0x0001], 0, id="the smallest normal number, 14 below"),
        pytest.param([16 << 7, 1 << 7], 1, id="the smallest normal number, 15 below"),
        pytest.param([0x7F00, 0x0080], 1, id="the largest and the smallest normal number"),
    ],
)
def test_what_is_an_exception(values: list[int], exceptions: int) -> None:
    block = (values * VALUES_OF_BLOCK)[:VALUES_OF_BLOCK]
    assert coded_both_ways(of_values(block)) == exceptions
    assert coded_both_ways(of_values(block[::-1])) == exceptions
    one_among_others = [values[0]] * (VALUES_OF_BLOCK - len(values) + 1) + values[1:]
    assert coded_both_ways(of_values(one_among_others)) == exceptions


@pytest.mark.parametrize("modulo", [0, 1, 2, 8, 15, 16, 510])
@pytest.mark.parametrize("length", [0, 1, 2, 511, 512, 513, 1023, 1024, 5 * 512 + 77, 40 * 512 + 6])
def test_any_length_and_alignment(length: int, modulo: int) -> None:
    coded_both_ways(random.Random(length).randbytes(length), modulo)


@settings(max_examples=200, deadline=None)
@given(
    length=st.integers(0, 6 * 512),
    modulo=st.integers(0, 63),
    exponents=st.lists(st.integers(0, 255), min_size=1, max_size=6),
    seed=st.integers(0, 1 << 32),
)
def test_random_values(length: int, modulo: int, exponents: list[int], seed: int) -> None:
    chosen = random.Random(seed)
    values = [
        chosen.getrandbits(1) << 15 | chosen.choice(exponents) << 7 | chosen.getrandbits(7)
        for _ in range(length // 2 + 1)
    ]
    coded_both_ways(of_values(values)[:length], modulo)


def test_like_activations_a_quarter_is_saved() -> None:
    chosen = random.Random(0)
    # bfloat16 keeps the upper half of a float32.
    halves = [struct.pack("<f", chosen.gauss(0, 1))[2:] for _ in range(64 * VALUES_OF_BLOCK)]
    exceptions = coded_both_ways(b"".join(halves))
    assert exceptions <= 8


@given(record_bytes=st.integers(1, 1 << 24), piece_blocks=st.integers(128, 1 << 15))
def test_a_slot_is_at_most_a_64th_larger_than_its_record(record_bytes: int, piece_blocks: int) -> None:
    piece_bytes = 512 * piece_blocks
    slot_bytes = codec.slot_bytes(record_bytes, piece_bytes)
    assert slot_bytes <= record_bytes + record_bytes // 64 + 640
    blocks = record_bytes // 512
    raw_end, slot_end = 0, 128 * blocks
    for raw_begin, end, coded_begin, coded_end, overflow_begin in codec.pieces(record_bytes, piece_bytes):
        assert (raw_begin, coded_begin, overflow_begin) == (raw_end, slot_end, raw_begin // 512 * 128)
        assert coded_begin % 128 == 0
        assert coded_end - coded_begin == codec.piece_bytes(end - raw_begin)
        raw_end, slot_end = end, coded_end
    assert (raw_end, slot_end) == (record_bytes, slot_bytes)
