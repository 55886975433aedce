// PinnedArena: page-locked host memory, taken in chunks and cut into exact ranges of 512 bytes.
// Ownership:     hands out slots, which are values; the memory stays the arena's until trim() or shrink().
// Thread safety: every method, any thread. Taking a chunk and giving some back take turns, and hold up no other method
//                while they ask the system or the driver. See Note [Growing ahead].
// Stream order:  a released range carries the points that guard its reuse; trim() and shrink() alone wait for them, on
//                the host.
// Shutdown:      leaked on purpose, with its thread; see Note [No CUDA after main]. In a forked child it is full; see
//                Note [Forked children].
// Not handled:   budgets (the engine counts a context's bytes).
#pragma once

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "core/range_allocator.h"
#include "storage/chunk.h"
#include "storage/growth_plan.h"
#include "storage/pinned_chunk.h"
#include "storage/slot_store.h"
#include "system/process.h"

namespace torchoffload {

// Note [No CUDA after main]
// After main has returned, static destructors run in an order nobody controls, and the CUDA driver may be gone already:
// a call into it then fails, hangs or crashes. The same holds in a forked child, which inherits a context that it
// cannot use. Python adds its own: at interpreter exit, threads that hold tensors are stopped wherever they are. So
// what lives as long as the process (stores, backends, queues and their threads, streams, events) is allocated once and
// never destroyed: no destructor, no atexit handler and no child of ours ever calls the driver. The system takes the
// memory, the threads and the unlinked file back when the process ends, whichever way it ends. What is given back
// earlier is given back by trim(), which the user calls while all is alive. A thread of ours that calls the driver by
// itself is stopped before the interpreter goes down, in what it does not do next: stop() waits for the call that is
// under way.

// Note [Growing ahead]
// A chunk takes the time of some copies (its pages are cleared, then locked), so while copies go on it is taken before
// it is needed: by one thread of the arena's own, started at first use, that takes no signal and touches no Python.
// GrowthPlan says when and how much. A copy that finds no room waits for the chunk in the making, and takes one itself
// only if that did not do. Who waits for a turn comes before the next chunk ahead.
// Ahead of need nobody is told of a refusal: it is remembered, nothing more is taken ahead, and a copy that finds no
// room asks by itself and gets the reason.

class PinnedArena final : public SlotStore {
 public:
  // `synchronize` blocks the host until a point is reached. `page_bytes`: of chunks; smaller in tests.
  PinnedArena(HostRegistration registration, std::function<void(Point)> synchronize, ChunkPolicy policy = {},
              uint64_t page_bytes = kHugePageBytes);

  // Ends the thread, gives plain memory back, and leaks registered memory: for tests, since the arenas of a process are
  // never destroyed.
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

  void grow_ahead(uint64_t limit_bytes) override;
  void reserve(uint64_t capacity_bytes) override;
  void grow_on_need() override;
  uint64_t take_peak_bytes() override;
  uint64_t shrink(uint64_t needed_bytes) override;
  void stop() override;

  // Is a chunk in the making, or wanted ahead? False in a forked child.
  bool is_growing() const;

  // As RangeAllocator's, for tests.
  void check_invariants() const;

 private:
  class Turn;
  using Idle = std::vector<std::pair<PinnedChunk, std::vector<Point>>>;

  // With the lock held.
  bool fits(uint64_t nbytes) const;
  bool may_grow_ahead() const;
  void wake_if_wanted();

  // In a turn, without the lock.
  void take_chunk(uint64_t nbytes);  // throws StoreFull
  bool should_shrink(uint64_t needed_bytes) const;
  bool is_stopped() const;
  Idle take_idle_chunks();
  uint64_t give_back_chunks(const Idle& idle);

  static void* thread_main(void* arena);
  void work();

  const HostRegistration registration_;
  const std::function<void(Point)> synchronize_;
  const uint64_t page_bytes_;
  const ForkGuard fork_guard_;

  mutable std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  RangeAllocator ranges_{kAlignmentBytes};
  std::map<BlockId, PinnedChunk> chunks_;  // the keys are ranges_' blocks
  GrowthPlan plan_;
  uint64_t peak_bytes_ = 0;
  bool is_turn_taken_ = false;  // by who adds or removes blocks
  uint32_t waiting_count_ = 0;  // for a turn
  bool is_stopped_ = false;
  std::optional<pthread_t> thread_;

  std::atomic<uint64_t> grow_count_{0};
};

}  // namespace torchoffload
