// HeldRecord: what the engine holds of one record, beside what its ledger knows of it.
// Ownership:     the source or the reload buffer, the slot, and what the record's identity compares.
// Thread safety: needs the GIL.
// What is asked of it is read anew from the memory each time, since the program may resize a storage at any time.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/ledger.h"
#include "core/types.h"
#include "device/device_memory.h"
#include "device/link.h"
#include "device/memory.h"
#include "engine/stream_order.h"
#include "engine/version_counter.h"
#include "engine/wrapper_versions.h"
#include "storage/slot_store.h"

namespace torchoffload {

struct HeldRecord {
  DeviceBytes bytes;               // the source (Resident, Offloading), or what unpack hands out (Reloading, Reloaded)
  WeakMemory identity;             // while the tape is open
  WeakMemory given_up;             // the last bytes handed out, if still alive
  DeviceBytes given_up_bytes;      // of `given_up`, without the memory
  VersionCounter version;          // of its identity
  WrapperVersions wrappers;        // while the tape is open
  StreamId packed_on = kNoStream;  // at its first save
  StreamId allocated_on = kNoStream;  // its memory; kNoStream: not known
  uint64_t address_modulo = 0;
  Slot slot;
  Point offload_end;
  Point reload_end;
  std::vector<Point> other_reload_ends;  // of reloads of several threads at once: they guard the slot too
  uint64_t charged_bytes = 0;
  uint64_t learned_bytes = 0;  // kept because of what was learned: they count towards the windows
  uint32_t number = 0;         // in its tape
  uint32_t module = 0;         // that saved it first
  bool is_slot_lost = false;   // a copy of it has no known end: it is never used again
  bool was_needed = false;     // by a backward
  bool is_confirmed = false;   // I/O: the write is known to have succeeded

  // Is what the record stands for no longer in the source (R10)? The program resized it, or gave it other memory.
  bool was_resized(const Record& record, DeviceMemory& memory) const;

  // See Note [Versions of inner tensors].
  bool was_written_through_a_wrapper(const Record& record) const;

  // Is every byte of the record in its slot, so that the device may give up its own? Of I/O the answer is remembered.
  bool slot_is_complete(const Record& record, DeviceMemory& memory, Link& link, const StreamOrder& streams);

  // Were the bytes that it has on the device copied there from the slot?
  bool are_bytes_reloaded() const { return bytes.busy_until == reload_end; }

  // The bytes are not held any more, but for as long as somebody who was given them holds them they are found again.
  // Returns them, with the share in them.
  DeviceBytes give_up();
  std::optional<DeviceBytes> lock_given_up(const Record& record);
};

}  // namespace torchoffload
