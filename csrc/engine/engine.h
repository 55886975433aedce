// Engine: moves the saved tensors of one device to one tier and back, from the pack of a saved tensor to the release of
// its record. It opens tapes and decides about each save, and hands the rest to its parts.
// Ownership:     its parts. The parts of its backend outlive it.
// Thread safety: needs the GIL. A call that may block, such as one that enqueues a copy, releases the GIL for that time
//                (BlockingSection). Operations of other threads may run meanwhile, so the ledger is read again after
//                it. A record whose copy is being enqueued is held (Ledger::hold), and is not released meanwhile.
//                See Note [Copies that others come between].
// Failures:      a call that throws leaves ledger, windows, slots and budgets as if it had not been made. release()
//                never throws.
// Stream order:  the engine's StreamOrder makes every wait, and a Rule names it.
// Shutdown:      see Note [Ends of engines]; the last ones are leaked on purpose: see Note [No CUDA after main].
//
// The engine knows no tensors. It gets a tensor's memory (Memory), its version counter, and numbers.
// Its parts, each of which knows those before it: Records (the transitions of records and tapes, with the ledger, the
// windows, the lessons, the slots, the waits and the times), Offloader (copies out), Reloader (copies in).
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "core/ledger.h"
#include "device/backend.h"
#include "engine/context_state.h"
#include "engine/lessons.h"
#include "engine/offloader.h"
#include "engine/records.h"
#include "engine/reloader.h"
#include "engine/saved_bytes.h"
#include "engine/statistics.h"
#include "engine/thread_state.h"
#include "engine/timeline.h"
#include "system/gil.h"

namespace torchoffload {

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  explicit Engine(const Backend& backend) : records_(backend) {}

  const Backend& backend() const { return records_.backend; }
  const Ledger& ledger() const REQUIRES(gil) { return records_.ledger; }
  Lessons& lessons() REQUIRES(gil) { return records_.lessons; }  // for tests
  Timeline& timeline() REQUIRES(gil) { return records_.timeline; }
  void forget_learned_steps() REQUIRES(gil);  // for tests: forgets earlier steps, as a new process has none

  // True in a forked child of the process that made this engine: no device, store or thread behind it works there. See
  // Note [Forked children].
  bool is_inherited() const { return records_.is_inherited(); }

  // Call it before a tape is opened. Once in a process it blocks the host until the device has finished all work that
  // it was given before the engine listened to its allocator (R2).
  void settle() REQUIRES(gil);

  // Call it before a tape is opened. If no tape is alive except those that were left behind, it brings the store to the
  // size that the next step is expected to need. May block.
  void fit_store(ContextState& context) REQUIRES(gil);

  // Call it when a CUDA graph is being captured. Until the next step no memory is taken from the system in the
  // background. May block.
  void hold_growth() REQUIRES(gil) { records_.slots.hold_growth(); }

  // Is there no tape, no memory that waits to be dropped, and no pending copy of a record that was released?
  bool is_unused() const REQUIRES(gil) {
    return records_.ledger.live_tapes() == 0 && !records_.streams.has_deferred() &&
           !ThreadState::any_has_pending(offloader_);
  }
  // Threads that asked this engine last have asked none from now on.
  void forget_asked() const REQUIRES(gil) { ThreadState::forget_asked(reloader_); }
  // Releases the device memory of an engine without tapes, as far as possible now. May block.
  void release_idle() REQUIRES(gil);
  uint64_t tapes_opened() const REQUIRES(gil) { return records_.tapes_opened; }

  // ---- tapes ----

  // Opens a tape for one forward on one thread. First releases the reloaded bytes of ended graph tasks, and learns
  // times. May block.
  TapeId open_tape(std::shared_ptr<ContextState> context) REQUIRES(gil);
  // No save joins the tape any more. Does nothing for a tape that is closed already. May block while profile() is on.
  void close_tape(TapeId tape) REQUIRES(gil);
  void close_tape_of(RecordId record) REQUIRES(gil) { close_tape(records_.ledger.record(record).tape); }
  bool is_open(TapeId tape) const REQUIRES(gil) { return records_.ledger.is_open(tape); }
  // Call it once a tape was closed as its context was left: starts reloads for the expected backward. May block.
  void forward_ended(TapeId tape) REQUIRES(gil) { reloader_.forward_ended(tape); }
  // Gives an open tape these windows from its next save on. Waits until the bytes fit in the offload window. May block.
  // Part::Begins: a part of the tape begins with that save, which has this reload window; see TapeWindows::begin_part().
  enum class Part : uint8_t { Begins, GoesOn };
  void change_windows(TapeId tape, WindowBytes windows, Part part) REQUIRES(gil);
  // Waits until no more than these bytes are on their way out, of all tapes. May block.
  void drain_offloads(uint64_t most_bytes) REQUIRES(gil);
  TapeRow& row(TapeId tape) REQUIRES(gil) { return records_.row(tape); }

