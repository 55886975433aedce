"""The lossless codes: the reference for the host, and the GPU's kernels run on the host, lane by lane."""

import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

testing = pytest.importorskip("torchoffload._C_testing", reason="it is reached through the test build alone").testing

codec = testing.codec

BFLOAT16, WIDENED = codec.Code.BFLOAT16, codec.Code.WIDENED
CODES = (BFLOAT16, WIDENED)
BLOCK_BYTES = {BFLOAT16: 512, WIDENED: 1024}
VALUES_OF_BLOCK = 256
PAYLOAD_BYTES = 384
KERNEL_WARPS = (1, 3)

both_codes = pytest.mark.parametrize("code", CODES, ids=("bfloat16", "widened"))


def coded_both_ways(code, raw: bytes, modulo: int = 0) -> int:
    """The number of exceptions, after everything that codes has coded `raw` and brought it back."""
    coded, overflow = codec.encode(code, raw, modulo, tag=7)
    assert codec.decode(code, coded, overflow, len(raw), modulo) == raw
    blocks = len(raw) // BLOCK_BYTES[code]
    overflow_bytes = BLOCK_BYTES[code] - PAYLOAD_BYTES
    assert len(overflow) == overflow_bytes * blocks
    tops = coded[PAYLOAD_BYTES * blocks : (PAYLOAD_BYTES + 1) * blocks]
    exceptions = [block for block in range(blocks) if tops[block] == 0]
    meaning = meaning_of(code, coded, len(raw))
    for warp_count in KERNEL_WARPS:
        by_kernel, overflow_by_kernel = codec.encode(code, raw, modulo, tag=7, warp_count=warp_count)
        assert meaning_of(code, by_kernel, len(raw)) == meaning
        for block in exceptions:
            place = slice(overflow_bytes * block, overflow_bytes * (block + 1))
            assert overflow_by_kernel[place] == overflow[place]
        assert codec.decode(code, coded, overflow, len(raw), modulo, warp_count=warp_count) == raw
    on_link = (PAYLOAD_BYTES + 1) * blocks + overflow_bytes * len(exceptions)
    assert codec.link_share(code, raw) == (min(1, on_link / (BLOCK_BYTES[code] * blocks)) if blocks else 1)
    if blocks <= 16:
        has_values = any(raw[: blocks * BLOCK_BYTES[code]])
        assert codec.looks_codable(code, raw) == (has_values and not exceptions)
    return len(exceptions)


