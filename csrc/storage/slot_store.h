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
  virtual uint64_t grow_count() const = 0;      // how often memory or disk was taken from the system

  // Ahead of need. Capacities are totals of the store, of all who use it; the latest of the first three calls holds.
  // A store that grows quickly does nothing here.

  // The need is not known: while slots are acquired, the store keeps a chunk ahead of them, up to `limit_bytes`.
  virtual void grow_ahead(uint64_t /*limit_bytes*/) {}

  // The need is known: that much is brought about now, in the background, and nothing beyond it. Returns at once.
  virtual void reserve(uint64_t /*capacity_bytes*/) {}

  // Nothing is taken ahead. Waits for what is being taken.
  virtual void grow_on_need() {}

  // The most that was in slots at once since the last call of this; 0 where nothing can be made of it.
  virtual uint64_t take_peak_bytes() { return 0; }

  // Once the need is known, and best while no slot is in use: brings the capacity to what is needed, and at most 5%
  // more, as far as idle blocks allow. Once for a need. Returns the bytes given back. May block.
  virtual uint64_t shrink(uint64_t /*needed_bytes*/) { return 0; }

  // The process is about to end: once this returns nothing more is taken or given back, by any thread. Waits for what
  // is being taken.
  virtual void stop() {}
};

}  // namespace torchoffload
