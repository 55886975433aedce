// Offloader: the copies out of one engine. pending.cpp says when each begins, and offload.cpp how it is enqueued and how
// its source is dropped.
// Ownership:     none: the records and the parts of their engine outlive it. Each thread lists its own pending copies
//                (ThreadState).
// Thread safety: needs the GIL. A call that may block releases it for that time.
//                See Note [Copies that others come between].
// Failures:      a copy that cannot be enqueued leaves its record as it was, or kept if its store has no room.
// Stream order:  R1 to R5.
// Shutdown:      part of its engine.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/types.h"
#include "engine/context_state.h"
#include "engine/records.h"
#include "engine/thread_state.h"
#include "system/gil.h"

namespace torchoffload {

class Offloader {
 public:
  explicit Offloader(Records& records)
      : records_(records),
        backend_(records.backend),
        streams_(records.streams),
        slots_(records.slots),
        ledger_(records.ledger),
        windows_(records.windows),
        timeline_(records.timeline) {}

  // Enqueues the pending copies of this thread, as Engine::flush_pending() says. May block.
  static void flush_pending(const ContextState* leaving) REQUIRES(gil);
  // The thread saves this storage: its copies that wait for room are not enqueued before this operator has ended (R1).
  static void put_off_waiting(ThreadState& thread, const void* storage) REQUIRES(gil);

  // Waits for copies out, oldest first, until those in flight and the kept bytes fit in the window. May block.
  void drain_window(uint64_t window_bytes, uint64_t kept_bytes) REQUIRES(gil);

  // As Engine::release_source(). May block.
  bool release_source(RecordId id) REQUIRES(gil);

  // Called at each hook event. Frees the deferred memory that may be dropped by now. If copies complete in the
  // background, it also finishes the copies out that have ended, and never blocks; otherwise it may block.
  void free_deferred() REQUIRES(gil);

 private:
  struct Flush;
  struct OffloadCopy;

  HeldRecord& held(RecordId id) REQUIRES(gil) { return records_.held(id); }
  HeldTape& held(TapeId id) REQUIRES(gil) { return records_.held(id); }

  // ---- when: pending.cpp ----

  // Does the copy still wait? Not if its record was used, kept or released meanwhile.
  static bool is_waiting(const WaitingCopy& waiting) REQUIRES(gil);
  // The present point of the stream that fills the record's source. May block.
  Point point_behind_source(RecordId id) REQUIRES(gil);

  // ---- how: offload.cpp ----

  // Enqueues a pending copy, if its record is still to move, and waits as far as the offload window asks. `filled`: the
  // point behind all that has filled its source; the beginning: the present one. May block.
  void enqueue_offload(RecordId id, Point filled, FlushOrder& order) REQUIRES(gil);
  // As enqueue_offload(), for a live record. Throws StoreFull if the tier has no room, and WaitAbandoned.
  void try_enqueue_offload(RecordId id, Point filled, FlushOrder& order) REQUIRES(gil);
  // The stream that reads the source.
  StreamId offload_begins_on(RecordId id) REQUIRES(gil);
  // The arguments of the calls that enqueue the copy.
  OffloadCopy plan_offload(RecordId id, const FlushOrder& order) REQUIRES(gil);
  // Adds to the copy the waits that the offload window will ask for.
  void plan_window_waits(RecordId id, OffloadCopy& copy) REQUIRES(gil);
  // Makes the calls of a planned copy. Called without the GIL, and may block.
  void enqueue(OffloadCopy& copy, StreamOrder::Batch& waits);
  // Enters a copy that was enqueued into ledger, windows and counts. May block if the offload window is full.
  void offload_is_enqueued(RecordId id, const OffloadCopy& copy) REQUIRES(gil);
  bool can_name_allocation(RecordId id) REQUIRES(gil);  // the stream on which its source was allocated
  // A slot for the record, with the points that guard it. Grows the store if it has no room, which may block. nullopt:
  // the record is not pending any more. Throws StoreFull.
  std::optional<Slot> acquire_slot(RecordId id, std::vector<Point>& guards) REQUIRES(gil);
  // The guards for which the copy's stream has still to wait. If copies complete in the background, this function makes
  // the wait itself, which may block, and returns none.
  std::span<const Point> guards_to_wait_for(StreamId stream, std::vector<Point>& guards) REQUIRES(gil);
  void enter_offload_window(RecordId id) REQUIRES(gil);
  // As drain_window(), with the present limits of the record's tape. May block.
  void drain_window_of(RecordId id) REQUIRES(gil);
  // Records::is_offloading(), as CopyWindows asks for it.
  auto asks_offloading() REQUIRES(gil) {
    return [this](RecordId id) {
      gil.assert_held();
      return records_.is_offloading(id);
    };
  }
  // The source's stream waits for the copy out by now, or the copy has ended. Drops the source, or keeps the record if
  // the source was resized or the write failed.
  void finish_offload(RecordId id) REQUIRES(gil);

  Records& records_;
  const Backend& backend_;
  StreamOrder& streams_ GUARDED_BY(gil);
  SlotBudget& slots_ GUARDED_BY(gil);
  Ledger& ledger_ GUARDED_BY(gil);
  CopyWindows& windows_ GUARDED_BY(gil);
  Timeline& timeline_ GUARDED_BY(gil);
};

}  // namespace torchoffload
