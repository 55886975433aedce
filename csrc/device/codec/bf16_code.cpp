#include "device/codec/bf16_code.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace torchoffload::codec {

namespace {

using Block = std::array<uint16_t, kBlockValues>;
using Distances = std::array<uint8_t, kDistanceBytes>;
using Rests = std::array<uint8_t, kBlockValues>;  // signs and mantissas

uint32_t exponent_of(uint16_t value) { return value >> 7 & 0xff; }

// The largest exponent, and at least 1.
uint32_t top_of(const Block& block) {
  uint32_t top = 1;
  for (const uint16_t value : block) top = std::max(top, exponent_of(value));
  return top;
}

uint32_t distance_of(uint16_t value, uint32_t top) {
  const uint32_t exponent = exponent_of(value);
  return exponent == 0 ? kExponentIsZero : top - exponent;
}

bool is_exception(const Block& block, uint32_t top) {
  return std::any_of(block.begin(), block.end(), [top](uint16_t value) {
    return exponent_of(value) != 0 && distance_of(value, top) > kMostDistance;
  });
}

void encode_block(const std::byte* raw, std::byte* payload, std::byte* top_place, std::byte* overflow) {
  Block block;
  std::memcpy(block.data(), raw, kBlockBytes);
  const uint32_t top = top_of(block);
  if (is_exception(block, top)) {
    std::memcpy(payload, raw, kPayloadBytes);
    std::memcpy(overflow, raw + kPayloadBytes, kOverflowBytes);
    *top_place = std::byte{kExceptionTop};
    return;
  }
  Distances distances{};
  Rests rests;
  for (size_t place = 0; place < kBlockValues; ++place) {
    const uint16_t value = block[place];
    distances[place / 2] |= static_cast<uint8_t>(distance_of(value, top) << (place % 2 * 4));
    rests[place] = static_cast<uint8_t>((value >> 8 & 0x80) | (value & 0x7f));
  }
  std::memcpy(payload, distances.data(), distances.size());
  std::memcpy(payload + kDistanceBytes, rests.data(), rests.size());
  *top_place = static_cast<std::byte>(top);
}

void decode_block(std::byte* raw, const std::byte* payload, std::byte top_place, const std::byte* overflow) {
  const auto top = std::to_integer<uint32_t>(top_place);
  if (top == kExceptionTop) {
    std::memcpy(raw, payload, kPayloadBytes);
    std::memcpy(raw + kPayloadBytes, overflow, kOverflowBytes);
    return;
  }
  Block block;
  for (size_t place = 0; place < kBlockValues; ++place) {
    const auto both = std::to_integer<uint32_t>(payload[place / 2]);
    const uint32_t distance = both >> (place % 2 * 4) & 15;
    const uint32_t exponent = distance == kExponentIsZero ? 0 : top - distance;
    const auto rest = std::to_integer<uint32_t>(payload[kDistanceBytes + place]);
    block[place] = static_cast<uint16_t>((rest & 0x80) << 8 | exponent << 7 | (rest & 0x7f));
  }
  std::memcpy(raw, block.data(), kBlockBytes);
}

}  // namespace

void encode(const std::byte* raw, uint64_t raw_bytes, std::byte* coded, std::byte* overflow, uint64_t tag) {
  const PieceLayout layout = PieceLayout::of(raw_bytes);
  for (uint64_t block = 0; block < layout.block_count; ++block) {
    encode_block(raw + block * kBlockBytes, coded + block * kPayloadBytes, coded + layout.tops_begin + block,
                 overflow + block * kOverflowBytes);
  }
  std::copy_n(raw + layout.block_count * kBlockBytes, layout.tail_bytes, coded + layout.tail_begin);
  std::memcpy(coded + layout.tag_begin, &tag, sizeof(tag));
}

void decode(std::byte* raw, uint64_t raw_bytes, const std::byte* coded, const std::byte* overflow) {
  const PieceLayout layout = PieceLayout::of(raw_bytes);
  for (uint64_t block = 0; block < layout.block_count; ++block) {
    decode_block(raw + block * kBlockBytes, coded + block * kPayloadBytes, coded[layout.tops_begin + block],
                 overflow + block * kOverflowBytes);
  }
  std::copy_n(coded + layout.tail_begin, layout.tail_bytes, raw + layout.block_count * kBlockBytes);
}

std::optional<Exceptions> sample_exceptions(const std::byte* slot, const Pieces& pieces, uint64_t tag) {
  constexpr uint64_t kSeenAtOnce = 256;    // neighbours share a cache line
  constexpr uint64_t kApartBlocks = 8192;  // one run of neighbours of so many blocks
  Exceptions found;
  for (uint64_t index = 0; index < pieces.count(); ++index) {
    const Piece piece = pieces.at(index);
    const PieceLayout layout = PieceLayout::of(piece.raw.nbytes());
    const std::byte* const coded = slot + piece.coded.begin;
    uint64_t arrived_tag = 0;
    std::memcpy(&arrived_tag, coded + layout.tag_begin, sizeof(arrived_tag));
    if (arrived_tag != tag) return std::nullopt;
    for (uint64_t begin = 0; begin < layout.block_count; begin += kApartBlocks) {
      const uint64_t end = std::min(begin + kSeenAtOnce, layout.block_count);
      const std::byte* const tops = coded + layout.tops_begin;
      found.count += static_cast<uint64_t>(std::count(tops + begin, tops + end, std::byte{kExceptionTop}));
      found.seen += end - begin;
    }
  }
  return found;
}

}  // namespace torchoffload::codec
