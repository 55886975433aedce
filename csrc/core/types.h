// types.h: the plain values that all floors share: streams and points, spans of bytes, ids of records and tapes.
// Ownership:     values only. An id keeps nothing alive; its generation tells a stale one.
// Thread safety: immutable values; any thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace torchoffload {

// Names a stream. Backends take the ids from one counter, so that an id names one stream of one device for the life of
// the process; kNoStream means none.
using StreamId = int32_t;
inline constexpr StreamId kNoStream = -1;

// A place in one stream's order. `serial` counts the points of that stream from 1; serial 0 is the stream's beginning,
// which is always reached. Once a point is reached, every earlier point of the same stream is reached too.
struct Point {
  StreamId stream = kNoStream;
  uint64_t serial = 0;

  bool is_beginning() const { return serial == 0; }
  friend bool operator==(const Point&, const Point&) = default;
};

// A half-open range of bytes.
struct Span {
  uint64_t begin = 0;
  uint64_t end = 0;

  uint64_t nbytes() const { return end - begin; }
  bool contains(const Span& other) const { return begin <= other.begin && other.end <= end; }
  friend bool operator==(const Span&, const Span&) = default;
};

// Names a record or a tape. If an index is used again, the generation shows that older ids are stale.
struct RecordId {
  uint32_t index = UINT32_MAX;
  uint32_t generation = 0;
  friend bool operator==(const RecordId&, const RecordId&) = default;
};

struct TapeId {
  uint32_t index = UINT32_MAX;
  uint32_t generation = 0;
  friend bool operator==(const TapeId&, const TapeId&) = default;
};

// A reloaded tensor has its source's address modulo this, and ranges of host memory are multiples of it.
inline constexpr uint64_t kAlignmentBytes = 512;

inline constexpr uint64_t kMiB = uint64_t{1} << 20;

inline constexpr uint64_t round_up(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace torchoffload
