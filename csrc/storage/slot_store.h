// SlotStore: the resting places of records' bytes. A slot is a range of pinned memory, or of a spill file, or now one
// and now the other.
// Ownership:     a slot is a value; its owner releases it exactly once, and before that releases each hold on it once,
//                for each time that it was held.
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
#include "system/gil.h"

namespace torchoffload {

struct Slot {
  Range range;
  std::byte* address = nullptr;  // null when the slot rests in a file, or may rest in one by now
  uint64_t nbytes() const { return range.nbytes; }
};

// The tier has no room and can get none: memory refused, disk full. what() has the reason (with errno's text).
struct StoreFull : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class SlotStore {
 public:
  static constexpr uint64_t kNoLimit = UINT64_MAX;

  virtual ~SlotStore() = default;

  // The bytes that a slot for `nbytes` takes.
  virtual uint64_t slot_bytes(uint64_t nbytes) const = 0;

  // Never blocks, never grows. Appends the points that guard the slot's first write.
  virtual std::optional<Slot> try_acquire(uint64_t nbytes, std::vector<Point>& guards) = 0;

  // Makes room for at least one slot of `nbytes`. May block. Throws StoreFull.
  virtual void grow(uint64_t nbytes) EXCLUDES(gil) = 0;

  // Would grow() wait for a disk now, to make room for a slot of `nbytes`? If so, the transfers that make room are
  // under way, and room comes even if nobody waits for it. False if grow() waits for nothing, or throws. Never blocks.
  virtual bool grow_awaits_disk(uint64_t /*nbytes*/) { return false; }

  virtual void release(const Slot& slot, const std::vector<Point>& guards) = 0;

  // Releases idle blocks to the system after a host wait for their guards. Returns the bytes released. May block.
  virtual uint64_t trim() EXCLUDES(gil) = 0;

  virtual uint64_t capacity_bytes() const = 0;  // held from the system
  virtual uint64_t used_bytes() const = 0;      // in slots
  virtual uint64_t grow_count() const = 0;      // how often memory or disk was taken from the system

  // Ahead of need. Capacities are totals of the store, over all its users; the latest of the first three calls holds. A
  // store that grows quickly does nothing here.

  // The need is not known: while slots are acquired, the store keeps a chunk ahead of them, up to `limit_bytes`.
  virtual void grow_ahead(uint64_t /*limit_bytes*/) {}

  // The need is known: the store takes that much now, in the background, and nothing beyond it. Returns at once.
  virtual void reserve(uint64_t /*capacity_bytes*/) {}

  // From here on nothing is taken ahead. Waits for a chunk that is being taken.
  virtual void grow_on_need() EXCLUDES(gil) {}

  // The most that was in slots at once since the last call of this; 0 if the store does not tell.
  virtual uint64_t take_peak_bytes() { return 0; }

  // Once the need is known, and best while no slot is in use: brings the capacity to the need, and at most 5% more, as
  // far as idle blocks allow. Once for a need. Returns the bytes released. May block.
  virtual uint64_t shrink(uint64_t /*needed_bytes*/) EXCLUDES(gil) { return 0; }

  // ---- slots that move on to a disk: these methods mean nothing for a store that does not move its slots ----

  // Does the store move its slots between memory and a disk? The same answer each time. A slot of such a store has an
  // address that can be used while the slot is held: from try_acquire() to note_filled() or release(), and from hold()
  // or try_hold() to release_hold().
  virtual bool moves_slots() const { return false; }

  // The copy that fills the slot ends at `end`. Its bytes may be written to the disk then, and its address changes.
  virtual void note_filled(const Slot& /*slot*/, Point /*end*/) {}

  // Are the slot's bytes in memory? If so, try_hold() gives the slot its address at once.
  virtual bool is_here(const Slot& /*slot*/) const { return true; }
  virtual std::optional<Slot> try_hold(const Slot& slot) { return slot; }

  // The same for any slot. Blocks while its bytes are read from the disk, and while there is no room for them. Throws
  // std::runtime_error if they cannot be read.
  virtual Slot hold(const Slot& slot) EXCLUDES(gil) { return slot; }

  // `until`: the end of the copy that used the address; absent: there was none. Never blocks.
  virtual void release_hold(const Slot& /*slot*/, std::optional<Point> /*until*/) {}

  // Begins to read the slot's bytes from the disk, if they are not in memory. Returns false if there is no room for
  // them now. Never blocks.
  virtual bool begin_fetch(const Slot& /*slot*/) { return true; }

  // ---- reports of a store ----

  // Does the store itself keep its memory within a budget?
  virtual bool limits_itself() const { return false; }
  virtual uint64_t limit_bytes() const { return kNoLimit; }  // the capacity that this budget allows, now

  // A warning for the user, as a sentence; empty: nothing. It is told once.
  virtual std::string take_trouble() { return {}; }

  // The process is about to end: once this returns nothing more is taken or released, by any thread. Waits for a chunk
  // that is being taken.
  virtual void stop() EXCLUDES(gil) {}
};

}  // namespace torchoffload
