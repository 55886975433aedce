// Engine: carries out, for one device and tier, what its parts say: the sequence of a save, its copies, and its end.
// Ownership:     what each record holds, by the record's index. The parts of its backend are borrowed and live for
//                the process; so does the engine.
// Thread safety: needs the GIL. What may block, enqueueing among it, runs in a BlockingSection: operations of other
//                threads may come between, so the ledger is read again after it. A record whose copy is being enqueued
//                is held (Ledger::hold) so that it is not released meanwhile.
//                See Note [Copies that others come between].
// Failures:      what throws leaves ledger, windows, slots and budgets as if it had not been called; release() never
//                throws.
// Stream order:  every wait is made by its StreamOrder, and named by its Rule.
// Shutdown:      leaked on purpose; see Note [No CUDA after main].
//
// The engine knows no tensors. What it is given of one is memory (Memory), a version counter, and numbers.
//
// Its parts: Ledger (who holds what), Windows (what leaves or comes next), Lessons (what earlier steps say), SlotBudget
// (may it have a slot), StreamOrder (waits), TapeTimes and Timeline (times), HeldRecord (what one record holds).
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "core/chunked_vector.h"
#include "core/extent.h"
#include "core/ledger.h"
#include "core/mutant.h"
#include "core/windows.h"
#include "device/backend.h"
#include "device/memory.h"
#include "engine/context_state.h"
#include "engine/held_record.h"
#include "engine/lessons.h"
#include "engine/operation.h"
#include "engine/program.h"
#include "engine/slot_budget.h"
#include "engine/statistics.h"
#include "engine/stream_order.h"
#include "engine/tape_times.h"
#include "engine/thread_state.h"
#include "engine/timeline.h"
#include "engine/version_counter.h"
#include "storage/slot_store.h"
#include "system/process.h"

namespace torchoffload {

// One handle's share in a record.
struct RecordHandle {
  RecordId record;
  uint64_t save = 0;        // its number in the tape
  uint32_t seen_epoch = 0;  // the reload that it was given; see Ledger::mark_seen
};

// What is saved, as the engine is told of it.
struct SavedBytes {
  MemoryRef memory;
  Span span;                        // of the memory, in bytes, that the save reaches
  Extent extent = Extent::Storage;  // whether a record must stand for all of the memory, or for `span` at least
  uint64_t itemsize = 1;
  uint8_t dtype = 0;  // PyTorch's number of it
  uint8_t dim = 0;    // how many dimensions
  VersionRef version;
  VersionRef wrapper;  // of the wrapper subclass that it is an inner tensor of, or none
};

class Engine {
 public:
  explicit Engine(const Backend& backend)
      : backend_(backend),
        streams_(backend.streams),
        slots_(backend.store),
        timeline_(backend.streams, backend.memory),
        times_(backend.streams, timeline_) {}

  const Backend& backend() const { return backend_; }
  const Ledger& ledger() const { return ledger_; }
  Lessons& lessons() { return lessons_; }
  Timeline& timeline() { return timeline_; }
  void forget_learned_steps();  // for tests: as in a new process

  // True in a forked child of the process that made it: nothing behind it works there; see Note [Forked children].
  bool is_inherited() const { return fork_guard_.inherited(); }

  // Before a tape is opened. Waits, once in a process, for what the device was given before we knew of its memory (R2).
  // May block.
  void settle();

  // Before a tape is opened, and while none is alive: tells the store what is known of the next step's need. May block.
  void fit_store(ContextState& context);

  // A CUDA graph is being captured: nothing is taken from the system in the background until the next step. May block.
  void hold_growth() { slots_.hold_growth(); }

  // Tapes.
  TapeId open_tape(std::shared_ptr<ContextState> context);
  void close_tape(TapeId tape);  // nothing happens when it is closed already
  void close_tape_of(RecordId record) { close_tape(ledger_.record(record).tape); }
  bool is_open(TapeId tape) const { return ledger_.is_open(tape); }
  void forward_ended(TapeId tape);  // of a tape that was closed as its context was left
  TapeRow& row(TapeId tape) { return tapes_.at(tape.index).row; }

  // A save. Joins the record that stands for these bytes, or makes one, whose copy is then pending on this thread.
  // Returns nullopt when there is none to join, what would move is below the minimum, and moving it would free nothing.
  // Throws std::runtime_error when the budget is spent and the user asked for an error.
  std::optional<RecordHandle> pack(const SavedBytes& saved, TapeId tape);

