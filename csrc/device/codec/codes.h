// codes: Note [Lossless codes] for the host: the reference that every device's kernels have to match.
// Ownership:     borrows all memory for the length of a call.
// Thread safety: any thread.
// Not handled:   speed. The kernels are in kernels.def.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "device/codec/piece.h"

namespace torchoffload::codec {

// Codes `raw_bytes` at `raw`. `coded` has room for the piece, and `overflow` for overflow_bytes(), of which only those
// of exceptions are written. No address has to be aligned.
void encode(Code code, const std::byte* raw, uint64_t raw_bytes, std::byte* coded, std::byte* overflow, uint64_t tag);

// The other way.
void decode(Code code, std::byte* raw, uint64_t raw_bytes, const std::byte* coded, const std::byte* overflow);

// How many of `seen` blocks were exceptions.
struct Exceptions {
  uint64_t count = 0;
  uint64_t seen = 0;
};

// Of the coded record with this tag that `slot` holds, by some of its blocks, spread over all pieces. nullopt: not all
// pieces with the tag have arrived. The device may be writing to the slot, so the answer is a hint.
std::optional<Exceptions> sample_exceptions(const std::byte* slot, const Pieces& pieces, uint64_t tag);

// The part of these raw bytes that the link carries of their blocks; 1 if coding saves nothing.
double link_share(Code code, const std::byte* raw, uint64_t raw_bytes);

// Would none of a few blocks be an exception, spread over these raw bytes? The device may be writing to them, so the
// answer is a hint. False if these blocks are all zeros, as in memory that nothing was written to yet.
bool looks_codable(Code code, const std::byte* raw, uint64_t raw_bytes);

}  // namespace torchoffload::codec
