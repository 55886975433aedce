#include "engine/held_record.h"

#include <utility>

#include "core/mutant.h"

namespace torchoffload {

bool HeldRecord::was_resized(const Record& record, DeviceMemory& memory) const {
  const Memory& source = bytes.memory;
  const Identity& identity = record.identity;
  if (source.data() != identity.data || source.nbytes() != identity.nbytes) return true;
  if (mutated(Mutant::ResizeSeesAllocation)) return false;
  return memory.allocation_of(source.ref()) != identity.allocation;
}

// A record may be joined because a save has the same wrapper. Then the tensor that the record was made of must be
// unchanged too.
bool HeldRecord::was_written_through_a_wrapper(const Record& record) const {
  // A record whose copy is not enqueued yet stands for the storage's present contents.
  if (record.state == RecordState::Resident || mutated(Mutant::IdentityChecksWrapper)) return false;
  return wrappers.changed() || (!wrappers.empty() && version.current() != record.identity.version);
}

bool HeldRecord::slot_is_complete(const Record& record, DeviceMemory& memory, Link& link, const StreamOrder& streams) {
  if (!record.has_slot) return false;
  const bool serves_source = bytes.memory && !bytes.is_buffer;
  if (serves_source && was_resized(record, memory)) return false;  // perhaps while its copy was under way (R10)
  if (!streams.is_polled(offload_end) || is_confirmed || mutated(Mutant::UnwrittenSourceStays)) return true;
  is_confirmed = streams.is_seen_reached(offload_end) && link.failure(offload_end).empty();
  return is_confirmed;
}

DeviceBytes HeldRecord::weaken() {
  DeviceBytes held = std::exchange(bytes, {});
  weak = WeakMemory(held.memory.ref());
  weak_bytes = {{}, held.base_bytes, held.stream, held.busy_until, held.is_buffer};
  return held;
}

std::optional<DeviceBytes> HeldRecord::lock_weak(const Record& record) {
  if (!weak || mutated(Mutant::WeakIsFoundAgain)) return std::nullopt;
  Memory alive = weak.lock();
  if (!alive) {
    weak = {};
    return std::nullopt;
  }
  // A source that the program has emptied since is reloaded from the slot, which was complete before it was weakened.
  if (!weak_bytes.is_buffer && alive.nbytes() < record.span.end) return std::nullopt;
  DeviceBytes found = weak_bytes;
  found.memory = std::move(alive);
  return found;
}

}  // namespace torchoffload
