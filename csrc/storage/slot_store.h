// SlotStore: where a record's bytes rest. A slot is a range of pinned memory, or of a spill file.
// Ownership:     a slot is a value; whoever acquired it releases it exactly once.
// Thread safety: every method, any thread.
// Stream order:  release() is in host time; the guards say after which points the range may be written again.
// Shutdown:      stores live for the process; see Note [No CUDA after main].
#pragma once

#include <cstddef>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/range_allocator.h"
#include "core/types.h"

namespace torchoffload {

struct Slot {
  Range range;
  std::byte* address = nullptr;  // null when the slot rests in a file
  uint64_t nbytes() const { return range.nbytes; }
};

// The tier has no room and can get none: memory refused, disk full. what() says which and why (with errno's text).
struct StoreFull : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class SlotStore {
 public:
  virtual ~SlotStore() = default;

  // What a slot for `nbytes` takes.
  virtual uint64_t slot_bytes(uint64_t nbytes) const = 0;

  // Never blocks, never grows. Appends the points that guard the slot's first write.
  virtual std::optional<Slot> try_acquire(uint64_t nbytes, std::vector<Point>& guards) = 0;

  // Makes room for at least one slot of `nbytes`. May block: call it without the GIL. Throws StoreFull.
  virtual void grow(uint64_t nbytes) = 0;

  virtual void release(const Slot& slot, const std::vector<Point>& guards) = 0;

  // Gives idle blocks back to the system after a host wait for their guards. Returns the bytes given back. May block.
  virtual uint64_t trim() = 0;

  virtual uint64_t capacity_bytes() const = 0;  // held from the system
  virtual uint64_t used_bytes() const = 0;      // in slots
  virtual uint64_t grow_count() const = 0;      // how often grow() took memory or disk from the system
};

}  // namespace torchoffload
