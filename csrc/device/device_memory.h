// DeviceMemory: a device's allocator, and its knowledge of memory. A part of a Backend.
// Ownership:     allocated memory is the caller's. No reference is kept to memory that is asked about.
// Thread safety: every method, any thread. allocate() may block, as Streams::may_block() says; settle() blocks.
// Failures:      a call that throws has allocated nothing.
// Shutdown:      lives for the process; see Note [No CUDA after main].
#pragma once

#include <cstdint>

#include "core/types.h"
#include "device/memory.h"
#include "system/gil.h"

namespace torchoffload {

// The origin of a storage's memory.
struct MemoryOrigin {
  uint64_t allocation = 0;      // which of its allocator's allocations it is, from 1; 0: not known
  StreamId stream = kNoStream;  // that it was allocated on; kNoStream: not known
};

class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;

  // Device memory whose address is `address_modulo` modulo kAlignmentBytes, allocated on the current stream and freed
  // as that stream's allocations are. Throws c10::OutOfMemoryError (or std::bad_alloc's kin) when there is none.
  virtual Memory allocate(uint64_t nbytes, uint64_t address_modulo) = 0;

  // Is this memory of the device's own allocator? Other memory has an owner that frees it as soon as it is dropped,
  // without regard to streams.
  virtual bool owns(MemoryRef /*memory*/) const { return true; }

  // Tells the allocator that `stream` used this memory, which, once freed, waits for the work enqueued there. Free when
  // `stream` is the one it was allocated on. Does nothing for memory that owns() denies.
  virtual void note_use(MemoryRef memory, StreamId stream) = 0;

  // Two answers with another allocation mean that the storage was given other memory in between, even at the same
  // address. See docs/design.md, R2 and R10, which say how much each device knows.
  virtual MemoryOrigin origin_of(MemoryRef) { return {}; }
  // The allocation alone.
  virtual uint64_t allocation_of(MemoryRef memory) { return origin_of(memory).allocation; }

  // Before the first record is made: must settle() be called, which waits for all work given to the device so far?
  // Without that, origin_of() has no answer for older memory. settle() blocks.
  virtual bool must_settle() { return false; }
  virtual void settle() EXCLUDES(gil) {}

  // Is this memory of CUDA graphs that are replayed without autograd's knowledge? See Note [Memory of graph trees].
  virtual bool is_graph_memory(const void* /*address*/) { return false; }

  // Of the device's allocator, in use now; 0 if it does not tell.
  virtual uint64_t allocated_bytes() { return 0; }
};

}  // namespace torchoffload
