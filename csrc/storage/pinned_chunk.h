// PinnedChunk: host memory from the system, in huge pages, filled by several threads and made known to a driver.
// Ownership:     a chunk is a value; its owner gives it back, or leaks it.
// Thread safety: every function, any thread. Both block, for as long as the kernel and the driver take.
// Shutdown:      neither is called then; see Note [No CUDA after main].
// Not handled:   If the kernel has no huge pages, or none to give, the pages are small ones: the same memory, slower to
//                fill and to register. If it does not let us choose a node, the memory is on the node of the CPU that
//                touched it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "storage/chunk.h"

namespace torchoffload {

inline constexpr uint64_t kHugePageBytes = 2 * kMiB;

// The functions that page-lock memory for a device. They are injected, so that storage knows no driver. Either the
// system's memory is registered with a driver, or the memory comes page-locked from a device's own allocator; if all of
// these are null, it is plain. They are called from any thread, also while a CUDA graph is captured on another: a
// driver that forbids it then must be told that this call is not a part of the capture.
struct HostRegistration {
  // Both return the reason for a refusal, or empty.
  std::string (*register_memory)(void* address, size_t nbytes) = nullptr;
  std::string (*unregister_memory)(void* address) = nullptr;
  // The best NUMA node for the memory; null, or nullopt: none is better.
  std::optional<int> (*node)() = nullptr;

  // Page-locked memory at a multiple of kAlignmentBytes; null with a reason in `refusal`.
  std::function<std::byte*(size_t nbytes, std::string& refusal)> allocate = {};
  std::function<void(std::byte* address)> free = {};

  bool locks() const { return register_memory != nullptr || allocate != nullptr; }
};

struct PinnedChunk {
  std::byte* address = nullptr;
  uint64_t nbytes = 0;
  bool is_locked = false;     // the driver knows it
  bool is_allocated = false;  // it came from HostRegistration::allocate
};

// The driver does not page-lock the memory. The system itself would have given it.
struct LockRefused : StoreFull {
  using StoreFull::StoreFull;
};

// `nbytes`: a multiple of `page_bytes`. The system's memory begins at such a multiple, too. Throws StoreFull with the reason, and
// with the limit of this process that may have caused it; LockRefused if that limit is the driver's.
PinnedChunk take_pinned_chunk(uint64_t nbytes, uint64_t page_bytes, const HostRegistration& registration);

// The same memory, without a driver's knowledge. Throws StoreFull.
PinnedChunk take_plain_chunk(uint64_t nbytes, uint64_t page_bytes, const HostRegistration& registration);

// False: the driver refused, and the memory is leaked.
bool free_chunk(const PinnedChunk& chunk, const HostRegistration& registration);

}  // namespace torchoffload
