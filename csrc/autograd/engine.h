// Engine: carries out, for one device and tier, what ledger and windows say.
// Ownership:     what each record holds, by the record's index: its source or reload buffer, its slot, its points.
//                Backends and stores are borrowed and live for the process; so does the engine.
// Thread safety: needs the GIL. What may block, enqueueing among it, runs in a BlockingSection: operations of other
//                threads may come between, so the ledger is read again after it. A record whose copy is being enqueued
//                is held (Ledger::hold) so that it is not released meanwhile.
//                See Note [Copies that others come between].
// Failures:      what throws leaves ledger, windows, slots and budgets as if it had not been called; release() never
//                throws.
// Stream order:  every wait is made by its StreamOrder, and named by its Rule.
// Shutdown:      leaked on purpose; see Note [No CUDA after main].
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "autograd/context_state.h"
#include "autograd/operation.h"
#include "autograd/slot_budget.h"
#include "autograd/statistics.h"
#include "autograd/stream_order.h"
#include "autograd/thread_state.h"
#include "autograd/timeline.h"
#include "autograd/wrapper_versions.h"
#include "core/chunked_vector.h"
#include "core/extent.h"
#include "core/learner.h"
#include "core/ledger.h"
#include "core/mutant.h"
#include "core/tape_order.h"
#include "core/windows.h"
#include "device/backend.h"
#include "storage/slot_store.h"
#include "system/process.h"

namespace torchoffload {

// One handle's share in a record.
struct RecordHandle {
  RecordId record;
  uint64_t save = 0;        // its number in the tape
  uint32_t seen_epoch = 0;  // the reload that it was given; see Ledger::mark_seen
};

class Engine {
 public:
  Engine(Backend& backend, SlotStore& store)
      : backend_(backend), store_(store), streams_(backend), slots_(store), timeline_(backend) {}

  Backend& backend() { return backend_; }
  SlotStore& store() { return store_; }
  const Ledger& ledger() const { return ledger_; }
  const Learner& learner() const { return learner_; }
  void forget_learned_steps();                                // for tests: as in a new process
  void plan_as(const Plan& plan) { learner_.plan_as(plan); }  // for tests: each known tape goes by this plan
  Timeline& timeline() { return timeline_; }

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

  // A save of `span`. Joins the record that stands for these bytes, or makes one, whose copy is then pending on this
  // thread. `extent`: whether the record has to stand for all of the storage, or for `span` at least. `wrapper` is the
  // version of the wrapper subclass that it is an inner tensor of, or null. Returns nullopt when there is none to join,
  // what would move is below the minimum, and moving it would free nothing. Throws std::runtime_error when the budget
  // is spent and the user asked for an error.
  std::optional<RecordHandle> pack(const at::Tensor& tensor, const Span& span, Extent extent, TapeId tape,
                                   const c10::VariableVersion* wrapper = nullptr);

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
  struct Holdings {
    DeviceBytes bytes;  // the source (Resident, Offloading), or what unpack hands out (Reloading, Reloaded)
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> identity;  // while the tape is open
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> given_up;  // the last bytes handed out, if still alive
    DeviceBytes given_up_bytes;                                         // of `given_up`, without the storage
    c10::VariableVersion version;                                       // of its identity
    WrapperVersions wrappers;                                           // while the tape is open
    StreamId packed_on = kNoStream;                                     // at its first save
    StreamId allocated_on = kNoStream;                                  // its memory; kNoStream: not known
    uint64_t address_modulo = 0;
    Slot slot;
    Point offload_end;
    Point reload_end;
    std::vector<Point> other_reload_ends;  // of reloads of several threads at once: they guard the slot too
    uint64_t charged_bytes = 0;
    uint64_t learned_bytes = 0;  // kept because of what was learned: they count towards the windows
    uint32_t number = 0;         // in its tape
    uint32_t module = 0;         // that saved it first
    bool is_slot_lost = false;   // a copy of it has no known end: it is never used again
    bool was_needed = false;     // by a backward
    bool is_confirmed = false;   // I/O: the write is known to have succeeded
  };
  struct TapeInfo {
    TapeId id;
    std::shared_ptr<ContextState> context;
    TapeRow row;
    uint64_t number = 0;        // in the order of opening
    uint64_t order_number = 0;  // see TapeOrder
    Learner::Trace trace;
    std::optional<uint32_t> shape;  // what it was learned as, once closed
    uint64_t record_count = 0;
    uint64_t eligible_bytes = 0;  // of its records, also those beyond the context's fraction
    uint64_t latest_record = 0;   // by records_added_
    uint64_t largest_record_bytes = 0;
    uint64_t latest_operator = UINT64_MAX;  // the sequence number under which the latest record was saved
    uint64_t operator_bytes = 0;            // of the records that were saved under it
    int asked_by = kNoGraphTask;  // the graph task that asked last, and what it reloaded is not given back yet
    bool is_timed = false;
    bool has_backward_begun = false;
    uint64_t first_entry = 0;  // of the timeline, where timed
  };
  // A timed tape that is gone, whose times the device may not have come to yet.
  struct TimedTape {
    uint32_t shape = 0;
    uint64_t number = 0;
    size_t record_count = 0;
    uint64_t first_entry = 0;
    uint64_t end_entry = 0;
  };
  // A graph task that asked this engine for something. What `ended` refers to dies with it, however it ends.
  struct AskingTask {
    int id = kNoGraphTask;
    std::weak_ptr<const void> ended;
  };

  // In engine_copies.cpp.
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

  Holdings& holdings(RecordId id) { return holdings_[id.index]; }
  ContextState& context(RecordId id) { return *tapes_[ledger_.record(id).tape.index].context; }
  StreamId offload_stream(RecordId id);
  StreamId reload_stream(RecordId id, StreamId consumer);