def meaning_of(code, coded: bytes, raw_bytes: int) -> tuple[bytes, int]:
    """A coded piece without what is only there for the sake of alignment: (blocks and tail, tag)."""
    blocks, tail = divmod(raw_bytes, BLOCK_BYTES[code])
    end = (PAYLOAD_BYTES + 1) * blocks + tail
    tag_begin = -(-end // 8) * 8
    return coded[:end], struct.unpack_from("<Q", coded, tag_begin)[0]


def of_values(code, values: list[int]) -> bytes:
    """bfloat16 values, given as 16 bits each: as they are, or widened to float32."""
    if code == BFLOAT16:
        return struct.pack(f"<{len(values)}H", *values)
    return struct.pack(f"<{len(values)}I", *(value << 16 for value in values))


@both_codes
def test_each_value_in_each_place_of_a_block(code) -> None:
    # In turn k, value v stands in place (v + k) % 256, among 255 neighbours of its own.
    everything = list(range(1 << 16))
    for turn in range(VALUES_OF_BLOCK):
        coded_both_ways(code, of_values(code, everything[turn:] + everything[:turn]))


@both_codes
@pytest.mark.parametrize("background", [0x0000, 0x8000, 0x0001, 0x3F80, 0x7F80, 0xFFC1])
def test_each_value_in_a_block_of_one_other_value(code, background: int) -> None:
    place = 0
    values = []
    for value in range(1 << 16):
        block = [background] * VALUES_OF_BLOCK
        place = (place + 101) % VALUES_OF_BLOCK
        block[place] = value
        values += block
        if len(values) == 1 << 20:
            raw = of_values(code, values)
            coded, overflow = codec.encode(code, raw)
            assert codec.decode(code, coded, overflow, len(raw)) == raw
            by_kernel = codec.encode(code, raw, warp_count=1)
            assert codec.decode(code, *by_kernel, len(raw), warp_count=1) == raw
            values = []
    assert not values


@both_codes
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
def test_what_is_an_exception(code, values: list[int], exceptions: int) -> None:
    block = (values * VALUES_OF_BLOCK)[:VALUES_OF_BLOCK]
    assert coded_both_ways(code, of_values(code, block)) == exceptions
    assert coded_both_ways(code, of_values(code, block[::-1])) == exceptions
    one_among_others = [values[0]] * (VALUES_OF_BLOCK - len(values) + 1) + values[1:]
    assert coded_both_ways(code, of_values(code, one_among_others)) == exceptions


@pytest.mark.parametrize("lower_half", [0x0001, 0x0100, 0x8000, 0xFFFF])
@pytest.mark.parametrize("upper_half", [0x0000, 0x3F80, 0x7F80, 0xFFC1])
def test_one_value_that_was_not_widened_is_an_exception(upper_half: int, lower_half: int) -> None:
    for place in range(VALUES_OF_BLOCK):
        words = [upper_half << 16] * (3 * VALUES_OF_BLOCK)
        words[VALUES_OF_BLOCK + place] |= lower_half
        assert coded_both_ways(WIDENED, struct.pack(f"<{len(words)}I", *words)) == 1


def test_each_lower_half_comes_back() -> None:
    for upper_half in (0x0000, 0x3F80, 0x7F80):
        words = [upper_half << 16 | lower_half for lower_half in range(1 << 16)]
        # The first block has the lower half 0 and 255 others.
        assert coded_both_ways(WIDENED, struct.pack(f"<{len(words)}I", *words)) == 256


@pytest.mark.parametrize("seed", range(3))
def test_float32_that_was_not_widened_is_all_exceptions(seed: int) -> None:
    chosen = random.Random(seed)
    raw = b"".join(struct.pack("<f", chosen.gauss(0, 1)) for _ in range(64 * VALUES_OF_BLOCK))
    assert coded_both_ways(WIDENED, raw) == 64
    assert not codec.looks_codable(WIDENED, raw)


def test_a_look_at_a_few_blocks() -> None:
    block_count = 1000
    widened = of_values(WIDENED, [0x3F80 + place % 64 for place in range(VALUES_OF_BLOCK * block_count)])
    assert codec.looks_codable(WIDENED, widened)
    assert codec.looks_codable(WIDENED, widened[: 1024 * 17 + 9])
    halves_differ = b"\x01" + bytes(1023)
    half = len(widened) // 2 // 1024 * 1024
    assert not codec.looks_codable(WIDENED, halves_differ * (half // 1024) + widened[half:])
    assert not codec.looks_codable(WIDENED, widened[:half] + halves_differ * (half // 1024))
    assert not codec.looks_codable(WIDENED, bytes(1023)), "there is no block"
    assert not codec.looks_codable(WIDENED, bytes(4096)), "nothing was written there"


@both_codes
@pytest.mark.parametrize("modulo", [0, 1, 2, 4, 8, 15, 16, 510])
@pytest.mark.parametrize("length", [0, 1, 2, 511, 512, 513, 1023, 1024, 1025, 5 * 512 + 77, 40 * 512 + 6])
def test_any_length_and_alignment(code, length: int, modulo: int) -> None:
    coded_both_ways(code, random.Random(length).randbytes(length), modulo)
    coded_both_ways(code, of_values(code, list(range(0x3F80, 0x3F80 + length // 2 + 1)))[:length], modulo)


@settings(max_examples=200, deadline=None)
@given(
    code=st.sampled_from(CODES),
    length=st.integers(0, 6 * 512),
    modulo=st.integers(0, 63),
    exponents=st.lists(st.integers(0, 255), min_size=1, max_size=6),
    seed=st.integers(0, 1 << 32),
    changed_byte=st.none() | st.integers(0, 6 * 512),
)
def test_random_values(
    code, length: int, modulo: int, exponents: list[int], seed: int, changed_byte: int | None
) -> None:
    chosen = random.Random(seed)
    values = [
        chosen.getrandbits(1) << 15 | chosen.choice(exponents) << 7 | chosen.getrandbits(7)
        for _ in range(length // 2 + 1)
    ]
    raw = bytearray(of_values(code, values)[:length])
    if changed_byte is not None and changed_byte < length:
        raw[changed_byte] ^= 1 << chosen.randrange(8)
    coded_both_ways(code, bytes(raw), modulo)


@both_codes
def test_activations_have_few_exceptions(code) -> None:
    chosen = random.Random(0)
    # bfloat16 keeps the upper half of a float32.
    values = [struct.unpack("<I", struct.pack("<f", chosen.gauss(0, 1)))[0] >> 16 for _ in range(64 * VALUES_OF_BLOCK)]
    assert coded_both_ways(code, of_values(code, values)) <= 8


@both_codes
@pytest.mark.parametrize("piece_bytes", [1024, 2048, 1 << 16])
def test_no_piece_takes_more_than_a_lane_has_room_for(code, piece_bytes: int) -> None:
    shorter = range(max(0, piece_bytes - 5000), piece_bytes + 1)
    most_bytes = max(codec.piece_bytes(code, raw_bytes) for raw_bytes in shorter)
    assert codec.most_coded_bytes(code, piece_bytes) == most_bytes


@given(code=st.sampled_from(CODES), record_bytes=st.integers(1, 1 << 24), piece_blocks=st.integers(64, 1 << 14))
def test_a_slot_is_at_most_a_64th_larger_than_its_record(code, record_bytes: int, piece_blocks: int) -> None:
    piece_bytes = 1024 * piece_blocks
    block_bytes = BLOCK_BYTES[code]
    overflow_bytes = block_bytes - PAYLOAD_BYTES
    slot_bytes = codec.slot_bytes(code, record_bytes, piece_bytes)
    assert slot_bytes <= record_bytes + record_bytes // 64 + 640
    raw_end, slot_end = 0, overflow_bytes * (record_bytes // block_bytes)
    for raw_begin, end, coded_begin, coded_end, overflow_begin in codec.pieces(code, record_bytes, piece_bytes):
        assert (raw_begin, coded_begin) == (raw_end, slot_end)
        assert overflow_begin == raw_begin // block_bytes * overflow_bytes
        assert coded_begin % 128 == 0
        assert coded_end - coded_begin == codec.piece_bytes(code, end - raw_begin)
        raw_end, slot_end = end, coded_end
    assert (raw_end, slot_end) == (record_bytes, slot_bytes)
