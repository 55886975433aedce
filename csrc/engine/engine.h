// Engine: moves the saved tensors of one device to one tier and back. Its parts decide; the engine carries their
// decisions out, from the pack of a saved tensor to the release of its record.
// Ownership:     the memory and the slot of each record (HeldRecord), by the record's index. The parts of its backend
//                outlive it.
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
// Its parts: Ledger (records, handles, tapes, states), Windows (which copy to wait for, which records to reload next),
// Lessons (learned from earlier steps), SlotBudget, StreamOrder (waits), TapeTimes, Timeline, HeldRecord (a record's
// memory and slot).
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "core/chunked_vector.h"
#include "core/ledger.h"
#include "core/mutant.h"
#include "core/windows.h"
#include "device/backend.h"
#include "device/memory.h"
#include "engine/coded_link.h"
#include "engine/context_state.h"
#include "engine/held_record.h"
#include "engine/lessons.h"
#include "engine/operation.h"
#include "engine/program.h"
#include "engine/saved_bytes.h"
#include "engine/slot_budget.h"
#include "engine/statistics.h"
#include "engine/stream_order.h"
#include "engine/tape_times.h"
#include "engine/thread_state.h"
#include "engine/timeline.h"
#include "engine/version_counter.h"
#include "storage/slot_store.h"
#include "system/gil.h"
#include "system/process.h"

namespace torchoffload {

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  explicit Engine(const Backend& backend)
      : backend_(backend),
        streams_(backend.streams),
        slots_(backend.store),
        coded_(backend),
        timeline_(backend.streams, backend.memory),
        times_(backend.streams, timeline_) {}

  const Backend& backend() const { return backend_; }
  const Ledger& ledger() const REQUIRES(gil) { return ledger_; }
  Lessons& lessons() REQUIRES(gil) { return lessons_; }  // for tests
  Timeline& timeline() REQUIRES(gil) { return timeline_; }
  void forget_learned_steps() REQUIRES(gil);  // for tests: forgets earlier steps, as a new process has none

  // True in a forked child of the process that made this engine: no device, store or thread behind it works there. See
  // Note [Forked children].
  bool is_inherited() const { return fork_guard_.inherited(); }

  // Call it before a tape is opened. Once in a process it blocks the host until the device has finished all work that
  // it was given before the engine listened to its allocator (R2).
  void settle() REQUIRES(gil);

  // Call it before a tape is opened. If no tape is alive except those that were left behind, it brings the store to the
  // size that the next step is expected to need. May block.
  void fit_store(ContextState& context) REQUIRES(gil);

  // Call it when a CUDA graph is being captured. Until the next step no memory is taken from the system in the
  // background. May block.
  void hold_growth() REQUIRES(gil) { slots_.hold_growth(); }

  bool is_unused() const REQUIRES(gil) {
    return ledger_.live_tapes() == 0 && !streams_.has_retired() && !coded_.is_ready();
  }
  // Releases the device memory of an engine without tapes, as far as possible now. May block.
  void release_idle() REQUIRES(gil);
  uint64_t tapes_opened() const REQUIRES(gil) { return tapes_opened_; }
  const CodedLink& coded() const { return coded_; }
  std::vector<CodingVerdict> codes_given_up() const REQUIRES(gil) { return lessons_.learner().codes_given_up(); }
  void release_staging() REQUIRES(gil);  // of coded copies, unless a tape is alive. May block
  // The code by which a record of this dtype would cross the link under these options, as far as the device's rates are
  // known, once coding is worth it. nullopt: it is not coded.
  std::optional<codec::Code> expected_code(const ContextOptions& options, uint8_t dtype, uint64_t nbytes) const
      REQUIRES(gil);

  // ---- tapes ----