  // Learning, in engine_learning.cpp.
  void begin_trace(TapeInfo& tape);
  RecordKind note_operator(TapeInfo& tape, const at::Tensor& tensor, uint64_t nbytes);
  KeptReason learned_reason(TapeInfo& tape, const at::Tensor& tensor, uint64_t nbytes);
  bool is_beyond_fraction(TapeInfo& tape, uint64_t nbytes);
  void keep_learned(RecordId id, KeptReason reason);
  void forget_learned(RecordId id);
  void learn_tape(TapeId tape);
  void backward_begins(TapeId tape);
  void stop_timing(TapeInfo& tape, bool is_complete);
  StepTimes times_of(const TimedTape& tape);
  void learn_times();
  Timeline::Entry entry(EntryKind kind, RecordId id);
  void mark(EntryKind kind, RecordId id, StreamId stream);

  // Offload.
  RecordHandle add_record(const at::Tensor& tensor, const Identity& identity, const Span& moved, StreamId allocated_on,
                          TapeId tape, const c10::VariableVersion* wrapper);
  void fill_record(RecordId id, const at::Tensor& tensor, StreamId allocated_on, KeptReason kept);
  void enqueue_offload(const PendingCopy& pending, StreamId& ordered_after);
  void enqueue(OffloadCopy& copy, StreamOrder::Batch& waits) const;
  void offload_is_enqueued(RecordId id, const OffloadCopy& copy);
  bool is_pending(RecordId id);
  bool is_offloading(RecordId id) { return ledger_.is_live(id) && ledger_.record(id).state == RecordState::Offloading; }
  bool was_written_through_a_wrapper(RecordId id);
  std::optional<Slot> acquire_slot(RecordId id, std::vector<Point>& guards);
  void drain_window(uint64_t window_bytes, uint64_t kept_bytes);
  void drain_window_of(RecordId id);
  void finish_offload(RecordId id);
  void enter_offload_window(RecordId id);
  void leave_offload_window(RecordId id);
  void leave_windows(RecordId id);
  bool was_resized(RecordId id);
  void keep(RecordId id, KeptReason reason);
  void note_kept(RecordId id, KeptReason reason, uint64_t nbytes);
  void note_offloaded(RecordId id);

  // Unpack: one function for each state that a record may be in. Each may block; nullopt: the state is to be read
  // again.
  struct Ask;
  void backward_asks(Ask& ask);
  bool prefetch_for(Ask& ask);
  std::optional<DeviceBytes> unpack_source(Ask& ask);
  std::optional<DeviceBytes> unpack_away(Ask& ask);
  void wait_for_reload(Ask& ask);
  std::optional<DeviceBytes> unpack_here(Ask& ask);

  // Reload.
  enum class Reload : uint8_t { AskedFor, Ahead };
  void start_reloads(std::span<const Windows::Ahead> wanted, Reload why);
  ReloadCopy plan_reload(const Windows::Ahead& wanted, StreamId consumer);
  void enqueue(std::span<ReloadCopy> copies, StreamId consumer, Reload why, StreamOrder::Batch& waits) const;
  void enqueue(ReloadCopy& copy, StreamOrder::Batch& waits) const;
  void reload_is_enqueued(ReloadCopy& copy, StreamId consumer, Reload why);
  void begin_reload(const Windows::Ahead& started, Reload why);
  void finish_reload(RecordId id);
  void prefetch(TapeId tape);
  void prefetch_coming(uint64_t kept_bytes);
  bool reload_ahead(TapeId tape, uint64_t kept_bytes, AtSource at_source);
  void pass_by_others(TapeId tape);
  void let_pass(TapeId tape, uint64_t place);
  void pass_by(RecordId id);
  void make_room();
  void leave_reload_window(RecordId id);
  DeviceBytes hand_out(RecordId id, const DeviceBytes& bytes);
  std::optional<DeviceBytes> lock_given_up(RecordId id);
  void give_up_if_seen(RecordId id);
  void give_up(RecordId id);
  bool slot_is_complete(RecordId id);
  void keep_if_resized(RecordId id);

  // The ends of graph tasks, in engine_tasks.cpp.
  void note_asking(TapeId tape);
  void await_end_of(int graph_task);
  void give_back_of_ended();
  enum class Ahead : uint8_t { GoesBack, Stays };
  bool give_back(int graph_task, Ahead ahead);
  bool give_back(TapeId tape, int graph_task, Ahead ahead);

  // Release.
  void reap();
  void let_go(RecordId id) noexcept;
  void drop_holdings(RecordId id, const Ledger::DroppedHandle& dropped);
  void release_slot(Holdings& held);
  void tape_is_gone(TapeId tape);

  const ForkGuard fork_guard_;
  Backend& backend_;
  SlotStore& store_;
  StreamOrder streams_;
  SlotBudget slots_;
  Ledger ledger_;
  Learner learner_;
  Timeline timeline_;
  std::deque<TimedTape> timed_tapes_;
  LinkRates link_;  // as last measured
  TapeOrder order_;
  StorageSet lived_on_, lives_on_;  // storages alive without us at the end of one tape, of two
  uint64_t learned_bytes_ = 0;      // kept as tape_end or small_copy, of all tapes
  uint64_t tapes_opened_ = 0;
  uint64_t records_added_ = 0;
  ChunkedVector<Holdings> holdings_;  // by record index; a reference stays valid while others are added
  ChunkedVector<TapeInfo> tapes_;     // by tape index; likewise
  Windows windows_;
  std::vector<AskingTask> asking_tasks_;
};

}  // namespace torchoffload
