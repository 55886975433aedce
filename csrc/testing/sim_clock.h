// AccessMap: the accesses to the simulated device's bytes, and whether one of them happens before another.
// Ownership:     values only; addresses are numbers, nothing is read through them.
// Thread safety: none; SimWorld locks.
// Stream order:  none of its own: an access is ordered after another if the clock that it comes with says so.
// Invariants:    two accesses of one segment are both reads, or ordered, or a pair that Note [Operator writes] allows.
// Not handled:   bytes that an operator touches beyond those that the engine saw.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/types.h"

namespace torchoffload {

// For each stream (by its dense index) the number of its steps that have happened before.
class VectorClock {
 public:
  uint64_t at(uint32_t index) const { return index < steps_.size() ? steps_[index] : 0; }
  uint64_t advance(uint32_t index);  // one step of the stream itself; returns its number
  void join(const VectorClock& other);

 private:
  std::vector<uint64_t> steps_;
};

enum class AccessKind : uint8_t {
  MemoryAllocated,
  OperatorWrites,  // of the packed bytes, perhaps; see Note [Operator writes]
  Fill,            // of the bytes that the test names, for certain; the operator that packs them may do it
  CopyOutReads,
  CopyOutWrites,
  CopyInReads,
  CopyInWrites,
  UnpackReads,
  SpillReads,   // a slot on its way to a disk
  FetchWrites,  // a slot on its way back
  MemoryFreed,
};

// The owner of memory: a tensor that came from the allocator, the engine itself (for a reload), or a slot.
enum class MemoryOwner : uint8_t { Source, Buffer, Slot };

struct Access {
  AccessKind kind = AccessKind::MemoryAllocated;
  MemoryOwner owner = MemoryOwner::Source;
  uint32_t stream = 0;  // dense index
  uint64_t step = 0;    // of that stream
  uint64_t thread = 0;  // that enqueued it
};

std::string access_name(AccessKind kind, MemoryOwner owner);

struct Race {
  Access earlier;
  Access later;
};

// Note [Operator writes]
// An operator that saves a tensor may still be filling it, or may only read it: a pack cannot tell. So each pack counts
// as a write against the engine's accesses to the bytes (copy out, free), and as nothing against those of other
// operators: two packs, or a pack and an earlier record's copy or unpack, race only if the user's own program does. One
// storage may be packed by several threads and on several streams; a copy out belongs to one of these packs, and must
// be ordered after one of them. Packs of one thread on one stream follow each other, and the last stands for all.
class AccessMap {
 public:
  // Adds an access that has happened after all that `clock` knows; reports the first earlier one that it is not ordered
  // after.
  std::optional<Race> add(const Span& span, const Access& access, const VectorClock& clock);

  // The first copy in that wrote some of these bytes and has not happened before `clock`.
  std::optional<Access> find_open_copy(const Span& span, const VectorClock& clock) const;

  // The first access that has not happened before `clock`.
  std::optional<Access> find_unordered(const Span& span, const VectorClock& clock) const;

  // Is there, for each byte of `span`, an operator's write that has happened before `clock`?
  bool written_before(const Span& span, const VectorClock& clock) const;

  void forget(const Span& span);
  void clear() { segments_.clear(); }
  uint64_t access_count() const;

 private:
  struct Segment {
    uint64_t end = 0;
    std::vector<Access> accesses;
  };
  using Segments = std::map<uint64_t, Segment>;  // by begin; they never overlap

  void split_at(uint64_t address);
  void fill_gaps(const Span& span);

  Segments segments_;
};

}  // namespace torchoffload
