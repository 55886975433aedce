// PinnedArena: page-locked host memory, taken in chunks and cut into exact ranges of 512 bytes.
// Ownership:     hands out slots, which are values; the memory stays the arena's until trim().
// Thread safety: every method, any thread. grow() and trim() take turns, and hold up no other method while they ask the
//                system or the driver.
// Stream order:  a released range carries the points that guard its reuse; trim() alone waits for them, on the host.
// Shutdown:      leaked on purpose; see Note [No CUDA after main]. In a forked child it is full; see
//                Note [Forked children].
// Not handled:   budgets (the engine counts a context's bytes), NUMA placement.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/range_allocator.h"
#include "storage/chunk.h"
#include "storage/process.h"
#include "storage/slot_store.h"

namespace torchoffload {

// Note [No CUDA after main]
// After main has returned, static destructors run in an order nobody controls, and the CUDA driver may be gone already:
// a call into it then fails, hangs or crashes. The same holds in a forked child, which inherits a context that it
// cannot use. Python adds its own: at interpreter exit, threads that hold tensors are stopped wherever they are. So
// what lives as long as the process (stores, backends, queues and their threads, streams, events) is allocated once and
// never destroyed: no destructor, no atexit handler and no child of ours ever calls the driver. The system takes the
// memory, the threads and the unlinked file back when the process ends, whichever way it ends. What is given back
// earlier is given back by trim(), which the user calls while all is alive.

// How memory is made known to a device's driver: injected, so that storage knows no driver. Each returns the reason for
// a refusal, or empty. Both null: plain memory.
struct HostRegistration {
  std::string (*register_memory)(void* address, size_t nbytes) = nullptr;
  std::string (*unregister_memory)(void* address) = nullptr;
};

class PinnedArena final : public SlotStore {
 public:
  // `synchronize` blocks the host until a point is reached.
  PinnedArena(HostRegistration registration, std::function<void(Point)> synchronize, ChunkPolicy policy = {});

  // Gives plain memory back, and leaks registered memory: for tests, since the arenas of a process are never destroyed.
  ~PinnedArena() override;
  PinnedArena(const PinnedArena&) = delete;
  PinnedArena& operator=(const PinnedArena&) = delete;

  uint64_t slot_bytes(uint64_t nbytes) const override { return round_up(nbytes, kAlignmentBytes); }
  std::optional<Slot> try_acquire(uint64_t nbytes, std::vector<Point>& guards) override;
  void grow(uint64_t nbytes) override;
  void release(const Slot& slot, const std::vector<Point>& guards) override;
  uint64_t trim() override;
  uint64_t capacity_bytes() const override;
  uint64_t used_bytes() const override;
  uint64_t grow_count() const override { return grow_count_.load(std::memory_order_relaxed); }

  // As RangeAllocator's, for tests.
  void check_invariants() const;

 private:
  struct Chunk {
    std::byte* address = nullptr;
    uint64_t nbytes = 0;
  };

  bool fits(uint64_t nbytes) const;
  Chunk take_from_system(uint64_t nbytes) const;  // throws StoreFull
  bool give_to_system(const Chunk& chunk) const;  // false: the driver refused, and the memory is leaked

  const HostRegistration registration_;
  const std::function<void(Point)> synchronize_;
  const ChunkPolicy policy_;
  const ForkGuard fork_guard_;

  std::mutex grow_mutex_;  // held by grow() and trim() from end to end; taken before mutex_

  mutable std::mutex mutex_;  // guards the two below
  RangeAllocator ranges_{kAlignmentBytes};
  std::map<BlockId, Chunk> chunks_;  // the keys are ranges_' blocks

  std::atomic<uint64_t> grow_count_{0};
};

}  // namespace torchoffload
