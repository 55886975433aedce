// NodePool: memory for many small objects of a few sizes, such as the nodes of maps.
// Ownership:     the memory of all objects, until it is destroyed. Deallocated memory is used again for objects of the
//                same size.
// Thread safety: none; the caller locks.
// Failures:      allocating throws std::bad_alloc.
//
// A training step allocates some thousand objects and frees them all again. malloc() caches only a few free blocks of
// each size; for all others it searches its lists of free blocks, or merges neighbours.
#pragma once

#include <array>
#include <cstddef>
#include <memory_resource>
#include <new>

namespace torchoffload {

class NodePool final : public std::pmr::memory_resource {
 private:
  struct Free {
    Free* next;
  };
  static constexpr size_t kStepBytes = 16;  // sizes are rounded up to a multiple of it, and aligned to it
  static constexpr size_t kLargestBytes = 512;

  static bool is_small(size_t nbytes, size_t alignment) { return nbytes <= kLargestBytes && alignment <= kStepBytes; }
  static size_t steps(size_t nbytes) { return nbytes == 0 ? 1 : (nbytes + kStepBytes - 1) / kStepBytes; }

  void* do_allocate(size_t nbytes, size_t alignment) override {
    if (!is_small(nbytes, alignment)) return std::pmr::new_delete_resource()->allocate(nbytes, alignment);
    Free*& first = free_[steps(nbytes)];
    if (first == nullptr) return chunks_.allocate(steps(nbytes) * kStepBytes, kStepBytes);
    Free* const taken = first;
    first = taken->next;
    return taken;
  }

  void do_deallocate(void* address, size_t nbytes, size_t alignment) override {
    if (!is_small(nbytes, alignment)) return std::pmr::new_delete_resource()->deallocate(address, nbytes, alignment);
    Free*& first = free_[steps(nbytes)];
    first = new (address) Free{first};
  }

  bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override { return this == &other; }

  std::array<Free*, kLargestBytes / kStepBytes + 1> free_{};  // by size in steps
  std::pmr::monotonic_buffer_resource chunks_{std::pmr::new_delete_resource()};
};

}  // namespace torchoffload
