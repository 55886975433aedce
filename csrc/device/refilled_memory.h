// RefilledMemory: tells whether a storage was given other memory since it was first asked about, even at the same
// address. It serves device allocators that report nothing about their allocations.
// Ownership:     the memory stays its storage's. The allocators that stand in are leaked on purpose.
// Thread safety: every function, any thread. The caller holds the storage, and no thread may resize it meanwhile.
//
// A storage that is resized asks its own allocator for the new memory (StorageImpl::allocator). So a storage that is
// asked about gets an allocator that passes each request on and counts it. The memory itself and its deleter stay as
// they are: caching allocators know their own memory by the deleter, and would otherwise ignore record_stream.
// Not handled:   a device whose resizing goes past StorageImpl::allocator.
#pragma once

#include <c10/core/StorageImpl.h>

#include <cstdint>

namespace torchoffload {

// The number of the allocation of the storage's memory, from 1. 0: the storage has no allocator, so it has no other
// memory ever.
uint64_t number_of_allocation(c10::StorageImpl& storage);

}  // namespace torchoffload
