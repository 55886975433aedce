// piece: the part of a record that is coded at a time, and the layout of its coded bytes.
// Ownership:     values only.
// Thread safety: immutable values; any thread.
//
// Note [Pieces of a record]
// A record is coded in pieces, which bounds the device memory that holds coded bytes on their way. Coded bytes of a
// piece are one range, and are copied as one:
//   [the payload of each block][the top of each block][the tail as it is: less than a block][the tag, at a multiple of
//   8], in all a multiple of 128 bytes.
// The tag is a number that the encoder is given. It names the record, and is the same in each step. If the host finds
// it in a slot, the piece has arrived there, in this step or an earlier one: the host may be ahead of the device.
//
// A slot begins with the overflow area, which has a place for each block of the record; the pieces follow, each at a
// multiple of 128 bytes. See Note [Lossless codes] for blocks and their overflow. A slot is larger than the record by
// 1/512 and at most 640 bytes a piece, which keeps it below n + n/64 from 64 KiB a piece on.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/types.h"
#include "device/codec/block.h"

namespace torchoffload::codec {

inline constexpr uint64_t kPieceAlignmentBytes = 128;

// The places of the parts of a coded piece of `raw_bytes`, from its first byte.
struct PieceLayout {
  uint64_t block_count = 0;
  uint64_t tail_bytes = 0;
  uint64_t tops_begin = 0;
  uint64_t tail_begin = 0;
  uint64_t tag_begin = 0;
  uint64_t nbytes = 0;

  static constexpr PieceLayout of(Code code, uint64_t raw_bytes) {
    const BlockBytes block = block_of(code);
    PieceLayout layout;
    layout.block_count = raw_bytes / block.raw;
    layout.tail_bytes = raw_bytes % block.raw;
    layout.tops_begin = layout.block_count * block.payload;
    layout.tail_begin = layout.tops_begin + layout.block_count;
    layout.tag_begin = round_up(layout.tail_begin + layout.tail_bytes, sizeof(uint64_t));
    layout.nbytes = round_up(layout.tag_begin + sizeof(uint64_t), kPieceAlignmentBytes);
    return layout;
  }
};

// The most bytes that a coded piece of at most `raw_bytes` takes. A piece that lacks one byte of its last block may
// take more than a whole one, since the rest of that block is kept as it is.
constexpr uint64_t most_coded_bytes(Code code, uint64_t raw_bytes) {
  return std::max(PieceLayout::of(code, raw_bytes).nbytes, PieceLayout::of(code, raw_bytes - 1).nbytes);
}

// The bytes of the overflow area for `raw_bytes`.
constexpr uint64_t overflow_bytes(Code code, uint64_t raw_bytes) {
  return raw_bytes / block_of(code).raw * block_of(code).overflow();
}

// One piece of a record: its raw bytes, and its coded and overflow bytes in the record's slot.
struct Piece {
  Span raw;
  Span coded;
  uint64_t overflow_begin = 0;
};

// A record's pieces. Each has `piece_bytes` of raw bytes, a multiple of the block's, but for the last.
class Pieces {
 public:
  constexpr Pieces(Code code, uint64_t record_bytes, uint64_t piece_bytes)
      : code_(code), record_bytes_(record_bytes), piece_bytes_(piece_bytes) {}

  constexpr Code code() const { return code_; }
  constexpr uint64_t count() const { return (record_bytes_ + piece_bytes_ - 1) / piece_bytes_; }

  constexpr Piece at(uint64_t index) const {
    const uint64_t raw_begin = index * piece_bytes_;
    const uint64_t raw_end = std::min(raw_begin + piece_bytes_, record_bytes_);
    const uint64_t coded_begin = overflow_area_bytes() + index * PieceLayout::of(code_, piece_bytes_).nbytes;
    return {{raw_begin, raw_end},
            {coded_begin, coded_begin + PieceLayout::of(code_, raw_end - raw_begin).nbytes},
            overflow_bytes(code_, raw_begin)};
  }

  constexpr uint64_t slot_bytes() const { return count() == 0 ? 0 : at(count() - 1).coded.end; }

  // The bytes of it that are copied, without the overflow of exceptions.
  constexpr uint64_t copied_bytes() const { return slot_bytes() - overflow_area_bytes(); }

 private:
  constexpr uint64_t overflow_area_bytes() const { return overflow_bytes(code_, record_bytes_); }

  Code code_;
  uint64_t record_bytes_;
  uint64_t piece_bytes_;
};

}  // namespace torchoffload::codec
