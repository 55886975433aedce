// block: the lossless codes by which values cross the link, and the bytes that a block of each takes.
// Ownership:     values only.
// Thread safety: immutable values; any thread.
//
// Note [Lossless codes]
// A bfloat16 value is a sign, 8 bits of exponent and 7 bits of mantissa. Neighbouring values have similar exponents. So
// of each *block* of 256 values the code keeps the largest exponent (the block's top), of each value 4 bits that say
// how far below the top its exponent is, and its sign and mantissa unchanged:
//
//   raw block, 512 bytes      coded block, 385 bytes
//   256 values                128 bytes of distances: value v has the low (v even) or high half of byte v / 2
//                             256 bytes of signs and mantissas: byte v is sign << 7 | mantissa
//                             1 byte: the top
//
// A distance of 0 to 14 stands for the exponent top - distance. A distance of 15 stands for the exponent 0, at any top:
// zeros of both signs, and subnormal numbers, whose mantissas are kept as all mantissas are. A block with a value whose
// exponent is neither 0 nor within 14 of the top is an *exception*: it is kept as it is, the first 384 bytes in the
// place that a coded block's payload would have, and the other 128 in the block's own place of an overflow area. Its
// top is written as 0, which no coded block has: if all exponents are 0, the top is written as 1. So every bit pattern
// comes back exactly, NaNs and infinities included.
//
// A float32 value that was widened from bfloat16 has zeros in its lower half. Models save many of them: a normalisation
// in float32 begins with hidden.to(float32). The code for widened values takes the upper halves of 256 float32 values,
// 1024 bytes, and codes them as the code for bfloat16 does. A block with a value whose lower half is not zero is an
// exception, too. Of an exception 384 bytes stay in place, and 640 overflow. Other float32 values are all exceptions,
// and to code them would cost more than it saves. So this code is *selective*: a record is coded by it only once the
// values of an earlier step were seen to be widened.
//
// The size of a block on the link is known before it is coded, except for the overflow of exceptions. The encoder
// writes that straight to host memory, and the decoder reads it there. So the host need not ask the device how much
// there is to copy.
//
// Other dtypes are not coded. float16 has 5 bits of exponent, of which 4 bits of distance would save one. Of float32
// values in general 4 bits of 32 could be saved. Masks are rare among the tensors that language models save.
#pragma once

#include <array>
#include <cstdint>

namespace torchoffload::codec {

enum class Code : uint8_t { Bfloat16, Widened };
inline constexpr std::array kCodes = {Code::Bfloat16, Code::Widened};

inline constexpr uint64_t kBlockValues = 256;
inline constexpr uint64_t kDistanceBytes = kBlockValues / 2;
inline constexpr uint64_t kMostDistance = 14;
inline constexpr uint64_t kExponentIsZero = 15;  // as a distance
inline constexpr uint64_t kExceptionTop = 0;

// The bytes that a block takes.
struct BlockBytes {
  uint64_t raw = 0;
  uint64_t payload = 0;  // in its piece, but for the top

  constexpr uint64_t overflow() const { return raw - payload; }  // of an exception
};

constexpr BlockBytes block_of(Code code) {
  const uint64_t payload = kDistanceBytes + kBlockValues;
  return code == Code::Bfloat16 ? BlockBytes{2 * kBlockValues, payload} : BlockBytes{4 * kBlockValues, payload};
}

inline constexpr uint64_t kLargestBlockBytes = block_of(Code::Widened).raw;

// Is the code worth its time only for records whose values were seen to suit it?
constexpr bool is_selective(Code code) { return code == Code::Widened; }

}  // namespace torchoffload::codec