  // Opens a tape for one forward on one thread. First gives back the reloaded bytes of ended graph tasks, and learns
  // times. May block.
  TapeId open_tape(std::shared_ptr<ContextState> context) REQUIRES(gil);
  // No save joins the tape any more. Does nothing for a tape that is closed already. May block while profile() is on.
  void close_tape(TapeId tape) REQUIRES(gil);
  void close_tape_of(RecordId record) REQUIRES(gil) { close_tape(ledger_.record(record).tape); }
  bool is_open(TapeId tape) const REQUIRES(gil) { return ledger_.is_open(tape); }
  // Call it once a tape was closed as its context was left: starts reloads for the expected backward. May block.
  void forward_ended(TapeId tape) REQUIRES(gil);
  // Gives an open tape these windows from its next save on. Waits until the bytes fit in the offload window. May block.
  void change_windows(TapeId tape, WindowBytes windows) REQUIRES(gil);
  TapeRow& row(TapeId tape) REQUIRES(gil) { return tapes_.at(tape.index).row; }

  // ---- saves ----

  // Joins the record that stands for these bytes, or makes one, whose copy is then pending on this thread.
  // Returns nullopt when there is none to join, the bytes that would move are below the minimum, and moving them would
  // free nothing. Throws std::runtime_error when the budget is spent and the user asked for an error.
  std::optional<RecordHandle> pack(const SavedBytes& saved, TapeId tape) REQUIRES(gil);

  // Call it before the program writes to the source of a record that nothing else joins, though it holds the source:
  // later work on the current stream may do so. Returns whether the record does without its source; if not, the caller
  // has to keep the bytes elsewhere. May block.
  bool release_source(RecordId id) REQUIRES(gil);

  // The record's bytes, ordered for the stream that is current. They stay on the device for as long as the caller holds
  // the returned DeviceBytes. May block.
  DeviceBytes unpack(RecordHandle& handle, bool in_backward) REQUIRES(gil);

  // Call it when a backward of this thread asks for a saved tensor that was kept outside of any engine: reloads go on
  // for the tape that the thread asked last. May block.
  static void go_on_reloading() REQUIRES(gil);

  // Call it when a handle dies. May block, unless copies complete in the background.
  void release(const RecordHandle& handle) REQUIRES(gil);

  // Enqueues this thread's pending copies whose operators have ended. `leaving` is a context at its exit: the operators
  // that packed under it have all ended. May block.
  static void flush_pending(const ContextState* leaving = nullptr) REQUIRES(gil);

  // Appends the rows of the tapes that are alive.
  void append_live_rows(std::vector<TapeRow>& rows) const REQUIRES(gil);

 private:
  struct TapeInfo {
    TapeId id;
    std::shared_ptr<ContextState> context;
    TapeRow row;
    uint64_t number = 0;  // counts the tapes in the order of opening
    uint64_t record_count = 0;
    uint64_t eligible_bytes = 0;  // of all its records, those beyond the context's fraction included
    int asked_by = kNoGraphTask;  // the graph task that asked last, until its reloads were given back
    bool has_backward_begun = false;
    bool was_alone = false;    // no other tape was alive when it was opened, except tapes that were left behind
    bool codes = false;        // its records are coded, if they can be
    uint64_t fetch_place = 0;  // if slots may be on a disk: the slots of saves from here on were looked at
  };
  // A graph task that asked this engine for bytes. The object of `ended` is destroyed with it, however it ends.
  struct AskingTask {
    int id = kNoGraphTask;
    std::weak_ptr<const void> ended;
  };
  struct Flush;
  struct OffloadCopy;
  struct ReloadCopy;

  // While a Hold lives, its record is not released.
  class Hold {
   public:
    Hold(Engine& engine, RecordId id) REQUIRES(gil) : engine_(&engine), id_(id) { engine.ledger_.hold(id); }
    Hold(Hold&& other) noexcept : engine_(std::exchange(other.engine_, nullptr)), id_(other.id_) {}
    Hold& operator=(Hold&&) = delete;
    ~Hold() REQUIRES(gil) {
      if (engine_ != nullptr) engine_->let_go(id_);
    }

   private:
    Engine* engine_;
    RecordId id_;
  };

  HeldRecord& held(RecordId id) REQUIRES(gil) { return held_[id.index]; }
  ContextState& context(RecordId id) REQUIRES(gil) { return *tapes_[ledger_.record(id).tape.index].context; }
  bool was_resized(RecordId id) REQUIRES(gil) { return held(id).was_resized(ledger_.record(id), backend_.memory); }

