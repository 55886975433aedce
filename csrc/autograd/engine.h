// Engine: carries out, for one device and tier, what ledger and windows say.
// Ownership:     what each record holds, by the record's index: its source or reload buffer, its slot, its points.
//                Backends and stores are borrowed and live for the process; so does the engine.
// Thread safety: needs the GIL. What may block, enqueueing among it, runs in a BlockingSection: operations of other
//                threads may come between, so the ledger is read again after it. A record whose copy is being enqueued
//                is held (Ledger::hold) so that it is not released meanwhile.
//                See Note [Copies that others come between].
// Failures:      what throws leaves ledger, windows, slots and budgets as if it had not been called; retire(), and with
//                it release(), never throws.
// Stream order:  every cross-stream wait of the project is in engine*.cpp: what our two streams wait for in
//                engine_copies.cpp, all else through order() in engine_order.cpp. Each says who waits, for what, why.
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
#include "autograd/statistics.h"
#include "autograd/tensor_layout.h"
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
#include "storage/process.h"
#include "storage/slot_store.h"

namespace torchoffload {

// Device memory with the point until which a copy in flight touches it, and the stream that must be told to wait for
// that point before the memory may be handed on (R9).
struct DeviceBytes {
  c10::Storage storage;
  uint64_t base_bytes = 0;  // where the storage's first byte stands in the storage that was packed
  StreamId stream = kNoStream;
  Point busy_until;
  bool is_buffer = false;  // allocated by us on `stream`
};

// One handle's share in a record.
struct RecordHandle {
  RecordId record;
  uint64_t save = 0;        // its number in the tape
  uint32_t seen_epoch = 0;  // the reload that it was given; see Ledger::mark_seen
};

class Engine {
 public:
  Engine(Backend& backend, SlotStore& store) : backend_(backend), store_(store), timeline_(backend) {}

  Backend& backend() { return backend_; }
  SlotStore& store() { return store_; }
  const Ledger& ledger() const { return ledger_; }
  const Learner& learner() const { return learner_; }
#ifdef TORCHOFFLOAD_TESTING
  void forget_learned_steps();
  void plan_as(const Plan& plan) { learner_.plan_as(plan); }
#endif
  Timeline& timeline() { return timeline_; }

  // True in a forked child of the process that made it: nothing behind it works there; see Note [Forked children].
  bool is_inherited() const { return fork_guard_.inherited(); }

  // Before a tape is opened. Waits, once in a process, for what the device was given before we knew of its memory (R2).
  // May block.
  void settle();

  // Before a tape is opened, and while none is alive: tells the store what is known of the next step's need. May block.
  void fit_store(ContextState& context);

  // A CUDA graph is being captured: nothing is taken from the system in the background until the next step. May block.
  void hold_growth();

  // Tapes.
  TapeId open_tape(std::shared_ptr<ContextState> context);
  void close_tape(TapeId tape);  // nothing happens when it is closed already
  void close_tape_of(RecordId record) { close_tape(ledger_.record(record).tape); }
  bool is_open(TapeId tape) const { return ledger_.is_open(tape); }
  void forward_ended(TapeId tape);  // of a tape that was closed as its context was left
  TapeRow& row(TapeId tape) { return tapes_.at(tape.index).row; }

  // A save. Joins the record that stands for these bytes, or makes one, whose copy is then pending on this thread.
  // `extent`: whether the record has to stand for all of the storage, or for `span` at least.
  // `wrapper` is the version of the wrapper subclass that it is an inner tensor of, or null.
  // Returns nullopt when there is none to join, what would move is below the minimum, and moving it would free nothing.
  // Throws std::runtime_error when the budget is spent and the user asked for an error.
  std::optional<RecordHandle> pack(const at::Tensor& tensor, const TensorLayout& layout, const Span& span,
                                   Extent extent, TapeId tape, const c10::VariableVersion* wrapper = nullptr);

