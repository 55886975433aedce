// The engine's bookkeeping: tapes, saves, budget, slots, statistics. Nothing here waits or enqueues a copy.
#include <ATen/SequenceNumber.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <string>
#include <utility>

#include "autograd/engine.h"
#include "autograd/operation.h"
#include "autograd/pending.h"
#include "core/mutant.h"
#include "storage/host_memory.h"
#include "storage/local_world.h"
#ifdef TORCHOFFLOAD_TESTING
#include "device/logging_backend.h"
#endif

namespace torchoffload {

namespace {

uint64_t host_charged_bytes = 0;  // of the default budget, which all devices of the process share

}  // namespace

std::deque<Engine::PendingCopy>& Engine::pending_copies() {
  thread_local std::deque<PendingCopy> pending;
  return pending;
}

// ---- tapes ----

TapeId Engine::open_tape(std::shared_ptr<ContextState> context) {
  const bool is_step_begin = ledger_.live_tapes() == 0;
  const TapeId tape = ledger_.open_tape();
  if (tapes_.size() <= tape.index) tapes_.resize(tape.index + 1);
  TapeInfo& info = tapes_[tape.index];
  info = {};
  info.context = std::move(context);
  info.number = ++tapes_opened_;
  info.order_number = order_.opened(tape, is_step_begin);
  begin_trace(info);
  ++Statistics::global().live_tapes;
  return tape;
}

namespace {

// What this many steps in a row had in slots at once is what the next will. Less than that would fit the store anew
// with each thing that is learned.
constexpr uint32_t kStepsUntilKnown = 3;

}  // namespace

void Engine::fit_store(ContextState& context) {
  if (is_inherited() || Statistics::global().live_tapes > 0) return;
  const uint64_t needed_bytes = store_.take_peak_bytes();
  is_growth_held_ = false;
  same_step_count_ = needed_bytes == step_bytes_ ? same_step_count_ + 1 : 1;
  step_bytes_ = needed_bytes;
  const uint64_t limit_bytes = most_capacity_bytes(context);
  if (needed_bytes == 0 || same_step_count_ < kStepsUntilKnown) return store_.grow_ahead(limit_bytes);
  const BlockingSection blocking;
  store_.shrink(needed_bytes);
  store_.reserve(std::min(needed_bytes, limit_bytes));
}

void Engine::hold_growth() {
  if (std::exchange(is_growth_held_, true)) return;
  const BlockingSection blocking;
  store_.grow_on_need();
}

// Of the store, as far as this context's budget goes.
uint64_t Engine::most_capacity_bytes(ContextState& context) {
  (void)fits_budget(context, 0);
  if (context.options.budget_bytes) return store_.used_bytes() - context.charged_bytes + *context.options.budget_bytes;
  return default_budget_bytes_.value_or(0);
}

void Engine::close_tape(TapeId id) {
  if (!ledger_.is_open(id)) return;
  if (const auto& context = tapes_[id.index].context; context->options.fraction < 1)
    context->eligible_bytes[this] = tapes_[id.index].eligible_bytes;
  learn_tape(id);
  if (!is_inherited()) timeline_.note_close(tapes_[id.index].number);
  for (const Save& save : ledger_.tape(id).saves) {
    if (!ledger_.is_live(save.record)) continue;
    holdings(save.record).identity.reset();
    holdings(save.record).wrappers.clear();
  }
  if (ledger_.close_tape(id).gone) tape_is_gone(id);
}

void Engine::tape_is_gone(TapeId id) {
  stop_timing(tapes_[id.index], /*is_complete=*/true);
  Statistics::global().tape_finished(tapes_[id.index].row);
  --Statistics::global().live_tapes;
  tapes_[id.index] = {};
}

void Engine::append_live_rows(std::vector<TapeRow>& rows) const {
  for (const TapeInfo& tape : tapes_) {
    if (tape.context) rows.push_back(tape.row);
  }
}

// ---- saves ----

std::optional<RecordHandle> Engine::pack(const at::Tensor& tensor, const TensorLayout& layout, const Span& span,
                                         Extent extent, TapeId tape, const c10::VariableVersion* wrapper) {
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  const c10::VariableVersion& version = tensor.unsafeGetTensorImpl()->version_counter();
  const MemoryOrigin origin = backend_.origin_of(storage);
  Identity identity{&storage,       address_of(version), version.current_version(),
                    storage.data(), storage.nbytes(),    origin.allocation};
  if (wrapper != nullptr) {
    identity.wrapper_counter = address_of(*wrapper);
    identity.wrapper_version = wrapper->current_version();
  }
  ContextState& context = *tapes_[tape.index].context;
  const Span moved = extent == Extent::Storage ? Span{0, identity.nbytes} : span;
  std::optional<RecordId> id = ledger_.find(tape, identity, moved, layout.itemsize());
  if (id && was_written_through_a_wrapper(*id)) id.reset();
  if (id) {
    const Record& record = ledger_.record(*id);
    if (record.kept == KeptReason::None) {
      count(row(tape), &TapeRow::records_deduplicated, 1);
      count(row(tape), &TapeRow::bytes_deduplicated, span.nbytes());
    } else {
      note_kept(*id, record.kept, span.nbytes());
    }
    // Another stream uses the storage now; its memory waits for that one too, whoever drops it last: without us the
    // graph would hold it (R3).
    const StreamId stream = backend_.current_stream();
    if (stream != holdings(*id).packed_on && !mutated(Mutant::NoteUseAtJoin))
      backend_.note_use(*tensor.storage().unsafeGetStorageImpl(), stream);
    const auto* first = static_cast<const std::byte*>(identity.data) + span.begin;
    backend_.saw_pack(first, span.nbytes(), stream, at::sequence_number::peek());
  } else {
    if (moved.nbytes() < context.options.min_offload_bytes) return std::nullopt;
    id = add_record(tensor, identity, moved, origin.stream, tape);
  }
  if (wrapper != nullptr) holdings(*id).wrappers.note(*wrapper);
  return RecordHandle{*id, ledger_.add_handle(*id)};
}

RecordId Engine::add_record(const at::Tensor& tensor, const Identity& identity, const Span& moved,
                            StreamId allocated_on, TapeId tape) {
  const std::shared_ptr<ContextState> context = tapes_[tape.index].context;
  KeptReason learned = learned_reason(tapes_[tape.index], tensor, moved.nbytes());
  if (is_beyond_fraction(tapes_[tape.index], moved.nbytes())) learned = KeptReason::BeyondFraction;
  const bool fits = learned != KeptReason::None || fits_budget(*context, store_.slot_bytes(moved.nbytes()));
  if (!fits) store_is_full(*context, "the budget of host memory (host_budget_bytes) is spent");
  const RecordId id = ledger_.add_record(tape, identity, moved);
  if (holdings_.size() <= id.index) holdings_.resize(id.index + 1);
  Holdings& held = holdings_[id.index];
  held = {};
  const c10::Storage& storage = tensor.storage();
  if (!mutated(Mutant::IdentityHoldsStorage)) held.identity.emplace(storage.getWeakStorageImpl());
  held.version = tensor.unsafeGetTensorImpl()->version_counter();
  held.address_modulo = (reinterpret_cast<uintptr_t>(identity.data) + moved.begin) % kAlignmentBytes;
  held.number = static_cast<uint32_t>(tapes_[tape.index].record_count++);
  held.module = context->module;
  held.packed_on = backend_.current_stream();
  held.allocated_on = allocated_on;
  held.bytes = {storage, 0, held.packed_on, {}};
  if (!mutated(Mutant::NoteUseAtPack)) backend_.note_use(*storage.unsafeGetStorageImpl(), held.bytes.stream);
  if (!fits) {
    ledger_.keep(id, KeptReason::HostFull);
    note_kept(id, KeptReason::HostFull, moved.nbytes());
    return id;
  }
  if (learned != KeptReason::None) {
    keep_learned(id, learned);
  } else {
    held.charged_bytes = store_.slot_bytes(moved.nbytes());
    context->charged_bytes += held.charged_bytes;
    if (context->options.tier == Tier::Host) host_charged_bytes += held.charged_bytes;
    Statistics::global().charged_bytes += held.charged_bytes;
  }
  const uint64_t sequence_number = at::sequence_number::peek();
  const auto* first = static_cast<const std::byte*>(identity.data) + moved.begin;
  backend_.saw_pack(first, moved.nbytes(), held.bytes.stream, sequence_number);
  pending_copies().push_back({this, id, sequence_number, context.get()});
  return id;
}

// See Note [Versions of inner tensors]. Where a wrapper alone says that the bytes are the same, the tensor that the
// record was made of must be unchanged, too.
bool Engine::was_written_through_a_wrapper(RecordId id) {
  const Holdings& held = holdings(id);
  const Record& record = ledger_.record(id);
  // A record whose copy was not enqueued yet stands for whatever the storage holds.
  if (record.state == RecordState::Resident || mutated(Mutant::IdentityChecksWrapper)) return false;
  return held.wrappers.changed() ||
         (!held.wrappers.empty() && held.version.current_version() != record.identity.version);
}

bool Engine::is_pending(RecordId id) {
  return ledger_.is_live(id) && ledger_.record(id).state == RecordState::Resident &&
         ledger_.record(id).kept == KeptReason::None;
}

// ---- budget and slots ----

bool Engine::fits_budget(ContextState& context, uint64_t nbytes) {
  if (mutated(Mutant::BudgetHonoured)) return true;
  if (context.options.budget_bytes) return context.charged_bytes + nbytes <= *context.options.budget_bytes;
  if (context.options.tier == Tier::Disk) return true;  // the disk itself says when it is full
  const uint64_t capacity_bytes = store_.capacity_bytes();
  if (!default_budget_bytes_ || budget_read_at_capacity_ != capacity_bytes) {
    default_budget_bytes_ = default_budget_bytes(read_host_memory(), local_world_size(), capacity_bytes);
    budget_read_at_capacity_ = capacity_bytes;
  }
  return host_charged_bytes + nbytes <= *default_budget_bytes_;
}

void Engine::store_is_full(ContextState& context, const std::string& why) {
  const bool is_disk = context.options.tier == Tier::Disk;
  const std::string option = context.options.budget_bytes || !is_disk ? "host_budget_bytes" : "disk_dir";
  TORCH_CHECK(context.options.on_full == OnFull::Keep, "torchoffload: a saved tensor cannot be offloaded: ", why,
              ". Raise ", option, ", or set on_host_full=\"keep\" to let such tensors stay on the device.");
  context.warn_once(Warning::Full, "torchoffload: saved tensors stay on the device from here on: " + why + ". Set " +
                                       option + " to change that, or on_host_full=\"error\" to make it an error.");
}

// May block; the record may be gone, or used, after it.
std::optional<Slot> Engine::acquire_slot(RecordId id, std::vector<Point>& guards) {
  const uint64_t nbytes = ledger_.record(id).nbytes();
  std::optional<Slot> slot = store_.try_acquire(nbytes, guards);
  while (!slot) {
    try {
      const BlockingSection blocking;
      store_.grow(nbytes);
    } catch (const StoreFull& full) {
      if (!is_pending(id)) return std::nullopt;
      const std::shared_ptr<ContextState> context = tapes_[ledger_.record(id).tape.index].context;
      keep(id, KeptReason::HostFull);
      store_is_full(*context, full.what());
      return std::nullopt;
    }
#ifdef TORCHOFFLOAD_TESTING
    log_event("grow");
#endif
    if (!is_pending(id)) return std::nullopt;
    slot = store_.try_acquire(nbytes, guards);
  }
  return slot;
}

void Engine::release_slot(Holdings& held) {
  std::vector<Point> guards;
  if (!held.offload_end.is_beginning() && !mutated(Mutant::SlotGuardedByOffload)) guards.push_back(held.offload_end);
  if (!held.reload_end.is_beginning() && !mutated(Mutant::SlotGuardedByReload)) guards.push_back(held.reload_end);
  store_.release(held.slot, guards);
  Statistics::global().slot_released(held.slot.nbytes());
  held.slot = {};
}

void Engine::uncharge(Holdings& held, TapeId tape) {
  ContextState& context = *tapes_[tape.index].context;
  context.charged_bytes -= held.charged_bytes;
  if (context.options.tier == Tier::Host) host_charged_bytes -= held.charged_bytes;
  Statistics::global().charged_bytes -= held.charged_bytes;
  held.charged_bytes = 0;
}

void Engine::keep(RecordId id, KeptReason reason) {
  Holdings& held = holdings(id);
  const Record& record = ledger_.record(id);
  if (record.has_slot) release_slot(held);
  uncharge(held, record.tape);
  note_kept(id, reason, record.nbytes());
  ledger_.keep(id, reason);
}

void Engine::note_kept(RecordId id, KeptReason reason, uint64_t nbytes) {
  count_kept(row(ledger_.record(id).tape), context(id).row_of(holdings(id).module), reason, nbytes);
}

void Engine::note_offloaded(RecordId id) {
  const uint64_t nbytes = ledger_.record(id).nbytes();
  TapeRow& row = this->row(ledger_.record(id).tape);
  count(row, &TapeRow::records_offloaded, 1);
  count(row, &TapeRow::bytes_offloaded, nbytes);
  ModuleRow* const module = context(id).row_of(holdings(id).module);
  if (module == nullptr) return;
  ++module->records_offloaded;
  module->bytes_offloaded += nbytes;
}

// ---- windows ----

void Engine::enter_offload_window(RecordId id) {
  if (offloads_in_flight_.size() >= prune_offloads_at_) {
    std::erase_if(offloads_in_flight_, [&](RecordId known) {
      return !ledger_.is_live(known) || ledger_.record(known).state != RecordState::Offloading;
    });
    prune_offloads_at_ = 2 * offloads_in_flight_.size() + 64;
  }
  offloads_in_flight_.push_back(id);
  offload_window_bytes_ += ledger_.record(id).nbytes();
}

void Engine::leave_offload_window(RecordId id) { offload_window_bytes_ -= ledger_.record(id).nbytes(); }

void Engine::leave_reload_window(RecordId id) {
  reload_window_bytes_ -= ledger_.record(id).nbytes();
  std::erase(ahead_, id);
}

void Engine::leave_windows(RecordId id) {
  const Record& record = ledger_.record(id);
  if (record.state == RecordState::Offloading) leave_offload_window(id);
  if (record.prefetched) leave_reload_window(id);
}

Engine::Reloading& Engine::reloading() {
  thread_local Reloading latest;
  return latest;
}

// The window may have room by now: what was kept has died, or was asked for.
void Engine::go_on_reloading() {
  const auto [engine, tape, graph_task] = reloading();
  if (engine == nullptr || graph_task != torch::autograd::get_current_graph_task_id()) return;
  if (engine->is_inherited() || !engine->ledger_.has_tape(tape)) return;
  engine->reap();
  engine->prefetch(tape);
}

// Reloads ahead of the consumer, once per unpack in backward.
void Engine::prefetch(TapeId tape) {
  if (backend_.is_capturing()) return;
  const TapeInfo& info = tapes_[tape.index];
  const uint64_t kept_bytes = info.learned_bytes;
  const bool goes_on = info.context->options.learn && order_.is_latest(info.order_number);
  if (reload_ahead(tape, kept_bytes, /*stops_at_source=*/false) && goes_on) prefetch_coming(kept_bytes);
}

// R11: what was reloaded ahead and then passed by goes back to its slot.
void Engine::let_pass(TapeId tape, uint64_t place) {
  if (ahead_.empty() || mutated(Mutant::PassedByReturnsToOffloaded)) return;
  const uint64_t window_bytes = tapes_[tape.index].windows.reload_bytes;
  for (const RecordId id : Schedule::passed_by(ledger_, tape, place, ahead_, window_bytes)) pass_by(id);
}

// Returns whether all of the tape was looked at.
bool Engine::reload_ahead(TapeId id, uint64_t kept_bytes, bool stops_at_source) {
  const Tape& tape = ledger_.tape(id);
  if (tape.reload_cursor == tape.first_save) return true;
  const uint64_t window_bytes = tapes_[id.index].windows.reload_bytes;
  auto wanted = Schedule::take_reloads(ledger_, id, reload_window_bytes_ + kept_bytes, window_bytes, stops_at_source);
  std::erase_if(wanted, [&](const Schedule::Ahead& ahead) { return lock_given_up(ahead.record).has_value(); });
  start_reloads(wanted, Reload::Ahead);
  return ledger_.has_tape(id) && ledger_.tape(id).reload_cursor == ledger_.tape(id).first_save;
}

// One at a time, right after its copy was enqueued: should the next one fail, this one is known to be on its way.
void Engine::begin_reload(const Schedule::Ahead& started, Reload why) {
  const RecordId id = started.record;
  const uint64_t nbytes = ledger_.record(id).nbytes();
  if (why == Reload::Ahead) {
    ledger_.begin_reload_ahead(id, started.expected_at);
    ahead_.push_back(id);
    reload_window_bytes_ += nbytes;
    uint64_t& peak_bytes = Statistics::global().peak_reload_window_bytes;
    peak_bytes = std::max(peak_bytes, reload_window_bytes_);
  } else {
    ledger_.begin_reload(id);
  }
  TapeRow& row = this->row(ledger_.record(id).tape);
  count(row, &TapeRow::records_reloaded, 1);
  count(row, &TapeRow::bytes_reloaded, nbytes);
}

// The consumer's stream has waited for the reload.
void Engine::finish_reload(RecordId id) {
  const std::string failure = backend_.failure(holdings(id).reload_end);
  const bool was_ahead = ledger_.record(id).prefetched;
  if (was_ahead) leave_reload_window(id);
  if (failure.empty() || mutated(Mutant::FailedReadRaises)) {
    ledger_.finish_reload(id);
    return;
  }
  ledger_.pass_by(id);
  Operation::drop_later(std::move(std::exchange(holdings(id).bytes, {}).storage));
  // What failed ahead of its consumer, in a backward that may have ended long ago, is read again first.
  TORCH_CHECK(was_ahead, "torchoffload: a saved tensor could not be read back: ", failure);
}

}  // namespace torchoffload
