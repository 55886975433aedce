// piece: what of a record is coded at a time, and where its coded bytes stand.
// Ownership:     values only.
// Thread safety: immutable values; any thread.
//
// Note [The code for bfloat16]
// A bfloat16 value is a sign, 8 bits of exponent and 7 bits of mantissa. Neighbouring values have similar exponents. So
// of each *block* of 256 values the code keeps the largest exponent (the block's top), of each value 4 bits that say
// how far below the top its exponent is, and its sign and mantissa unchanged:
//
//   raw block, 512 bytes      coded block, 385 bytes
//   256 values                128 bytes of distances: value v has the low (v even) or high half of byte v / 2
//                             256 bytes of signs and mantissas: byte v is sign << 7 | mantissa
//                             1 byte: the top
//
// A distance of 0 to 14 stands for the exponent top - distance. A distance of 15 stands for the exponent 0, whatever
// the top is: zeros of both signs, and subnormal numbers, whose mantissas are kept as all mantissas are. A block with a
// value whose exponent is neither 0 nor within 14 of the top is an *exception*: it is kept as it is, the first 384
// bytes where a coded block would have its own, and the other 128 in the block's own place of an overflow area. Its top
// is written as 0, which no coded block has: where all exponents are 0, the top is written as 1. So every bit pattern
// comes back, whatever it stands for.
//
// What a block takes on the link is known before it is coded, except for the overflow of exceptions. The encoder writes
// that straight to host memory, and the decoder reads it there. So nobody asks the device how much there is to copy.
//
// A record is coded in pieces, which bounds the device memory that holds coded bytes on their way. Coded bytes of a
// piece are one range, and are copied as one:
//   [384 bytes of each block][the top of each block][the tail as it is: what is less than a block][the tag, at a
//   multiple of 8], in all a multiple of 128 bytes.
// The tag is a number that the encoder is given. Whoever finds it in a slot knows that the piece has arrived there.
//
// A slot begins with the overflow area, 128 bytes for each block of the record; the pieces follow, each at a multiple
// of 128 bytes. A slot is larger than the record by 1/512 and at most 640 bytes a piece, which keeps it below n + n/64
// from 64 KiB a piece on.
//
// Other dtypes are not coded. float16 has 5 bits of exponent, of which 4 bits of distance would save one. float32 has 4
// bits of 32 to save, an eighth at best, where bfloat16 saves a quarter. Masks are rare in what language models save.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/types.h"

namespace torchoffload::codec {

inline constexpr uint64_t kBlockValues = 256;
inline constexpr uint64_t kBlockBytes = 2 * kBlockValues;
inline constexpr uint64_t kPayloadBytes = 384;                           // of a block in its piece, but for the top
inline constexpr uint64_t kOverflowBytes = kBlockBytes - kPayloadBytes;  // of an exception
inline constexpr uint64_t kDistanceBytes = kBlockValues / 2;
inline constexpr uint64_t kMostDistance = 14;
inline constexpr uint64_t kExponentIsZero = 15;  // as a distance
inline constexpr uint64_t kExceptionTop = 0;
inline constexpr uint64_t kPieceAlignmentBytes = 128;

// Where the parts of a coded piece of `raw_bytes` stand, from its first byte.
struct PieceLayout {
  uint64_t block_count = 0;
  uint64_t tail_bytes = 0;
  uint64_t tops_begin = 0;
  uint64_t tail_begin = 0;
  uint64_t tag_begin = 0;
  uint64_t nbytes = 0;

  static constexpr PieceLayout of(uint64_t raw_bytes) {
    PieceLayout layout;
    layout.block_count = raw_bytes / kBlockBytes;
    layout.tail_bytes = raw_bytes % kBlockBytes;
    layout.tops_begin = layout.block_count * kPayloadBytes;
    layout.tail_begin = layout.tops_begin + layout.block_count;
    layout.tag_begin = round_up(layout.tail_begin + layout.tail_bytes, sizeof(uint64_t));
    layout.nbytes = round_up(layout.tag_begin + sizeof(uint64_t), kPieceAlignmentBytes);
    return layout;
  }
};

// One piece of a record: its raw bytes, and its coded and overflow bytes in the record's slot.
struct Piece {
  Span raw;
  Span coded;
  uint64_t overflow_begin = 0;
};

// A record's pieces. Each has `piece_bytes` of raw bytes, a multiple of kBlockBytes, but for the last.
class Pieces {
 public:
  constexpr Pieces(uint64_t record_bytes, uint64_t piece_bytes)
      : record_bytes_(record_bytes), piece_bytes_(piece_bytes) {}

  constexpr uint64_t count() const { return (record_bytes_ + piece_bytes_ - 1) / piece_bytes_; }

  constexpr Piece at(uint64_t index) const {
    const uint64_t raw_begin = index * piece_bytes_;
    const uint64_t raw_end = std::min(raw_begin + piece_bytes_, record_bytes_);
    const uint64_t coded_begin = overflow_bytes() + index * PieceLayout::of(piece_bytes_).nbytes;
    return {{raw_begin, raw_end},
            {coded_begin, coded_begin + PieceLayout::of(raw_end - raw_begin).nbytes},
            raw_begin / kBlockBytes * kOverflowBytes};
  }

  constexpr uint64_t slot_bytes() const { return count() == 0 ? 0 : at(count() - 1).coded.end; }

  // What of it is copied, without the overflow of exceptions.
  constexpr uint64_t copied_bytes() const { return slot_bytes() - overflow_bytes(); }

 private:
  constexpr uint64_t overflow_bytes() const { return record_bytes_ / kBlockBytes * kOverflowBytes; }

  uint64_t record_bytes_;
  uint64_t piece_bytes_;
};

}  // namespace torchoffload::codec
