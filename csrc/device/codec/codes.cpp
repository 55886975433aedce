#include "device/codec/codes.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace torchoffload::codec {

namespace {

using Block = std::array<uint16_t, kBlockValues>;  // bfloat16 values
using Distances = std::array<uint8_t, kDistanceBytes>;
using Rests = std::array<uint8_t, kBlockValues>;  // signs and mantissas

// The values of a block in bfloat16. nullopt: there is one that was not widened from it.
std::optional<Block> narrowed(Code code, const std::byte* raw) {
  Block block;
  if (code == Code::Bfloat16) {
    std::memcpy(block.data(), raw, sizeof(block));
    return block;
  }
  for (size_t place = 0; place < kBlockValues; ++place) {
    uint32_t value = 0;
    std::memcpy(&value, raw + place * sizeof(value), sizeof(value));
    if ((value & 0xffff) != 0) return std::nullopt;
    block[place] = static_cast<uint16_t>(value >> 16);
  }
  return block;
}

void widen(Code code, const Block& block, std::byte* raw) {
  if (code == Code::Bfloat16) {
    std::memcpy(raw, block.data(), sizeof(block));
    return;
  }
  for (size_t place = 0; place < kBlockValues; ++place) {
    const uint32_t value = uint32_t{block[place]} << 16;
    std::memcpy(raw + place * sizeof(value), &value, sizeof(value));
  }
}

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

bool is_within_reach(const Block& block, uint32_t top) {
  return std::all_of(block.begin(), block.end(), [top](uint16_t value) {
    return exponent_of(value) == 0 || distance_of(value, top) <= kMostDistance;
  });
}

// The values of a block that can be coded. nullopt: it is an exception.
std::optional<Block> codable_block(Code code, const std::byte* raw) {
  const std::optional<Block> block = narrowed(code, raw);
  return block && is_within_reach(*block, top_of(*block)) ? block : std::nullopt;
}

void encode_block(Code code, const std::byte* raw, std::byte* payload, std::byte* top_place, std::byte* overflow) {
  const std::optional<Block> block = codable_block(code, raw);
  if (!block) {
    const BlockBytes bytes = block_of(code);
    std::memcpy(payload, raw, bytes.payload);
    std::memcpy(overflow, raw + bytes.payload, bytes.overflow());
    *top_place = std::byte{kExceptionTop};
    return;
  }
  const uint32_t top = top_of(*block);
  Distances distances{};
  Rests rests;
  for (size_t place = 0; place < kBlockValues; ++place) {
    const uint16_t value = (*block)[place];
    distances[place / 2] |= static_cast<uint8_t>(distance_of(value, top) << (place % 2 * 4));
    rests[place] = static_cast<uint8_t>((value >> 8 & 0x80) | (value & 0x7f));
  }
  std::memcpy(payload, distances.data(), distances.size());
  std::memcpy(payload + kDistanceBytes, rests.data(), rests.size());
  *top_place = static_cast<std::byte>(top);
}

void decode_block(Code code, std::byte* raw, const std::byte* payload, std::byte top_place, const std::byte* overflow) {
  const auto top = std::to_integer<uint32_t>(top_place);
  if (top == kExceptionTop) {
    const BlockBytes bytes = block_of(code);
    std::memcpy(raw, payload, bytes.payload);
    std::memcpy(raw + bytes.payload, overflow, bytes.overflow());
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
  widen(code, block, raw);
}

}  // namespace

void encode(Code code, const std::byte* raw, uint64_t raw_bytes, std::byte* coded, std::byte* overflow, uint64_t tag) {
  const BlockBytes bytes = block_of(code);
  const PieceLayout layout = PieceLayout::of(code, raw_bytes);
  for (uint64_t block = 0; block < layout.block_count; ++block) {
    encode_block(code, raw + block * bytes.raw, coded + block * bytes.payload, coded + layout.tops_begin + block,
                 overflow + block * bytes.overflow());
  }
  std::copy_n(raw + layout.block_count * bytes.raw, layout.tail_bytes, coded + layout.tail_begin);
  std::memcpy(coded + layout.tag_begin, &tag, sizeof(tag));
}

void decode(Code code, std::byte* raw, uint64_t raw_bytes, const std::byte* coded, const std::byte* overflow) {
  const BlockBytes bytes = block_of(code);
  const PieceLayout layout = PieceLayout::of(code, raw_bytes);
  for (uint64_t block = 0; block < layout.block_count; ++block) {
    decode_block(code, raw + block * bytes.raw, coded + block * bytes.payload, coded[layout.tops_begin + block],
                 overflow + block * bytes.overflow());
  }
  std::copy_n(coded + layout.tail_begin, layout.tail_bytes, raw + layout.block_count * bytes.raw);
}

std::optional<Exceptions> sample_exceptions(const std::byte* slot, const Pieces& pieces, uint64_t tag) {
  constexpr uint64_t kSeenAtOnce = 256;    // neighbours share a cache line
  constexpr uint64_t kApartBlocks = 8192;  // one run of neighbours of so many blocks
  Exceptions found;
  for (uint64_t index = 0; index < pieces.count(); ++index) {
    const Piece piece = pieces.at(index);
    const PieceLayout layout = PieceLayout::of(pieces.code(), piece.raw.nbytes());
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

double link_share(Code code, const std::byte* raw, uint64_t raw_bytes) {
  const BlockBytes bytes = block_of(code);
  const uint64_t block_count = raw_bytes / bytes.raw;
  uint64_t link_bytes = block_count * (bytes.payload + 1);  // with the top
  for (uint64_t block = 0; block < block_count; ++block) {
    if (!codable_block(code, raw + block * bytes.raw)) link_bytes += bytes.overflow();
  }
  if (block_count == 0) return 1;
  return std::min(1.0, static_cast<double>(link_bytes) / static_cast<double>(block_count * bytes.raw));
}

bool looks_codable(Code code, const std::byte* raw, uint64_t raw_bytes) {
  constexpr uint64_t kLookedAt = 16;
  const uint64_t block_bytes = block_of(code).raw;
  const uint64_t block_count = raw_bytes / block_bytes;
  const uint64_t apart = std::max<uint64_t>(block_count / kLookedAt, 1);
  bool is_zero = true;
  for (uint64_t block = apart / 2; block < block_count; block += apart) {
    const std::byte* const first = raw + block * block_bytes;
    if (!codable_block(code, first)) return false;
    is_zero = is_zero && std::all_of(first, first + block_bytes, [](std::byte byte) { return byte == std::byte{0}; });
  }
  return !is_zero;
}

}  // namespace torchoffload::codec