  // The record's bytes, ordered for the stream that is current. They stay on the device for as long as what is returned
  // is held. May block.
  DeviceBytes unpack(RecordHandle& handle, bool in_backward);

  // A backward of this thread asked for a saved tensor that is no engine's: reloads go on for the tape that it is in.
  static void go_on_reloading();

  // A handle died.
  void release(const RecordHandle& handle);

  // Enqueues this thread's pending copies of operators that have ended. Those that packed under `leaving`, a context at
  // its exit, have. May block.
  static void flush_pending(const ContextState* leaving = nullptr);

  // Rows of the tapes that are alive.
  void append_live_rows(std::vector<TapeRow>& rows) const;

 private:
  struct TapeInfo {
    TapeId id;
    std::shared_ptr<ContextState> context;
    TapeRow row;
    uint64_t number = 0;  // in the order of opening
    uint64_t record_count = 0;
    uint64_t eligible_bytes = 0;  // of its records, also those beyond the context's fraction
    int asked_by = kNoGraphTask;  // the graph task that asked last, and what it reloaded is not given back yet
    bool has_backward_begun = false;
  };
  // A graph task that asked this engine for something. What `ended` refers to dies with it, however it ends.
  struct AskingTask {
    int id = kNoGraphTask;
    std::weak_ptr<const void> ended;
  };
  struct OffloadCopy;
  struct ReloadCopy;

  // While it lives, its record is not released.
  class Hold {
   public:
    Hold(Engine& engine, RecordId id) : engine_(&engine), id_(id) { engine.ledger_.hold(id); }
    Hold(Hold&& other) noexcept : engine_(std::exchange(other.engine_, nullptr)), id_(other.id_) {}
    Hold& operator=(Hold&&) = delete;
    ~Hold() {
      if (engine_ != nullptr) engine_->let_go(id_);
    }

   private:
    Engine* engine_;
    RecordId id_;
  };

  HeldRecord& held(RecordId id) { return held_[id.index]; }
  ContextState& context(RecordId id) { return *tapes_[ledger_.record(id).tape.index].context; }
  bool was_resized(RecordId id) { return held(id).was_resized(ledger_.record(id), backend_.memory); }

  // Tapes and times: engine.cpp.
  void tell_closed(TapeId tape);   // what of its memory is away, and what lives on without us
  void tape_is_gone(TapeId tape);  // with its last record
  void count_left_behind();        // for stats()
  void learn_times();              // of tapes that have gone, as far as the device has come
  Timeline::Entry entry(EntryKind kind, RecordId id);
  void mark(EntryKind kind, RecordId id, StreamId stream);  // a moment of the timeline. May block

  // A save: pack.cpp.
  RecordHandle join(RecordId id, const SavedBytes& saved, StreamId stream);
  RecordHandle add_record(const SavedBytes& saved, const Identity& identity, const Span& moved, StreamId allocated_on,
                          TapeId tape);
  Decision decide(TapeId tape, const SavedBytes& saved, uint64_t nbytes);  // may give a warning, or raise what is full
  Reason learned_reason(TapeId tape, const SavedBytes& saved, uint64_t nbytes);
  bool is_beyond_fraction(TapeInfo& tape, uint64_t nbytes);
  void fill_record(RecordId id, const SavedBytes& saved, StreamId allocated_on);
  void count_kept_from_start(RecordId id);
  void note_kept(RecordId id, Reason why, uint64_t nbytes);  // for stats()

  // Out: offload.cpp.
  void enqueue_offload(const PendingCopy& pending, StreamId& ordered_after);
  OffloadCopy plan_offload(RecordId id, StreamId stream, StreamId ordered_after);
  void enqueue(OffloadCopy& copy, StreamOrder::Batch& waits) const;  // without the GIL
  void offload_is_enqueued(RecordId id, const OffloadCopy& copy);
  bool is_pending(RecordId id);  // is its copy still to be enqueued?
  bool is_offloading(RecordId id) { return ledger_.is_live(id) && ledger_.record(id).state == RecordState::Offloading; }
  std::optional<Slot> acquire_slot(RecordId id,
                                   std::vector<Point>& guards);  // may block; nullopt: not pending any more
  std::span<const Point> guards_to_wait_for(StreamId stream, std::vector<Point>& guards);
  void drain_window(uint64_t window_bytes, uint64_t kept_bytes);  // waits, oldest copy first, until it is within
  void drain_window_of(RecordId id);                              // as its tape's limits say
  void finish_offload(RecordId id);                               // its source is given up
  void leave_offload_window(RecordId id) { windows_.offload_left(ledger_.record(id).nbytes()); }
  void keep(RecordId id, Reason why);  // it stays after all, and its slot goes back

