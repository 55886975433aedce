// HeldRecord: the memory and the slot that the engine holds for one record. The ledger has the record's state.
// Ownership:     the source or the reload buffer, the slot, and the storage and version counter that the record's
//                identity compares.
// Thread safety: needs the GIL.
//
// Questions about the memory look at the storage anew each time, since the program may resize it at any time.
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
#include "system/gil.h"

namespace torchoffload {

struct HeldRecord {
  DeviceBytes bytes;                  // the source (Resident, Offloading), or the reload's buffer (Reloading, Reloaded)
  WeakMemory identity;                // the storage, while the tape is open
  WeakMemory weak;                    // the memory that was weakened last, for as long as a consumer holds it
  DeviceBytes weak_bytes;             // the DeviceBytes of `weak`, without the memory
  VersionCounter version;             // the saved tensor's, which the record's identity compares
  WrapperVersions wrappers;           // while the tape is open
  StreamId packed_on = kNoStream;     // the current stream at its first save
  StreamId allocated_on = kNoStream;  // the stream that its memory was allocated on; kNoStream: not known
  uint64_t address_modulo = 0;        // of the source's address, modulo kAlignmentBytes
  Slot slot;
  Point offload_end;
  Point reload_end;
  std::vector<Point> other_reload_ends;  // ends of reloads by other threads at the same time: they guard the slot too
  uint64_t charged_bytes = 0;
  uint64_t window_bytes = 0;   // its share of the offload window while its copy is in flight
  uint64_t learned_bytes = 0;  // its bytes if it is kept and counts towards the windows
  uint32_t number = 0;         // counts the tape's records in the order of their first saves
  uint32_t module = 0;         // the number of the module that saved it first
  bool is_slot_lost = false;   // it is not known when a copy on the slot ends, so the slot is never used again
  bool was_needed = false;     // a backward has asked for it
  bool is_confirmed = false;   // if copies complete in the background: the write is known to have succeeded

  // Did the program resize the source's storage, or give it other memory, since the save (R10)?
  bool was_resized(const Record& record, DeviceMemory& memory) const;

  // Was a wrapper subclass that the record was packed inside of written to since? See Note [Versions of inner tensors].
  bool was_written_through_a_wrapper(const Record& record) const;

  // Is every byte of the record in its slot, so that the device may drop its own? If copies complete in the background,
  // the backend is asked whether the write has ended and succeeded; it is not asked again once it has.
  bool slot_is_complete(const Record& record, DeviceMemory& memory, Link& link, const StreamOrder& streams);

  // Were the bytes that it has on the device copied there from the slot?
  bool are_bytes_reloaded() const { return bytes.busy_until == reload_end; }

  // From here on the bytes are held weakly. Returns them with the strong share, for the caller to free (defer_free).
  DeviceBytes weaken();
  // The bytes that were weakened, if a consumer still holds them.
  std::optional<DeviceBytes> lock_weak(const Record& record);
};

}  // namespace torchoffload