  // The saved tensor's bytes, ordered for the stream that is current, with the version counter of the saved tensor. May
  // block.
  at::Tensor unpack(RecordHandle& handle, const TensorLayout& layout, const c10::VariableVersion& version,
                    bool in_backward);

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
  static constexpr int kNoGraphTask = -1;
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
  // The tape that a backward of this thread asked for last.
  struct Reloading {
    Engine* engine = nullptr;
    TapeId tape;
    int graph_task = kNoGraphTask;
  };
  static Reloading& reloading();
  // A graph task that asked this engine for something. What `ended` refers to dies with it, however it ends.
  struct AskingTask {
    int id = kNoGraphTask;
    std::weak_ptr<const void> ended;
  };
  struct PendingCopy;
  static std::deque<PendingCopy>& pending_copies();

  // `waiter` was told to wait for a point of `producer`.
  struct Waited {
    StreamId waiter;
    StreamId producer;
    uint64_t serial;
  };
  // In engine_copies.cpp.
  struct OffloadCopy;
  struct ReloadCopy;
  struct Waits;

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
  bool fits_budget(ContextState& context, uint64_t nbytes);
  uint64_t most_capacity_bytes(ContextState& context);
  void enqueue_offload(const PendingCopy& pending, StreamId& ordered_after);
  void enqueue(OffloadCopy& copy, Waits& waits) const;
  void offload_is_enqueued(RecordId id, const OffloadCopy& copy);
  bool is_pending(RecordId id);
  bool is_offloading(RecordId id) { return ledger_.is_live(id) && ledger_.record(id).state == RecordState::Offloading; }
  bool was_written_through_a_wrapper(RecordId id);
  std::optional<Slot> acquire_slot(RecordId id, std::vector<Point>& guards);
  void store_is_full(ContextState& context, const std::string& why, const std::string& remedy);
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

  // Reload.
  enum class Reload : uint8_t { AskedFor, Ahead };
  void start_reloads(std::span<const Windows::Ahead> wanted, Reload why);
  ReloadCopy plan_reload(const Windows::Ahead& wanted, StreamId consumer);
  void enqueue(std::span<ReloadCopy> copies, StreamId consumer, Reload why, Waits& waits) const;
  void enqueue(ReloadCopy& copy, Waits& waits) const;
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
  at::Tensor hand_out(RecordId id, const TensorLayout& layout, const c10::VariableVersion& version,
                      const DeviceBytes& bytes);
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

  // Order and release.
  template <typename Call>
  void without_gil(StreamId stream, Call call) {
    std::optional<BlockingSection> blocking;
    if (backend_.may_block(stream)) blocking.emplace();
    call();
  }
  bool must_wait(StreamId waiter, Point point);
  void remember_wait(StreamId waiter, Point point);
  void order(StreamId waiter, Point point);
  void stall(StreamId waiter, Point point, EntryKind why, RecordId id);
  bool is_ordered(StreamId waiter, Point point) const;
  void retire(DeviceBytes bytes, Mutant mutant) noexcept;
  bool may_be_dropped(const DeviceBytes& bytes, Mutant mutant);
  bool is_lasting(StreamId stream) const;
  bool can_be_used(StreamId stream) const;
  void synchronize(Point point);
  void reap();
  void let_go(RecordId id) noexcept;
  void drop_holdings(RecordId id, const Ledger::DroppedHandle& dropped);
  void release_slot(Holdings& held);
  void charge(Holdings& held, ContextState& context, uint64_t nbytes);
  void uncharge(Holdings& held, TapeId tape);
  void tape_is_gone(TapeId tape);

  const ForkGuard fork_guard_;
  Backend& backend_;
  SlotStore& store_;
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
  std::vector<DeviceBytes> retired_;  // I/O in flight still touches them, or they could not be waited for yet
  std::optional<uint64_t> default_budget_bytes_;
  uint64_t budget_read_at_capacity_ = 0;
  uint64_t step_bytes_ = 0;  // in slots at once, at most, in the last step
  uint32_t same_step_count_ = 0;
  bool is_growth_held_ = false;
  std::vector<Waited> waited_;
};

}  // namespace torchoffload