  // ---- tapes and times: engine.cpp ----

  // Tells Lessons of the closed tape: when each record was saved last, and which storages are alive without us. Counts
  // the device bytes that were freed in the tape's row.
  void tell_closed(TapeId tape) REQUIRES(gil);
  // Forgets a tape that is closed and whose last record was released.
  void tape_is_gone(TapeId tape) REQUIRES(gil);
  // Brings the statistics' count of tapes that were left behind up to date.
  void count_left_behind() REQUIRES(gil);
  // Hands to Lessons the times of timed tapes that are gone and whose end the device has reached.
  void learn_times() REQUIRES(gil);
  // An entry of the timeline for this record, without its times. Empty while the timeline is off.
  Timeline::Entry entry(EntryKind kind, RecordId id) REQUIRES(gil);
  // Enters the present moment of a stream into the timeline, if that is on. May block.
  void mark(EntryKind kind, RecordId id, StreamId stream) REQUIRES(gil);

  // ---- a save: pack.cpp ----

  // Adds a handle to a record that stands for the saved bytes already.
  RecordHandle join(RecordId id, const SavedBytes& saved, StreamId stream) REQUIRES(gil);
  // Makes a record of the bytes `moved`, with its first handle.
  RecordHandle add_record(const SavedBytes& saved, const Identity& identity, const Span& moved, StreamId allocated_on,
                          TapeId tape) REQUIRES(gil);
  struct NewRecord {
    Decision decision;
    uint64_t slot_bytes = 0;
    RecordCode code = {};
  };
  // Decides whether a new record moves, with which code and slot. If the budget is spent, notes a warning for the user
  // or throws, as on_full says.
  NewRecord decide(TapeId tape, const SavedBytes& saved, uint64_t nbytes) REQUIRES(gil);
  // Tells Lessons of the tape's next record, and returns the lessons of earlier steps for it.
  Lessons::Known learned(TapeId tape, const SavedBytes& saved, uint64_t nbytes) REQUIRES(gil);
  // Is the tape's next record beyond the context's `fraction` of its bytes? Counts it among the tape's eligible bytes.
  bool is_beyond_fraction(TapeInfo& tape, uint64_t nbytes) REQUIRES(gil);
  // Fills in the HeldRecord of a new record, charges its budget, and lists it as pending on this thread. A kept record
  // is listed too: if it counts towards the offload window, the window is drained when its turn comes.
  void fill_record(RecordId id, const SavedBytes& saved, StreamId allocated_on) REQUIRES(gil);
  // Counts a record that is kept from its first save on. One that was kept as needed_soon, tape_end or small_copy
  // counts towards the windows.
  void count_kept_from_start(RecordId id) REQUIRES(gil);
  // Counts for stats() that a record, or a save that joined a kept one, stays.
  void note_kept(RecordId id, Reason why, uint64_t nbytes) REQUIRES(gil);

  // ---- records that cross the link coded: coding.cpp ----

  // Begins to make the code ready for tapes under these options, if they may ask for it, and takes staging memory once
  // it is ready. Returns whether the tape that is being opened is coded. May block, but never for the code.
  bool prepare_coding(const ContextOptions& options) REQUIRES(gil);
  RecordCode code_for(const TapeInfo& tape, uint8_t dtype, uint64_t nbytes, const Lessons::Known& known) const
      REQUIRES(gil);
  // The capacity of a record's slot: room for its bytes, and for its coded bytes if it is coded now or may be in a
  // later step.
  uint64_t slot_bytes_for(const ContextOptions& options, uint8_t dtype, uint64_t nbytes, const RecordCode& code) const
      REQUIRES(gil);
  void count_coded(RecordId id, codec::Code code) REQUIRES(gil);
  // Learns from the slot of a coded record, or of one with a candidate, before it is released. Counts the exceptions.
  void learn_from_slot(const HeldRecord& held, const Ledger::DroppedHandle& dropped) REQUIRES(gil);