  // ---- saves ----

  // Joins the record that stands for these bytes, or makes one, whose copy is then pending on this thread.
  // Returns nullopt when there is none to join, the bytes that would move are below the minimum, and moving them would
  // free nothing. Throws std::runtime_error when the budget is spent and the user asked for an error.
  std::optional<RecordHandle> pack(const SavedBytes& saved, TapeId tape) REQUIRES(gil);

  // Call it before the program writes to the source of a record that nothing else joins, though it holds the source:
  // later work on the current stream may do so. Returns whether the record does without its source; if not, the caller
  // has to keep the bytes elsewhere. May block.
  bool release_source(RecordId id) REQUIRES(gil) { return offloader_.release_source(id); }

  // The record's bytes, ordered for the stream that is current. They stay on the device for as long as the caller holds
  // the returned DeviceBytes. May block.
  DeviceBytes unpack(RecordHandle& handle, bool in_backward) REQUIRES(gil) {
    return reloader_.unpack(handle, in_backward);
  }

  // Call it when a backward of this thread asks for a saved tensor that was kept outside of any engine: reloads go on
  // for the tape that the thread asked last. May block.
  static void go_on_reloading() REQUIRES(gil) { Reloader::go_on_reloading(); }

  // Call it when a handle dies. May block, unless copies complete in the background.
  void release(const RecordHandle& handle) REQUIRES(gil);

  // Enqueues this thread's pending copies whose operators have ended. `leaving` is a context at its exit: the operators
  // that packed under it have all ended. May block.
  static void flush_pending(const ContextState* leaving = nullptr) REQUIRES(gil) { Offloader::flush_pending(leaving); }

  // Appends the rows of the tapes that are alive.
  void append_live_rows(std::vector<TapeRow>& rows) const REQUIRES(gil);

 private:
  // ---- tapes and times: engine.cpp ----

  // Tells Lessons of the closed tape: when each record was saved last, and which storages are alive without us. Counts
  // the device bytes that were freed in the tape's row.
  void tell_closed(TapeId tape) REQUIRES(gil);
  // Hands to Lessons the times of timed tapes that are gone and whose end the device has reached.
  void learn_times() REQUIRES(gil);

  // ---- a save: pack.cpp ----

  // Adds a handle to a record that stands for the saved bytes already.
  RecordHandle join(RecordId id, const SavedBytes& saved, StreamId stream) REQUIRES(gil);
  // Makes a record of the bytes `moved`, with its first handle.
  RecordHandle add_record(const SavedBytes& saved, const Identity& identity, const Span& moved, StreamId allocated_on,
                          TapeId tape) REQUIRES(gil);
  // Decides whether a new record moves. If the budget is spent, notes a warning for the user or throws, as on_full says.
  Decision decide(TapeId tape, const SavedBytes& saved, uint64_t nbytes) REQUIRES(gil);
  // Tells Lessons of the tape's next record, and returns the lessons of earlier steps for it.
  Lessons::Known learned(TapeId tape, const SavedBytes& saved, uint64_t nbytes) REQUIRES(gil);
  // Is the tape's next record beyond the context's `fraction` of its bytes? Counts it among the tape's eligible bytes.
  bool is_beyond_fraction(HeldTape& tape, uint64_t nbytes) REQUIRES(gil);
  // Fills in the HeldRecord of a new record, charges its budget, and lists it as pending on this thread. A kept record
  // is listed too: if it counts towards the offload window, the window is drained when its turn comes.
  void fill_record(RecordId id, const SavedBytes& saved, StreamId allocated_on) REQUIRES(gil);
  // Counts a record that is kept from its first save on. One that was kept as needed_soon, tape_end or small_copy
  // counts towards the windows.
  void count_kept_from_start(RecordId id) REQUIRES(gil);

  Records records_;
  Offloader offloader_{records_};
  Reloader reloader_{records_, offloader_, [this] { return std::weak_ptr<const void>(weak_from_this()); }};
};

}  // namespace torchoffload
