// MarkedMemory: tells whether a storage still has the memory that it had before, even if that memory was freed and new
// memory was allocated at the same address. It serves allocators that report nothing about their allocations.
// Ownership:     the memory stays its storage's. A mark is an entry in a table of the process. It is removed when the
//                memory is freed.
// Thread safety: every function, any thread. The caller holds the storage, and no thread may resize it meanwhile.
// Shutdown:      leaked on purpose: memory is freed until the very end. A forked child has a table of its own.
//
// Memory is marked by exchanging its deleter for one that removes the entry from the table and then calls the original
// deleter. Nothing else about the memory changes. Only torch._lazy_clone looks at the deleter of ordinary CPU memory,
// and refuses such a storage.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>

namespace torchoffload {

// The number of the allocation of the storage's memory, from 1. Marks the memory unless it is marked already. Returns 0
// if its deleter is not `plain`: such memory came from elsewhere, and its storage cannot be resized.
uint64_t mark_memory(c10::StorageImpl& storage, c10::DeleterFnPtr plain);

// Is this the deleter of marked memory?
bool is_marked(c10::DeleterFnPtr deleter);

}  // namespace torchoffload