  // ---- copies out: pending.cpp says when, and offload.cpp how ----

  // Enqueues one pending copy, if its record is still to move, and waits as far as the offload window asks. May block.
  void enqueue_offload(const PendingCopy& pending, FlushOrder& order) REQUIRES(gil);
  // As enqueue_offload(), for a live record. Throws StoreFull if the tier has no room, and WaitAbandoned.
  void try_enqueue_offload(const PendingCopy& pending, FlushOrder& order) REQUIRES(gil);
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
  // Is the record's copy still to be enqueued?
  bool is_pending(RecordId id) REQUIRES(gil);
  bool can_name_allocation(RecordId id) REQUIRES(gil);  // the stream on which its source was allocated
  // The record's copy does not wait for room any more, if it did. Call it before the record changes its state.
  void stop_waiting(RecordId id) REQUIRES(gil);
  static bool is_waiting(const PendingCopy& copy) REQUIRES(gil);
  // The thread saves this storage: its copies that wait for room are not enqueued before this operator has ended (R1).
  static void put_off_waiting(const void* storage) REQUIRES(gil);
  bool is_offloading(RecordId id) REQUIRES(gil) {
    return ledger_.is_live(id) && ledger_.record(id).state == RecordState::Offloading;
  }
  // A slot for the record, with the points that guard it. Grows the store if it has no room, which may block. nullopt:
  // the record is not pending any more. Throws StoreFull.
  std::optional<Slot> acquire_slot(RecordId id, std::vector<Point>& guards) REQUIRES(gil);
  // The guards for which the copy's stream has still to wait. If copies complete in the background, this function makes
  // the wait itself, which may block, and returns none.
  std::span<const Point> guards_to_wait_for(StreamId stream, std::vector<Point>& guards) REQUIRES(gil);
  // Waits for copies out, oldest first, until those in flight and the kept bytes fit in the window. May block.
  void drain_window(uint64_t window_bytes, uint64_t kept_bytes) REQUIRES(gil);
  // As drain_window(), with the present limits of the record's tape. May block.
  void drain_window_of(RecordId id) REQUIRES(gil);
  // is_offloading(), as Windows asks for it.
  auto asks_offloading() REQUIRES(gil) {
    return [this](RecordId id) {
      gil.assert_held();
      return is_offloading(id);
    };
  }
  // The source's stream waits for the copy out by now, or the copy has ended. Drops the source, or keeps the record if
  // the source was resized or the write failed.
  void finish_offload(RecordId id) REQUIRES(gil);
  // The bytes that a source keeps on the device: see Note [Parts in the offload window].
  uint64_t pinned_bytes(RecordId id) REQUIRES(gil) { return ledger_.record(id).identity.nbytes; }
  void enter_offload_window(RecordId id) REQUIRES(gil);
  void leave_offload_window(RecordId id) REQUIRES(gil) {
    windows_.offload_left(std::exchange(held(id).window_bytes, 0));
  }
  // The record stays on the device after all. Its slot and its share of the budget go back. Never blocks.
  void keep(RecordId id, Reason why) REQUIRES(gil);

  // ---- the records that a backward asks for: unpack.cpp ----

