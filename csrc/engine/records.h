// Records: the records and tapes of one engine, with all that their transitions touch. Offloader, Reloader and Engine
// share it.
// Ownership:     the memory and the slot of each record (HeldRecord), by the record's index, and HeldTape for each tape.
//                The parts of its backend outlive it.
// Thread safety: needs the GIL.
// Failures:      release() and release_hold() never throw.
// Stream order:  `streams` makes every wait of the engine, and a Rule names it.
// Shutdown:      part of its engine; see Note [No CUDA after main].
//
// A function here is a question about one record or tape, or a transition of it: it changes ledger, row, windows, slot,
// budget and counts together. Which copy begins when, is for the Offloader and the Reloader to say.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "core/chunked_vector.h"
#include "core/ledger.h"
#include "core/mutant.h"
#include "core/windows.h"
#include "device/backend.h"
#include "engine/context_state.h"
#include "engine/held_record.h"
#include "engine/held_tape.h"
#include "engine/lessons.h"
#include "engine/saved_bytes.h"
#include "engine/slot_budget.h"
#include "engine/statistics.h"
#include "engine/stream_order.h"
#include "engine/tape_times.h"
#include "engine/timeline.h"
#include "system/gil.h"
#include "system/process.h"

namespace torchoffload {

struct Records {
  explicit Records(const Backend& from)
      : backend(from),
        streams(backend.streams),
        slots(backend.store),
        timeline(backend.streams, backend.memory),
        times(backend.streams, timeline) {}

  // See Engine::is_inherited().
  bool is_inherited() const { return fork_guard.inherited(); }

  // ---- the rows: a reference stays valid while others are added ----

  HeldRecord& held(RecordId id) REQUIRES(gil) { return held_records[id.index]; }
  HeldTape& held(TapeId id) REQUIRES(gil) { return held_tapes[id.index]; }
  const HeldTape& held(TapeId id) const REQUIRES(gil) { return held_tapes[id.index]; }
  HeldTape& tape_of(RecordId id) REQUIRES(gil) { return held(ledger.record(id).tape); }
  TapeRow& row(TapeId id) REQUIRES(gil) { return held_tapes.at(id.index).row; }
  ContextState& context(RecordId id) REQUIRES(gil) { return *tape_of(id).context; }

  // ---- one record ----

  // While a Hold lives, its record is not released.
  class Hold {
   public:
    Hold(Records& records, RecordId id) REQUIRES(gil) : records_(&records), id_(id) { records.ledger.hold(id); }
    Hold(Hold&& other) noexcept : records_(std::exchange(other.records_, nullptr)), id_(other.id_) {}
    Hold& operator=(Hold&&) = delete;
    ~Hold() REQUIRES(gil) {
      if (records_ != nullptr) records_->release_hold(id_);
    }

   private:
    Records* records_;
    RecordId id_;
  };

  // Is the record's copy out still to be enqueued?
  bool is_pending(RecordId id) REQUIRES(gil);
  bool is_offloading(RecordId id) REQUIRES(gil) {
    return ledger.is_live(id) && ledger.record(id).state == RecordState::Offloading;
  }
  bool was_resized(RecordId id) REQUIRES(gil) { return held(id).was_resized(ledger.record(id), backend.memory); }
  // The bytes that a source keeps on the device: see Note [Parts in the offload window].
  uint64_t pinned_bytes(RecordId id) REQUIRES(gil) { return ledger.record(id).identity.nbytes; }
  // The bytes that an earlier consumer was given, if it still holds them.
  std::optional<DeviceBytes> lock_weak(RecordId id) REQUIRES(gil) { return held(id).lock_weak(ledger.record(id)); }

  // The record's copy does not wait for room any more, if it did. Call it before the record changes its state.
  void stop_waiting(RecordId id) REQUIRES(gil);
  void leave_offload_window(RecordId id) REQUIRES(gil) {
    windows.offload_left(std::exchange(held(id).window_bytes, 0));
  }
  void leave_reload_window(RecordId id) REQUIRES(gil) { windows.reload_left(id, ledger.record(id).nbytes()); }

  // The record stays on the device after all. Its slot and its share of the budget go back. Never blocks.
  void keep(RecordId id, Reason why) REQUIRES(gil);
  // Counts for stats() that a record, or a save that joined a kept one, stays.
  void note_kept(RecordId id, Reason why, uint64_t nbytes) REQUIRES(gil);

  // Weakens the record (see weaken()) if each live handle was given its bytes (R8). May block.
  void weaken_if_seen(RecordId id) REQUIRES(gil);
  // From here on the bytes are held weakly, until the next reload. Does nothing if no slot could bring them back. May
  // block.
  void weaken(RecordId id) REQUIRES(gil);

  // ---- the end of a record ----

  // A handle died. May block, unless copies complete in the background.
  void release(const RecordHandle& handle) REQUIRES(gil);
  // StreamOrder::defer_free(). While the timeline is on, `what` is added to it with the time for which the stream
  // waits.
  void defer_free(DeviceBytes bytes, Rule rule, const Timeline::Entry& what) noexcept REQUIRES(gil);

  // ---- one tape ----

  // Brings the count of tapes that were left behind up to date, here and in the statistics.
  void count_left_behind() REQUIRES(gil);
  // Forgets a tape that is closed and whose last record was released.
  void tape_is_gone(TapeId tape) REQUIRES(gil);

  // ---- times ----

  // An entry of the timeline for this record, without its times. Empty while the timeline is off.
  Timeline::Entry entry(EntryKind kind, RecordId id) REQUIRES(gil);
  // Enters the present moment of a stream into the timeline, if that is on. May block.
  void mark(EntryKind kind, RecordId id, StreamId stream) REQUIRES(gil);

  const ForkGuard fork_guard;
  const Backend backend;
  StreamOrder streams GUARDED_BY(gil);
  SlotBudget slots GUARDED_BY(gil);
  Ledger ledger GUARDED_BY(gil);
  CopyWindows windows GUARDED_BY(gil);
  Lessons lessons GUARDED_BY(gil);
  Timeline timeline GUARDED_BY(gil);
  TapeTimes times GUARDED_BY(gil);
  ChunkedVector<HeldRecord> held_records GUARDED_BY(gil);  // by index
  ChunkedVector<HeldTape> held_tapes GUARDED_BY(gil);      // by index
  uint64_t tapes_opened GUARDED_BY(gil) = 0;

 private:
  // With the last hold a record without handles is released. May block as release().
  void release_hold(RecordId id) noexcept REQUIRES(gil);
  void leave_windows(RecordId id) REQUIRES(gil);  // takes a record that is about to be released out of them
  // A kept record is about to be released: its bytes are subtracted from the windows again.
  void forget_learned(RecordId id) REQUIRES(gil);
  // Drops everything held for a record that the ledger has released: slot, budget, tape, and last the memory.
  void drop_held(RecordId id, const Ledger::DroppedHandle& dropped) REQUIRES(gil);
  // Returns the record's slot to the store, with the points that guard its reuse. Never blocks.
  void release_slot(HeldRecord& held) REQUIRES(gil);
  // The entry for a record that the ledger has released.
  Timeline::Entry drop_wait(const Ledger::DroppedHandle& dropped, const HeldRecord& held) const REQUIRES(gil);

  size_t left_behind_count GUARDED_BY(gil) = 0;  // as the statistics count it
};

}  // namespace torchoffload
