// PinnedArena: page-locked host memory, taken in chunks and cut into exact ranges of 512 bytes. If the driver refuses
// to page-lock memory, some of it is plain memory; see Note [Memory that is not locked].
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
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/range_allocator.h"
#include "storage/chunk.h"
#include "storage/growth_plan.h"
#include "storage/pinned_chunk.h"
#include "storage/slot_store.h"
#include "system/mutex.h"
#include "system/process.h"

namespace torchoffload {

// Note [No CUDA after main]
// After main has returned, static destructors run in an order that no program controls, and the CUDA driver may be gone
// already: a call into it then fails, hangs or crashes. The same holds in a forked child, which inherits a context that
// it cannot use. Besides, Python stops threads that hold tensors at any point of their work when the interpreter exits.
// So all objects that live as long as the process (stores, backends, queues and their threads, streams, events) are
// allocated once and never destroyed: no destructor, no atexit handler and no child of ours ever calls the driver. The
// system takes the memory, the threads and the unlinked file back when the process ends, however it ends. Only trim(),
// which the user calls, and shrink() give memory back earlier, while all is alive. A thread of ours that calls the
// driver by itself makes no further call once stop() was called, before the interpreter goes down; stop() waits for the
// call that is under way.

// Note [Growing ahead]
// Taking a chunk lasts as long as some copies, because its pages are cleared and then locked. So it is taken before it
// is needed, while copies go on, by one thread of the arena's own, which is started at first use, takes no signal and
// touches no Python. GrowthPlan says when and how much. A copy that finds no room waits for the chunk that is being
// taken, and takes one itself only if there is still no room then. Threads that wait for a turn come before the next
// chunk ahead. If the system refuses a chunk ahead, no error is raised: the refusal is remembered, and nothing more is
// taken ahead. A copy that finds no room then asks the system itself, and is told the reason.

// Note [Memory that is not locked]
// Some systems let no memory be page-locked, or only a little: WSL, containers, a low RLIMIT_MEMLOCK. Copies to and
// from plain memory are correct, too: the driver makes them in pieces, by way of memory of its own, and the thread that
// enqueues one waits meanwhile. That costs time, but the saved tensors still leave the device. So if the driver refuses
// even the least that a copy needs, the arena takes plain memory, and tells once the reason and the cost.

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
  std::string take_trouble() override;

  // For tests. True: from here on the arena gets no memory that is not locked. Either way, trouble is told anew.
  void refuse_plain_memory(bool refuses);

  // Would try_acquire() give a slot of `nbytes`?
  bool can_acquire(uint64_t nbytes) const;

  // Is a chunk being taken, or wanted ahead? False in a forked child.
  bool is_growing() const;

  // For tests; see RangeAllocator::check_invariants().
  void check_invariants() const;

 private:
  class Turn;
  using Idle = std::vector<std::pair<PinnedChunk, std::vector<Point>>>;

  bool can_acquire_locked(uint64_t nbytes) const REQUIRES(mutex_);
  // Is a chunk wanted ahead of need, and may the arena still grow?
  bool may_grow_ahead() const REQUIRES(mutex_);
  // Wakes the arena's thread if it may grow ahead. Starts the thread at first use.
  void wake_if_wanted() REQUIRES(mutex_);

  // ---- called in a turn ----

  // Takes a chunk from the system and adds it. Blocks. Throws StoreFull.
  void take_chunk(uint64_t nbytes) EXCLUDES(mutex_);
  // The same of memory that is not locked, after a refusal to lock some.
  void take_unlocked_chunk(uint64_t nbytes, const char* refusal) EXCLUDES(mutex_);
  void add_chunk(const PinnedChunk& chunk) EXCLUDES(mutex_);
  bool should_shrink(uint64_t needed_bytes) const EXCLUDES(mutex_);
  bool is_stopped() const EXCLUDES(mutex_);
  // Takes the chunks without a slot in use out of the allocator, with the points that guard them.
  Idle take_idle_chunks() EXCLUDES(mutex_);
  // Gives such chunks back to the system once the host has waited for their guards. Blocks. Returns their bytes.
  uint64_t release_chunks(const Idle& idle) EXCLUDES(mutex_);

  // The arena's thread: takes the chunks that are wanted ahead.
  static void* thread_main(void* arena);
  void work() EXCLUDES(mutex_);

  const HostRegistration registration_;
  const std::function<void(Point)> synchronize_;
  const uint64_t page_bytes_;
  const ForkGuard fork_guard_;

  mutable Mutex mutex_;
  CondVar changed_;
  RangeAllocator ranges_ GUARDED_BY(mutex_){kAlignmentBytes};
  std::map<BlockId, PinnedChunk> chunks_ GUARDED_BY(mutex_);  // the keys are ranges_' blocks
  GrowthPlan plan_ GUARDED_BY(mutex_);
  uint64_t peak_bytes_ GUARDED_BY(mutex_) = 0;
  bool is_turn_taken_ GUARDED_BY(mutex_) = false;  // a thread is adding or removing blocks
  uint32_t waiting_count_ GUARDED_BY(mutex_) = 0;  // how many threads wait for a turn
  bool is_stopped_ GUARDED_BY(mutex_) = false;
  bool refuses_plain_ GUARDED_BY(mutex_) = false;  // for tests
  bool has_told_trouble_ GUARDED_BY(mutex_) = false;
  std::string trouble_ GUARDED_BY(mutex_);  // that was not told yet
  std::optional<pthread_t> thread_ GUARDED_BY(mutex_);

  std::atomic<uint64_t> grow_count_{0};
};

}  // namespace torchoffload