  // What a backward asks for: unpack.cpp. A function for each state that a record may be in. Each may block; nullopt:
  // the state is to be read again.
  struct Ask;
  void backward_asks(Ask& ask);
  void backward_begins(TapeId tape);
  bool prefetch_for(Ask& ask);
  std::optional<DeviceBytes> unpack_source(Ask& ask);
  std::optional<DeviceBytes> unpack_away(Ask& ask);
  void wait_for_reload(Ask& ask);
  std::optional<DeviceBytes> unpack_here(Ask& ask);
  DeviceBytes hand_out(RecordId id, const DeviceBytes& bytes);
  void keep_if_resized(RecordId id);  // R10
  void make_room();                   // device memory is short: drops what can be had again

  // In: reload.cpp.
  enum class Reload : uint8_t { AskedFor, Ahead };
  void start_reloads(std::span<const Windows::Ahead> wanted, Reload why);
  ReloadCopy plan_reload(const Windows::Ahead& wanted, StreamId consumer);
  void enqueue(std::span<ReloadCopy> copies, StreamId consumer, Reload why, StreamOrder::Batch& waits) const;
  void enqueue(ReloadCopy& copy, StreamOrder::Batch& waits) const;
  void reload_is_enqueued(ReloadCopy& copy, StreamId consumer, Reload why);
  void begin_reload(const Windows::Ahead& started, Reload why);
  void finish_reload(RecordId id);  // the consumer's stream has waited for it
  std::optional<DeviceBytes> lock_given_up(RecordId id) { return held(id).lock_given_up(ledger_.record(id)); }

  // Ahead of the consumer: prefetch.cpp.
  void prefetch(TapeId tape);                 // once for each ask in backward
  void prefetch_coming(uint64_t kept_bytes);  // the ends of the tapes that are expected next
  bool reload_ahead(TapeId tape, uint64_t kept_bytes, AtSource at_source);  // was all of the tape looked at?
  void let_pass(TapeId tape, uint64_t place);                               // R11
  void pass_by(RecordId id);         // what was reloaded ahead goes back to its slot. May block
  void pass_by_others(TapeId tape);  // another backward was expected
  void leave_reload_window(RecordId id) { windows_.reload_left(id, ledger_.record(id).nbytes()); }
  void give_up_if_seen(RecordId id);  // R8: from here on the bytes are held weakly, until the next reload
  void give_up(RecordId id);          // nothing happens where no slot could bring the bytes back

  // The ends of graph tasks: graph_tasks.cpp. All may block.
  void note_asking(TapeId tape);
  void await_end_of(int graph_task);
  void give_back_of_ended();
  enum class Ahead : uint8_t { GoesBack, Stays };
  bool give_back(int graph_task, Ahead ahead);
  bool give_back(TapeId tape, int graph_task, Ahead ahead);

  // The end of a record: release.cpp.
  void reap();                        // takes note of what has ended since the last hook event
  void let_go(RecordId id) noexcept;  // as release(), by who held the record
  void leave_windows(RecordId id);
  void forget_learned(RecordId id);
  void drop_held(RecordId id, const Ledger::DroppedHandle& dropped);
  void release_slot(HeldRecord& held);

  const ForkGuard fork_guard_;
  const Backend backend_;
  StreamOrder streams_;
  SlotBudget slots_;
  Ledger ledger_;
  Windows windows_;
  Lessons lessons_;
  Timeline timeline_;
  TapeTimes times_;
  size_t left_behind_count_ = 0;  // as stats() has it
  uint64_t tapes_opened_ = 0;
  ChunkedVector<HeldRecord> held_;  // by record index; a reference stays valid while others are added
  ChunkedVector<TapeInfo> tapes_;   // by tape index; likewise
  std::vector<AskingTask> asking_tasks_;
};

}  // namespace torchoffload