  // There is one function for each state that a record may be in. Each may block. Those that return an optional return
  // nullopt if the state has to be read again.
  struct Ask;
  // Notes which save a backward asks for, and returns the records that it passed by to their slots.
  void backward_asks(Ask& ask) REQUIRES(gil);
  // Notes the first ask of a tape's backward. If another backward was expected, the records reloaded for that one go
  // back to their slots.
  void backward_begins(TapeId tape) REQUIRES(gil);
  // A wait to make among the calls of a reload, if one is started: the GIL is then released once for both.
  using AlsoWait = std::optional<StreamOrder::Wanted>;
  // Starts reloads ahead of the consumer, once for each ask. Returns whether it did so now: it may have blocked then.
  bool prefetch_for(Ask& ask, const AlsoWait& also = {}) REQUIRES(gil);
  std::optional<DeviceBytes> unpack_source(Ask& ask) REQUIRES(gil);  // Resident or Offloading
  std::optional<DeviceBytes> unpack_away(Ask& ask) REQUIRES(gil);    // Offloaded
  // The record's slot with its bytes in memory. Blocks while they are on a disk. Throws if they cannot be read.
  HeldSlot hold_slot(RecordId id) REQUIRES(gil);
  void wait_for_reload(Ask& ask) REQUIRES(gil);                    // Reloading
  std::optional<DeviceBytes> unpack_here(Ask& ask) REQUIRES(gil);  // Reloaded
  // Returns the bytes after the allocator was told that the current stream uses them. Never blocks.
  DeviceBytes hand_out(RecordId id, const DeviceBytes& bytes) REQUIRES(gil);
  // Keeps a record whose source was resized while its copy was under way (R10). Throws if the source has become too
  // small. Never blocks.
  void keep_if_resized(RecordId id) REQUIRES(gil);
  // Device memory is short: drops buffers reloaded ahead, and sources on their way out, of every tape. May block.
  void free_device_memory() REQUIRES(gil);

  // ---- copies in: reload.cpp ----

  enum class Reload : uint8_t { AskedFor, Ahead };
  // Starts the reloads of those records that are Offloaded. May block.
  void start_reloads(std::span<const Windows::Ahead> wanted, Reload why, const AlsoWait& also = {}) REQUIRES(gil);
  // The arguments of the calls that enqueue the copy. nullopt: the record's slot is not in memory.
  std::optional<ReloadCopy> plan_reload(const Windows::Ahead& wanted, StreamId consumer) REQUIRES(gil);
  // Allocates the buffers. Of the copies ahead only the first ones may find memory. Called without the GIL.
  void allocate(std::span<ReloadCopy> copies, Reload why) const;
  // Enqueues the copies that have buffers. Called without the GIL, and may block.
  void enqueue(std::span<ReloadCopy> copies, StreamId consumer, StreamOrder::Batch& waits);
  void enqueue(ReloadCopy& copy, StreamOrder::Batch& waits);
  // Gives the buffer of a copy that was enqueued to the record, or retires it if another thread has reloaded the record
  // meanwhile. Only the latter may block.
  void reload_is_enqueued(ReloadCopy& copy, StreamId consumer, Reload why) REQUIRES(gil);
  // Enters a reload into ledger, windows and counts.
  void begin_reload(const Windows::Ahead& started, Reload why) REQUIRES(gil);
  // The consumer's stream waits for the reload by now. Throws if the store could not read bytes that a consumer asked
  // for. A read ahead that failed only puts the record back, to be read again.
  void finish_reload(RecordId id) REQUIRES(gil);
  // The bytes that an earlier consumer was given, if it still holds them.
  std::optional<DeviceBytes> lock_weak(RecordId id) REQUIRES(gil) { return held(id).lock_weak(ledger_.record(id)); }

  // ---- reloads ahead of the consumer: prefetch.cpp ----

  // Starts reloads ahead for a tape that was asked, and for the tapes after it, as far as the window goes. May block.
  void prefetch(TapeId tape, const AlsoWait& also = {}) REQUIRES(gil);
  // Starts reloads of the ends of the tapes whose backwards are expected next. May block.
  void prefetch_coming(uint64_t kept_bytes) REQUIRES(gil);
  // Starts reloads of one tape as far as the window goes. Returns whether all of the tape was looked at. May block.
  bool reload_ahead(TapeId tape, uint64_t kept_bytes, AtSource at_source, const AlsoWait& also = {}) REQUIRES(gil);
  // If slots may be on a disk: begins to read those that are reloaded next, as far as there is room in memory.
  void fetch_ahead(TapeId tape) REQUIRES(gil);
  // Passes by the records that the consumer, now at `place`, has left behind it by more than the reload window (R11).
  // May block.
  void let_pass(TapeId tape, uint64_t place) REQUIRES(gil);
  // Returns a record that was reloaded ahead to its slot, unused: its buffer is retired. May block.
  void pass_by(RecordId id) REQUIRES(gil);
  // Passes by the records reloaded ahead for other tapes than this one, if their backwards have not begun. May block.
  void pass_by_others(TapeId tape) REQUIRES(gil);
  void leave_reload_window(RecordId id) REQUIRES(gil) { windows_.reload_left(id, ledger_.record(id).nbytes()); }
  // Weakens the record (see weaken()) if each live handle was given its bytes (R8). May block.
  void weaken_if_seen(RecordId id) REQUIRES(gil);
  // From here on the bytes are held weakly, until the next reload. Does nothing if no slot could bring them back. May
  // block.
  void weaken(RecordId id) REQUIRES(gil);

