// torch_memory: converts between PyTorch's storages and the Memory of memory.h.
// Ownership:     memory_of() and storage_impl() borrow. The other functions take over their arguments.
// Thread safety: every function, any thread.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include "device/memory.h"

namespace torchoffload {

inline c10::StorageImpl& storage_impl(MemoryRef memory) { return *memory.storage(); }

inline MemoryRef memory_of(const c10::Storage& storage) { return MemoryRef(storage.unsafeGetStorageImpl()); }

// The one share becomes the other.
inline Memory memory_from(c10::Storage storage) { return Memory::of_share(storage.unsafeReleaseStorageImpl()); }
inline c10::Storage storage_from(Memory memory) {
  return c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim(memory.release()));
}

// The allocation from `shift` bytes behind its start, for the sake of an address modulo kAlignmentBytes. The result owns
// the allocation.
c10::DataPtr shifted(c10::DataPtr allocation, uint64_t shift);
// The allocation that the memory lies in.
const c10::DataPtr& whole_allocation(MemoryRef memory);

// A resizable storage of `nbytes` at `data`, whose memory came from the allocator of its device.
Memory make_memory(c10::DataPtr data, uint64_t nbytes);

}  // namespace torchoffload
