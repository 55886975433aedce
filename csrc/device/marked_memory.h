// MarkedMemory: tells whether a storage still has the memory that it had before, also where it was given back and new
// memory came to stand at the same address. For allocators that say nothing of what they allocate.
// Ownership:     the memory stays its storage's. A mark is an entry in a table of the process; it goes when the memory
//                is freed.
// Thread safety: every function, any thread. The caller holds the storage, and nobody resizes it meanwhile.
// Shutdown:      leaked on purpose: memory is freed until the very end. A forked child has a table of its own.
//
// A mark is made by exchanging the deleter of the memory for one that takes the entry out of the table and then calls
// the first. Nothing else about the memory changes. Only torch._lazy_clone looks at the deleter of ordinary CPU memory,
// and refuses such a storage.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>

namespace torchoffload {

// The number of the allocation that the storage's memory is, from 1. It is marked for that, unless it is already. 0
// where its deleter is another than `plain`: memory that came from elsewhere, of which no storage can be resized.
uint64_t mark_memory(c10::StorageImpl& storage, c10::DeleterFnPtr plain);

// Is this the deleter of marked memory?
bool is_marked(c10::DeleterFnPtr deleter);

}  // namespace torchoffload
