// saved_bytes.h: the engine's view of a save (SavedBytes), and the handle that it returns for it.
// Ownership:     SavedBytes borrows the memory and the counters for a call. A handle counts for its record until
//                Engine::release().
// Thread safety: values only; needs the GIL.
#pragma once

#include <cstdint>

#include "core/extent.h"
#include "core/types.h"
#include "device/memory.h"
#include "engine/version_counter.h"

namespace torchoffload {

// One handle's share in a record.
struct RecordHandle {
  RecordId record;
  uint64_t save = 0;        // the number of the handle's save in its tape
  uint32_t seen_epoch = 0;  // the reload whose bytes the handle was given last; see Ledger::mark_seen
};

// One save of a tensor, as the engine is told of it.
struct SavedBytes {
  MemoryRef memory;
  Span span;                        // the bytes of the memory that the saved tensor reaches
  Extent extent = Extent::Storage;  // whether a record must stand for all of the memory, or for `span` at least
  uint64_t itemsize = 1;
  uint8_t dtype = 0;  // PyTorch's number for the dtype
  uint8_t dim = 0;    // the number of dimensions
  VersionRef version;
  VersionRef wrapper;  // the version of the wrapper subclass that the tensor is an inner tensor of, or none
};

}  // namespace torchoffload