  // ---- the ends of graph tasks: graph_tasks.cpp ----

  // Notes that the current graph task asks for the tape, and arranges for its end. May block.
  void note_asking(TapeId tape) REQUIRES(gil);
  // Has autograd call back at the end of the graph task, to give back its reloads. Does nothing if that was arranged
  // already.
  void await_end_of(int graph_task) REQUIRES(gil);
  // Gives back the reloads of ended graph tasks: of those that failed, and of those whose reloads could not be given
  // back when they ended. May block.
  void give_back_of_ended() REQUIRES(gil);
  enum class Ahead : uint8_t { GoesBack, Stays };
  // Gives back the reloads of a graph task for the tapes that no other task has asked since: for all of them, or for
  // one. `ahead` says whether records reloaded ahead of their consumer go back too. Returns whether all of it went
  // back. May block.
  bool give_back(int graph_task, Ahead ahead) REQUIRES(gil);
  bool give_back(TapeId tape, int graph_task, Ahead ahead) REQUIRES(gil);

  // ---- the end of a record: release.cpp ----

  // Called at each hook event. Drops the retired memory that may be dropped by now. If copies complete in the
  // background, it also finishes the copies out that have ended, and never blocks; otherwise it may block.
  void reap() REQUIRES(gil);
  // With the last hold a record without handles is released. May block as release().
  void let_go(RecordId id) noexcept REQUIRES(gil);
  void leave_windows(RecordId id) REQUIRES(gil);  // takes a record that is about to be released out of them
  // A kept record is about to be released: its bytes are subtracted from the windows again.
  void forget_learned(RecordId id) REQUIRES(gil);
  // Drops everything held for a record that the ledger has released: slot, budget, tape, and last the memory.
  void drop_held(RecordId id, const Ledger::DroppedHandle& dropped) REQUIRES(gil);
  // Returns the record's slot to the store, with the points that guard its reuse. Never blocks.
  void release_slot(HeldRecord& held) REQUIRES(gil);
  // StreamOrder::retire(). While the timeline is on, `what` is added to it with the time for which the stream waits.
  void retire(DeviceBytes bytes, Rule rule, const Timeline::Entry& what) noexcept REQUIRES(gil);
  // The entry for a record that the ledger has released.
  Timeline::Entry drop_wait(const Ledger::DroppedHandle& dropped, const HeldRecord& held) const REQUIRES(gil);

  const ForkGuard fork_guard_;
  const Backend backend_;
  StreamOrder streams_ GUARDED_BY(gil);
  SlotBudget slots_ GUARDED_BY(gil);
  CodedLink coded_;
  Ledger ledger_ GUARDED_BY(gil);
  Windows windows_ GUARDED_BY(gil);
  Lessons lessons_ GUARDED_BY(gil);
  Timeline timeline_ GUARDED_BY(gil);
  TapeTimes times_ GUARDED_BY(gil);
  size_t left_behind_count_ GUARDED_BY(gil) = 0;  // as the statistics count it
  uint64_t tapes_opened_ GUARDED_BY(gil) = 0;
  ChunkedVector<HeldRecord> held_ GUARDED_BY(gil);  // by record index; a reference stays valid while others are added
  ChunkedVector<TapeInfo> tapes_ GUARDED_BY(gil);   // by tape index; a reference stays valid likewise
  std::vector<AskingTask> asking_tasks_ GUARDED_BY(gil);
};

}  // namespace torchoffload
